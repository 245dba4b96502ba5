"""What a cell needs of this machine's disk and Python, and what of it is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cookbook.base.paths import ROOT
from cookbook.config.cell import ATTENTION, Cell
from cookbook.config.finding import ERROR, Finding

_SET_UP = "run: bash setup.sh"
# Options that hold a path, what must be there, and what to do where it is not.
_PATHS = {
    "model.hf_assets_path": ("tokenizer.json", f"{_SET_UP}, or copy the tokenizer there"),
    "training.dataset_path": ("", "set it to a folder that this machine sees"),
    "job.config_file": ("", "set it to a file that this machine sees"),
}


def missing_packages(cell: Cell) -> list[str]:
    """The packages that the overlays need and this Python environment lacks."""
    needed = {*cell.precision.needs.packages, *cell.ep_backend.needs.packages}
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)


def missing_here(cell: Cell) -> list[Finding]:
    """Packages and files that are not there; the packages of a container are its own."""
    findings = missing_files(cell)
    if cell.cluster.container is None and (missing := missing_packages(cell)):
        names = ", ".join(missing)
        findings.append(Finding(ERROR, "packages", "", f"not installed: {names}", _SET_UP))
    if cell.cluster.container is None and _lacks_flash_attention(cell):
        reason = "FlashAttention-4 (flash-attn-4) is not installed"
        remedy = f"{_SET_UP}, or set {ATTENTION}=flavor"
        findings.append(Finding(ERROR, "packages", ATTENTION, reason, remedy))
    return findings


def _lacks_flash_attention(cell: Cell) -> bool:
    if not cell.uses_flash_attention or cell.attends_by_reference:
        return False
    # Its folder is in that of the older versions, whose code must not run here.
    outer = importlib.util.find_spec("flash_attn")
    folders = outer.submodule_search_locations if outer else None
    return not any(Path(folder, "cute").is_dir() for folder in folders or ())


def missing_files(cell: Cell) -> list[Finding]:
    """Paths in the options at which there is nothing, on this machine."""
    findings = []
    for name, (file, remedy) in _PATHS.items():
        value = cell.options[name]
        # As the job, which runs in the checkout's folder, would find it.
        if value and not (ROOT / value / file).exists():
            found = Path(value) / file
            findings.append(Finding(ERROR, "files", name, f"{found} is not there", remedy))
    return findings
