"""The verbs `check`, `run` and `sweep`: cells checked, submitted, watched, and their report.

`run --resume` makes the next attempt of cells that have ended.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.tables import terminal_width, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.check.check import check_cells
from cookbook.check.report import render_json, render_text
from cookbook.cli.follow import wait_for
from cookbook.cli.inspect import requested_cell, requested_sweep
from cookbook.config.cell import WARNING, Cell
from cookbook.config.options import command_line_settings
from cookbook.config.recipe import names_in
from cookbook.config.resolve import cell_from_record
from cookbook.config.sweep import in_rounds, is_sweep
from cookbook.run.excluded import read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.run.run import Run, find_cell, release_submit_lock, take_submit_lock
from cookbook.run.states import cell_states
from cookbook.run.status import ENDED, OPEN, QUEUED, REFUSED
from cookbook.supervise.resume_point import Found, find_checkpoint


def check(arguments: argparse.Namespace) -> int:
    """Print the findings; 0 if every cell may run, else 1."""
    if is_sweep(arguments.recipe):
        arguments.sweep = arguments.recipe
        sweep, cells = requested_sweep(arguments)
        name = sweep.name
    elif "." not in arguments.recipe and arguments.recipe not in names_in(""):
        known = [*names_in(""), *names_in("sweep")]
        raise unknown_name("check", "recipe or sweep", arguments.recipe, known)
    else:
        cells = [requested_cell(arguments)]
        name = cells[0].recipe.short_name
    checks = check_cells(cells, build=not arguments.rules_only)
    as_text = "" if arguments.json else render_text(name, checks, terminal_width())
    print(as_text or render_json(checks), end="")
    return 0 if all(one.may_run for one in checks) else 1


def judged_cells(cells: Sequence[Cell], arguments: argparse.Namespace) -> tuple[list[Cell], str]:
    """Return the cells, refused ones with the reason, and a line on the parts that were checked.

    Warnings go to stderr. Only cells that would wait in a queue are built: a dry run answers at
    once, and a job on this machine shows at once what TorchTitan refuses.
    """
    cluster, is_checked = cells[0].cluster, not arguments.no_check
    gpus = sum(cell.world for cell in cells if cell.cluster.gpu and not cell.refused)
    build = is_checked and not arguments.dry_run and gpus > 0 and cluster.scheduler == "slurm"
    if build:
        words = f"checking {len(cells)} cell(s) before {gpus} GPUs are asked for (--no-check skips"
        print(f"{words} this) ...", file=sys.stderr, flush=True)
    checks = check_cells(cells, build=build, is_submitted=not arguments.dry_run)
    findings = [finding for one in checks for finding in one.findings if is_checked]
    for text in dict.fromkeys(str(one) for one in findings if one.level == WARNING):
        print(f"warning: {text}", file=sys.stderr)
    judged = [replace(one.cell, refused=one.judged.refused) for one in checks]
    seen = [one.judged for one in checks if not one.judged.rules] or [checks[0].judged]
    return judged, seen[0].parts


def run(arguments: argparse.Namespace) -> int:
    """Train one cell, or go on with those of a run that has ended."""
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.recipe is None:
        raise InputError("run", "names no RECIPE", "name one, or: run --resume RUN")
    cell = requested_cell(arguments)
    run = start_run(cell.recipe.short_name, [cell], arguments)
    return wait_for(run) if isinstance(run, Run) else run


def run_sweep(arguments: argparse.Namespace) -> int:
    sweep, cells = requested_sweep(arguments)
    if arguments.repeat < 1:
        raise InputError("--repeat", f"found {arguments.repeat}, allowed: 1 and up")
    if arguments.one_allocation:
        nodes = ", ".join(map(str, sorted({cell.nodes for cell in cells})))
        if "," in nodes:
            remedy = "name one number with --nodes"
            raise InputError("--one-allocation", f"the cells ask for {nodes} nodes", remedy)
    run = start_run(sweep.name, cells, arguments, arguments.repeat, arguments.one_allocation)
    return wait_for(run) if isinstance(run, Run) else run


def start_run(
    name: str,
    cells: Sequence[Cell],
    arguments: argparse.Namespace,
    num_repeats: int = 1,
    one_allocation: bool = False,
) -> Run | int:
    """Show the plan and submit the cells; return the run, or the exit status if nobody waits."""
    cells, parts = judged_cells(cells, arguments)
    print(describe_plan(name, cells, terminal_width()))
    print(f"  {parts}")
    status = 1 if any(cell.refused for cell in cells) else 0
    cells = in_rounds(cells, num_repeats)
    cluster = cells[0].cluster
    if one_allocation and cluster.scheduler == "slurm":
        limit = f", which has {cluster.time} for all of them" if cluster.time else ""
        print(f"  one after another in one job{limit}")
    if num_repeats > 1:
        order = ", ".join(cell.name for cell in cells if not cell.refused)
        print(f"  each {num_repeats} times, in this order: {order}")
    if arguments.dry_run:
        return status
    if all(cell.refused for cell in cells):
        print(f"{name}: no cell can run here; nothing was submitted", file=sys.stderr)
        return 1
    # Import lazily: a dry run must not wait for submitit.
    from cookbook.launch.submit import create_run, submit_run

    if cells[0].cluster.scheduler == "slurm":
        # Find a mistake in the list before anything is written.
        for node in read_excluded():
            print(f"left out: {node}")
    run = create_run(name, cells)
    report_jobs(run, submit_run(run, cells, one_allocation), arguments.detach)
    return 0 if arguments.detach else run


def report_jobs(run: Run, job_ids: Sequence[str], is_detached: bool) -> None:
    kind = "Slurm job" if run.scheduler == "slurm" else "process"
    shown = ", ".join(job_ids[:8]) + (", ..." if len(job_ids) > 8 else "")
    print(f"submitted as {kind} {shown}: {shown_path(run.folder)}\n", flush=True)
    if is_detached:
        print(f"follow it: python submit.py status --watch {run.name}")


def describe_plan(name: str, cells: Sequence[Cell], width: int | None = None) -> str:
    """Return a line for each cell that will run or is refused, wrapped to `width`."""
    first = cells[0]
    cluster = first.cluster
    lines = [f"{name} on cluster {cluster.name}: {first.nodes} node(s) x {cluster.ranks}"]
    stand_ins = {cell.stand_in_for: cell.recipe.name for cell in cells if cell.stand_in_for}
    for original, stand_in in stand_ins.items():
        lines.append(f"  {original} is too large here: its stand-in {stand_in} runs instead")
    if first.left_out:
        lines.append(f"  left out, being made for the large recipe: {', '.join(first.left_out)}")
    if len(cells) == 1 and first.own_pair:
        lines.append(f"  {first.recipe.name} is made for {first.own_pair}; this is {first.pair}")
    rows = []
    for cell in cells:
        layout = cell.layout
        degrees = f"TP {layout.tp} PP {layout.pp} DP {layout.dp_shard} EP {layout.ep}"
        text = f"refused: {cell.refused}" if cell.refused else f"{cell.steps} steps, {degrees}"
        if cell.emulated and not cell.refused:
            text += ", MXFP8 emulated (numerics only)"
        if cell.attends_by_reference and not cell.refused:
            text += ", FlashAttention-4's reference (numerics only)"
        rows.append([cell.name, text])
    return "\n".join([*lines, text_table(rows, width=width, indent=2)])


def _resume(arguments: argparse.Namespace) -> int:
    for name in ("recipe", "precision", "ep_backend", "cluster"):
        if given := getattr(arguments, name):
            own = f"goes on with the cell's own {name.replace('_', ' ')}, found {given!r}"
            place = f"--resume {arguments.resume}"
            raise InputError(place, own, "leave that out, or start a new run")
    run, named = find_cell(arguments.resume)
    folders = run.cells if named is None else [named]
    if arguments.dry_run:
        return 1 if _resumable(run, folders, arguments) is None else 0
    # Held until the new jobs are written: two resumes at once would train twice.
    take_submit_lock(run.folder)
    try:
        cells = _resumable(run, folders, arguments)
        if cells is None:
            return 1
        # Import lazily: a dry run must not wait for submitit.
        from cookbook.launch.submit import resume_cells

        job_ids = resume_cells(run, cells)
    finally:
        release_submit_lock(run.folder)
    report_jobs(run, job_ids, arguments.detach)
    return 0 if arguments.detach else wait_for(run)


def _resumable(
    run: Run, folders: Sequence[CellFolder], arguments: argparse.Namespace
) -> list[Cell] | None:
    """Return the cells that can go on, and print where; None if there is none."""
    _refuse_running(run, folders)
    found: dict[str, Found] = {}
    cells: list[Cell] = []
    for folder in folders:
        try:
            record, place = read_record(folder.record), shown_path(folder.record)
            if record.refused:
                raise InputError(f"{place}: {REFUSED}", record.refused, "start a new run")
            settings = command_line_settings(arguments.set)
            cell = cell_from_record(folder.name, record, place, arguments.nodes, settings)
            found[cell.name] = _find_checkpoint(run, folder, cell)
            cells.append(cell)
        except InputError as error:
            if len(folders) == 1:
                raise
            print(f"{folder.name} is left out: {error}", file=sys.stderr)
    if cells:
        cells, parts = judged_cells(cells, arguments)
        print(describe_plan(run.name, cells, terminal_width()))
        print(f"  {parts}")
    for cell in cells:
        for one in found[cell.name].damaged:
            print(f"  {cell.name} passes over {one.path.name}: {one.damage}")
        if checkpoint := found[cell.name].checkpoint:
            print(f"  {cell.name} continues after step {checkpoint.step} of {cell.steps}")
    cells = [cell for cell in cells if not cell.refused]
    if not cells:
        print(f"{run.name}: no cell can go on; nothing was submitted", file=sys.stderr)
    return cells or None


def _refuse_running(run: Run, folders: Sequence[CellFolder]) -> None:
    states = cell_states(run)
    names = {folder.name for folder in folders}
    # On this machine, or in one allocation, a job trains several cells in turn.
    jobs = {state.job_id for state in states if state.cell in names and state.job_id}
    for state in states:
        is_open = state.state not in ENDED or not state.is_known
        # Only the holder of the lock submits it, which is this process.
        is_open = is_open and not (state.state == QUEUED and state.job_id is None)
        if is_open and (state.cell in names or state.job_id in jobs):
            reason = state.reason or "its state is not known"
            found, remedy = f"may still run: {reason}", "find out, and end it"
            if state.state in OPEN and state.is_known:
                found = f"is {state.state}"
                remedy = f"wait for its end, or: python submit.py cancel {run.name}"
            raise InputError(f"{run.name}/{state.cell}", found, remedy)


def _find_checkpoint(run: Run, folder: CellFolder, cell: Cell) -> Found:
    found = find_checkpoint(folder, cell.record())
    command = shlex.join(run.record.command)
    if found.checkpoint is None:
        reason = "is off, so nothing is loaded"
        if cell.options["checkpoint.enable"]:
            damaged = "".join(f"; {one.path.name} {one.damage}" for one in found.damaged)
            reason = f"has no whole checkpoint in {shown_path(folder.path)}{damaged}"
        new_run = f"start a new run: {command}" if command else "start a new run"
        raise InputError("checkpoint.enable", reason, new_run)
    if found.checkpoint.step >= cell.steps:
        remedy = f"ask for more: --set training.steps={2 * cell.steps}"
        made = f"has made all of its {cell.steps} steps"
        raise InputError(shown_path(folder.path), made, remedy)
    return found
