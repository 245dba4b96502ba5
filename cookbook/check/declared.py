"""Whether the model that TorchTitan builds is quantized as the precision declares.

The options have been compared already (`cells/rules/overlays.py`); a filter that leaves no layer,
or a GPU for which TorchTitan takes another kernel, shows in the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, TORCHTITAN, Finding
from cookbook.config.overlay import OF_PRECISION

_REFERENCE = f"{TORCHTITAN}/components/quantization"


def undeclared(cell: Cell, views: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """An error for each thing that the job's first step would find other than declared.

    Args:
        views: what the fake world says of one rank of every pipeline stage.
    """
    for key in OF_PRECISION:
        declared, found = cell.precision.expects(key), _found(views, key)
        if declared == found:
            continue
        yield Finding(
            ERROR,
            "declaration",
            "",
            f"precision {cell.precision.name} declares {key} {declared}, and in the model that "
            f"TorchTitan builds {found} is active: the job would stop at its first step",
            f"correct the options, or `expect` in {cell.precision.path.name}",
            _REFERENCE,
        )


def _found(views: Sequence[Mapping[str, Any]], key: str) -> str:
    """What all stages have; a stage without experts, or without a layer to quantize, has no say."""
    words = {word for view in views for word in (view["active"][key] or "").split(" and ") if word}
    if key == "linear_layers":
        words = words - {"bf16"} or words
    return " and ".join(sorted(words)) or "none"
