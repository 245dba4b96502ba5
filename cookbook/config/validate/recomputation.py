"""What the options that recompute less refuse: what is selected, operators that are saved, layers
that are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cookbook.base.errors import nearest
from cookbook.config.cell import LAYERS_KEPT, SAVE_LIST, SAVED_OPERATORS, Cell
from cookbook.config.finding import ERROR, TORCHTITAN, Finding

_SELECTED = "activation_checkpoint.selective_ac_option"
_REFERENCE = f"{TORCHTITAN}/distributed/activation_checkpoint.py"


def selected(cell: Cell) -> Iterator[Finding]:
    """Operators, or every n-th layer: TorchTitan ends on any other word once the model is built.

    Of 0 it recomputes every layer, which is called `full`.
    """
    chosen = cell.options[_SELECTED]
    if chosen == "op" or re.fullmatch("0*[1-9][0-9]*", chosen):
        return
    remedy = "did you mean 'op'?" if nearest(chosen, ["op"]) else ""
    if chosen and not chosen.strip("0"):
        remedy = "set activation_checkpoint.mode=full to recompute every layer"
    reason = f"found {chosen!r}, allowed: op, or n from 1 up to recompute every n-th layer"
    yield Finding(ERROR, "selected", _SELECTED, reason, remedy, _REFERENCE, is_input=True)


def save_list(cell: Cell) -> Iterator[Finding]:
    """Names of operators, for the one mode that looks at operators."""
    chosen = cell.options[SAVE_LIST]
    for name in chosen:
        if name not in SAVED_OPERATORS:
            close = nearest(name, SAVED_OPERATORS)
            remedy = f"did you mean {close[0]!r}?" if close else ""
            reason = f"found {name!r}, allowed: {', '.join(SAVED_OPERATORS)}"
            yield _wrong(reason, remedy)
    if chosen and not cell.saves:
        mode = cell.options["activation_checkpoint.mode"]
        yield _wrong(
            f"activation_checkpoint.mode {mode} has no use for a list of operators",
            "set activation_checkpoint.mode=selective and "
            "activation_checkpoint.selective_ac_option=op, or leave the list out",
        )


def layers_kept(cell: Cell) -> Iterator[Finding]:
    """Layers are kept where a mode would recompute them."""
    mode = cell.options["activation_checkpoint.mode"]
    if cell.options[LAYERS_KEPT] and mode not in ("full", "selective"):
        yield Finding(
            ERROR,
            "layers_kept",
            LAYERS_KEPT,
            f"activation_checkpoint.mode {mode} recomputes no layer as a whole",
            "set activation_checkpoint.mode=selective or full, or leave the number out",
            is_input=True,
        )


def _wrong(reason: str, remedy: str) -> Finding:
    return Finding(ERROR, "save_list", SAVE_LIST, reason, remedy, is_input=True)
