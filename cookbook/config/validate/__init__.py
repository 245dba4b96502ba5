"""The verdict of a cell: by the rules, and in this environment; the driver and the job ask for it.

TorchTitan refuses more when it builds the model (`check/`); a rule stands here where TorchTitan
sees a fault only in the job, or never.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cookbook.base.paths import ROOT
from cookbook.config.cell import ATTENTION, ERROR, WARNING, Cell, Finding, Verdict
from cookbook.config.cluster import runs_here
from cookbook.config.validate import kernels, layout, training, values

_SET_UP = "run: bash setup.sh"
# Options that hold a path, the file that must be there, and the remedy where it is not.
_PATHS = {
    "model.hf_assets_path": ("tokenizer.json", f"{_SET_UP}, or copy the tokenizer there"),
    "training.dataset_path": ("", "set it to a folder that this machine sees"),
    "checkpoint.initial_load_path": ("", "set it to a checkpoint that this machine sees"),
    "job.config_file": ("", "set it to a file that this machine sees"),
}


def judge(cell: Cell, *, is_submitted: bool = False) -> Verdict:
    """Return the verdict before the build; `check` adds the errors that the build finds."""
    rules = tuple(validation_errors(cell))
    # After a layout that does not divide, or another wrong value, nothing more is looked at.
    here = () if any(one.is_input for one in rules) else tuple(missing_here(cell, is_submitted))
    return Verdict(rules, here=here)


def validation_errors(cell: Cell) -> list[Finding]:
    """Return the rules' errors, wrong input first; where the layout does not divide, that alone."""
    problems = layout.layout_findings(cell.options, cell.world)
    if problems:
        return problems
    rules = (*values.RULES, *kernels.RULES, *layout.RULES, *training.RULES)
    found = [finding for rule in rules for finding in rule(cell)]
    return sorted(found, key=lambda finding: not finding.is_input)


def wrong_value(cell: Cell, option: str) -> Finding | None:
    """Return an error in the value of `option` that no other option can fix."""
    found = layout.impossible_findings(cell.options)
    found += [*values.bounds(cell), *values.selected(cell)]
    return next((finding for finding in found if finding.option == option), None)


def missing_here(cell: Cell, is_submitted: bool = False) -> list[Finding]:
    """Return the packages and files that the cell needs and this environment lacks.

    Errors where its job would run in this environment, or `is_submitted` from it. Elsewhere
    warnings, as a plan for another cluster needs nothing here.
    """
    found = [*_missing(cell)]
    if not found or is_submitted or runs_here(cell.cluster):
        return found
    words = f" (no obstacle: jobs on cluster {cell.cluster.name} run elsewhere)"
    return [replace(one, level=WARNING, reason=one.reason + words) for one in found]


def missing_packages(cell: Cell) -> list[str]:
    """Return the packages that the overlays need and this Python environment lacks."""
    needed = {*cell.precision.needs.packages, *cell.ep_backend.needs.packages}
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)


def _missing(cell: Cell) -> Iterator[Finding]:
    for name, (file, remedy) in _PATHS.items():
        value = cell.options[name]
        if not value or (name.startswith("checkpoint.") and not cell.options["checkpoint.enable"]):
            continue
        # The job runs in the checkout's folder.
        path, shown = ROOT / value / file, Path(value) / file
        if not path.exists():
            yield Finding(ERROR, "files", name, f"{shown} is not there", remedy)
        elif name == "training.dataset_path" and not path.is_dir():
            yield Finding(ERROR, "files", name, f"{shown} is a file, allowed: a folder", remedy)
    yield from training.training_files(cell)
    # A container has packages of its own.
    if cell.cluster.container is not None:
        return
    if missing := missing_packages(cell):
        yield Finding(ERROR, "packages", "", f"not installed: {', '.join(missing)}", _SET_UP)
    if _lacks_flash_attention(cell):
        reason = "FlashAttention-4 (flash-attn-4) is not installed"
        yield Finding(ERROR, "packages", ATTENTION, reason, f"{_SET_UP}, or set {ATTENTION}=flavor")


def _lacks_flash_attention(cell: Cell) -> bool:
    if not cell.uses_flash_attention or cell.attends_by_reference:
        return False
    # Its folder is in that of the older versions, whose code must not run here.
    outer = importlib.util.find_spec("flash_attn")
    folders = outer.submodule_search_locations if outer else None
    return not any(Path(folder, "cute").is_dir() for folder in folders or ())
