"""What a cell needs of this machine's disk and Python, and whether its job would run with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cookbook.base.paths import ROOT
from cookbook.config.cell import ATTENTION, Cell
from cookbook.config.cluster import runs_here
from cookbook.config.finding import ERROR, WARNING, Finding

_SET_UP = "run: bash setup.sh"
# Options that hold a path, what must be there, and what to do where it is not.
_PATHS = {
    "model.hf_assets_path": ("tokenizer.json", f"{_SET_UP}, or copy the tokenizer there"),
    "training.dataset_path": ("", "set it to a folder that this machine sees"),
    "checkpoint.initial_load_path": ("", "set it to a checkpoint that this machine sees"),
    "job.config_file": ("", "set it to a file that this machine sees"),
}


def missing_here(cell: Cell, is_submitted: bool = False) -> list[Finding]:
    """What this environment lacks of what the cell needs.

    Errors where its job would run in this environment: on `--cluster local`, inside a job, where
    this machine's Slurm has the cluster's nodes, and where it `is_submitted` from here. Elsewhere
    warnings, as a plan for another cluster needs nothing here.
    """
    found = [*_missing(cell)]
    if not found or is_submitted or runs_here(cell.cluster):
        return found
    words = f" (no obstacle: jobs on cluster {cell.cluster.name} run elsewhere)"
    return [replace(one, level=WARNING, reason=one.reason + words) for one in found]


def missing_packages(cell: Cell) -> list[str]:
    """The packages that the overlays need and this Python environment lacks."""
    needed = {*cell.precision.needs.packages, *cell.ep_backend.needs.packages}
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)


def _missing(cell: Cell) -> Iterator[Finding]:
    for name, (file, remedy) in _PATHS.items():
        value = cell.options[name]
        if not value or (name.startswith("checkpoint.") and not cell.options["checkpoint.enable"]):
            continue
        # As the job, which runs in the checkout's folder, would find it.
        path, shown = ROOT / value / file, Path(value) / file
        if not path.exists():
            yield Finding(ERROR, "files", name, f"{shown} is not there", remedy)
        elif name == "training.dataset_path" and not path.is_dir():
            yield Finding(ERROR, "files", name, f"{shown} is a file, allowed: a folder", remedy)
    # The packages of a container are its own.
    if cell.cluster.container is not None:
        return
    if missing := missing_packages(cell):
        yield Finding(ERROR, "packages", "", f"not installed: {', '.join(missing)}", _SET_UP)
    if _lacks_flash_attention(cell):
        reason = "FlashAttention-4 (flash-attn-4) is not installed"
        remedy = f"{_SET_UP}, or set {ATTENTION}=flavor"
        yield Finding(ERROR, "packages", ATTENTION, reason, remedy)


def _lacks_flash_attention(cell: Cell) -> bool:
    if not cell.uses_flash_attention or cell.attends_by_reference:
        return False
    # Its folder is in that of the older versions, whose code must not run here.
    outer = importlib.util.find_spec("flash_attn")
    folders = outer.submodule_search_locations if outer else None
    return not any(Path(folder, "cute").is_dir() for folder in folders or ())
