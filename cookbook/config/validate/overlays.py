"""What overlays need of the cell, and whether its options turn on what they declare."""

from __future__ import annotations

from collections.abc import Iterator

from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, TORCHTITAN, Finding
from cookbook.config.options import DEGREES
from cookbook.config.overlay import Overlay, implied

_OVERLAYS = f"{TORCHTITAN}/models/deepseek_v3/infra/parallelize.py"
_CONVERTERS = f"{TORCHTITAN}/protocols/model_converter.py"


def hardware(cell: Cell) -> Iterator[Finding]:
    """The precision's generation of GPUs, where nothing emulates it."""
    gpu, needed = cell.cluster.gpu, cell.precision.needs.compute_capability
    if not needed or cell.emulated or (gpu and gpu.compute_capability >= needed):
        return
    have = f"{gpu.name} has {gpu.compute_capability}" if gpu else "there is no CUDA GPU"
    yield _refused(
        "hardware",
        f"{cell.precision.name} needs a GPU of compute capability {needed}, {have}",
        f"{TORCHTITAN}/components/quantization/mx.py",
    )


def needs(cell: Cell) -> Iterator[Finding]:
    """GPUs, EP, options and another overlay."""
    for overlay in (cell.precision, cell.ep_backend):
        if reason := _unmet(cell, overlay):
            yield _refused("needs", f"{overlay.name} needs {reason}", _OVERLAYS)


def _unmet(cell: Cell, overlay: Overlay) -> str:
    needed = overlay.needs
    if needed.device == "cuda" and cell.cluster.gpu is None:
        return f"CUDA GPUs, cluster {cell.cluster.name} runs on the CPU"
    if needed.expert_parallel and cell.options[DEGREES["ep"]] < 2:
        return f"{DEGREES['ep']} above 1"
    grouped = cell.precision.expects("grouped_gemms")
    if needed.grouped_gemms and grouped not in needed.grouped_gemms:
        return (
            f"a precision with grouped_gemms {' or '.join(needed.grouped_gemms)}, "
            f"{cell.precision.name} has {grouped}"
        )
    for name, setting in needed.settings.items():
        if (value := cell.options[name]) != setting.value:
            return f"{name} {setting.value}, found {value}"
    return ""


def declaration(cell: Cell) -> Iterator[Finding]:
    """The job stops at its first step where something else is active than was declared."""
    found = implied(cell.options)
    for overlay, what in ((cell.precision, "precision"), (cell.ep_backend, "EP backend")):
        for name, setting in overlay.expect.items():
            key = name.removeprefix("cookbook.")
            # With one EP rank nothing is dispatched.
            if found[key] == setting.value or (key == "dispatch" and cell.layout.ep == 1):
                continue
            yield Finding(
                ERROR,
                "declaration",
                "model.converters" if what == "precision" else "",
                f"{what} {overlay.name} declares {key} {setting.value}, and the options turn on "
                f"{found[key]}: the job would stop at its first step",
                f"correct the options, or `expect` in {overlay.path.name}",
                _CONVERTERS,
            )


def _refused(rule: str, reason: str, reference: str) -> Finding:
    # The reason names what is missing: precision, EP backend or cluster is the reader's to change.
    return Finding(ERROR, rule, "", reason, "", reference)
