"""The verb `run`: a new run of one cell, or with `--resume` the next attempt of an ended one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.tables import terminal_width
from cookbook.base.yamlfile import shown_path
from cookbook.cli.check import refuse_by_check
from cookbook.cli.launch import describe_plan, refused_here, run_cell, say_submitted
from cookbook.cli.watch import wait_for
from cookbook.config.cell import Cell
from cookbook.config.expand import command_line_settings
from cookbook.config.resolve import cell_from_record
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.run.run import Run, find_run, is_run, run_names
from cookbook.run.states import CellState, cell_states
from cookbook.run.status import ENDED, OPEN, REFUSED
from cookbook.supervise.resume import Found, find_checkpoint

# What a cell is, and its checkpoints are of.
_OF_THE_CELL = ("recipe", "precision", "ep_backend", "cluster")


def run(arguments: argparse.Namespace) -> int:
    """Train one cell, or go on with those of a run that has ended."""
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.recipe is None:
        raise InputError("run", "names no RECIPE", "name one, or: run --resume RUN")
    return run_cell(arguments)


def _resume(arguments: argparse.Namespace) -> int:
    for name in _OF_THE_CELL:
        if given := getattr(arguments, name):
            raise InputError(
                f"--resume {arguments.resume}",
                f"goes on with the cell's own {name.replace('_', ' ')}, found {given!r}",
                "leave that out, or start a new run",
            )
    run, folders = _named(arguments.resume)
    _refuse_running(run, folders)
    found: dict[str, Found] = {}
    cells: list[Cell] = []
    left_out: dict[str, InputError] = {}
    for folder in folders:
        try:
            cell = _next_attempt(folder, arguments)
            found[cell.name] = _found(folder, cell)
            cells.append(cell)
        except InputError as error:
            if len(folders) == 1:
                raise
            left_out[folder.name] = error
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    cells = [refused_here(cell, arguments.dry_run) for cell in cells]
    if not arguments.no_check:
        cells = refuse_by_check(cells, build=not arguments.dry_run)
    if cells:
        print(describe_plan(run.name, cells, terminal_width()))
    for cell in cells:
        _say_where(cell, found[cell.name])
    cells = [cell for cell in cells if not cell.refused]
    if not cells:
        print(f"{run.name}: no cell can go on; nothing was submitted", file=sys.stderr)
        return 1
    if arguments.dry_run:
        return 0
    # submitit takes a moment to import, which a dry run need not wait for.
    from cookbook.launch.resume import resume_cells

    if not say_submitted(run, resume_cells(run, cells), arguments.detach):
        return 0
    return wait_for(run)


def _named(name: str) -> tuple[Run, Sequence[CellFolder]]:
    """The run, and which of its cells."""
    run_name, _, cell = name.rstrip("/").rpartition("/")
    if not run_name or name in run_names() or is_run(Path(name)):
        run = find_run(name)
        return run, run.cells
    run = find_run(run_name)
    return run, [run.cell(cell)]


def _refuse_running(run: Run, folders: Sequence[CellFolder]) -> None:
    states = cell_states(run)
    names = {folder.name for folder in folders}
    # On this machine, or in one allocation, a job trains several cells in turn.
    jobs = {state.job_id for state in states if state.cell in names and state.job_id}
    for state in states:
        is_open = state.state not in ENDED or not state.is_known
        if is_open and (state.cell in names or state.job_id in jobs):
            raise InputError(f"{run.name}/{state.cell}", *_not_ended(run, state))


def _not_ended(run: Run, state: CellState) -> tuple[str, str]:
    if state.state in OPEN:
        return f"is {state.state}", f"wait for its end, or: python submit.py cancel {run.name}"
    return f"may still run: {state.reason or 'its state is not known'}", "find out, and end it"


def _next_attempt(folder: CellFolder, arguments: argparse.Namespace) -> Cell:
    record, place = read_record(folder.record), shown_path(folder.record)
    if record.refused:
        raise InputError(f"{place}: {REFUSED}", record.refused, "start a new run")
    settings = command_line_settings(arguments.set)
    return cell_from_record(folder.name, record, place, arguments.nodes, settings)


def _found(folder: CellFolder, cell: Cell) -> Found:
    found = find_checkpoint(folder, cell)
    if found.checkpoint is None:
        what = "is off, so nothing is loaded"
        if cell.options["checkpoint.enable"]:
            damaged = "".join(f"; {one.path.name} {one.damage}" for one in found.damaged)
            what = f"has no whole checkpoint in {shown_path(folder.path)}{damaged}"
        raise InputError("checkpoint.enable", what, "start a new run")
    if found.checkpoint.step >= cell.steps:
        raise InputError(
            shown_path(folder.path),
            f"has made all of its {cell.steps} steps",
            f"ask for more: --set training.steps={2 * cell.steps}",
        )
    return found


def _say_where(cell: Cell, found: Found) -> None:
    for one in found.damaged:
        print(f"  {cell.name} passes over {one.path.name}: {one.damage}")
    if found.checkpoint:
        print(f"  {cell.name} continues after step {found.checkpoint.step} of {cell.steps}")
