"""In: parsed arguments that name a run. Out: its state, its logs, its results; or its end."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import yaml

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.files import write_whole
from cookbook.log.curve import last_step, option_count
from cookbook.results.collect import collect_results
from cookbook.results.report import render_json, render_markdown
from cookbook.run.rundir import ENDED, RUNNING, Run, attempts, find_run
from cookbook.run.states import CellState, cancel_run, cell_states
from cookbook.verbs.progress import CellProgress, Progress

_POLL_S = {"local": 1.0, "slurm": 5.0}


def show_status(arguments: argparse.Namespace) -> int:
    """Print a line for each cell: state, job, step, reason."""
    run = find_run(arguments.run)
    states = cell_states(run)
    print(f"{run.name} ({run.scheduler})")
    width = max(len(state.cell) for state in states)
    for state in states:
        progress = cell_progress(run, state)
        step = f"step {progress.step}/{progress.total_steps}" if progress.step else ""
        job = f"job {state.job_id}" if state.job_id else ""
        words = [f"{state.cell:<{width}}", f"{state.state:<9}", f"{job:<12}", f"{step:<14}"]
        print("  ".join([*words, state.reason or ""]).rstrip())
    return 0


def show_logs(arguments: argparse.Namespace) -> int:
    """Print the log of a cell's last attempt; with -f, go on until the cell has ended."""
    run, cell = _named_cell(arguments.cell)
    folder = run.cell_folder(cell)
    log = _log(folder)
    while log is None and arguments.follow and _state(run, cell).state not in ENDED:
        time.sleep(_POLL_S[run.scheduler])
        log = _log(folder)
    if log is None:
        state = _state(run, cell)
        why = state.reason or "not started"
        raise InputError(f"{run.name}/{cell}", f"has no log: {state.state}, {why}")
    offset, asked = 0, 0.0
    ended = not arguments.follow
    while True:
        # The log is read every second; the scheduler is not to be asked as often.
        if not ended and time.monotonic() - asked >= _POLL_S[run.scheduler]:
            asked = time.monotonic()
            ended = _state(run, cell).state in ENDED
        offset = _print_from(log, offset)
        if ended:
            return 0
        time.sleep(1.0)
        # A requeued cell goes on in a new attempt.
        newest = _log(folder)
        if newest is not None and newest != log:
            _print_from(log, offset)
            log, offset = newest, 0


def cancel(arguments: argparse.Namespace) -> int:
    """Cancel what still waits or runs."""
    run = find_run(arguments.run)
    cells = cancel_run(run)
    done = f"{run.name}: all cells have ended already"
    print(f"cancelled: {', '.join(cells)}" if cells else done)
    return 0


def show_report(arguments: argparse.Namespace) -> int:
    """Print the results of a run."""
    print_report(find_run(arguments.run), arguments.format)
    return 0


def print_report(run: Run, form: str) -> dict[str, str]:
    """Print the results in `form` (md or json), keep report.md, and return the cells' states."""
    states = cell_states(run)
    known = {state.cell: (state.state, state.reason) for state in states}
    results = collect_results(run.folder, known)
    text = render_markdown(results)
    write_whole(run.folder / "report.md", text)
    print(render_json(results) if form == "json" else text, end="")
    return {state.cell: state.state for state in states}


def watch(run: Run) -> None:
    """Show progress until every cell has ended."""
    progress = Progress(sys.stdout)
    try:
        while True:
            states = cell_states(run)
            progress.update([cell_progress(run, state) for state in states])
            if all(state.state in ENDED for state in states):
                return
            time.sleep(_POLL_S[run.scheduler])
    finally:
        progress.close()


def cell_progress(run: Run, state: CellState) -> CellProgress:
    """How far a cell is, by its log."""
    folder = run.cell_folder(state.cell)
    cell = yaml.safe_load((folder / "cell.yaml").read_text(encoding="utf-8"))
    last = last_step(folder, cell)
    end = state.ended or time.time()
    return CellProgress(
        name=state.cell,
        state=state.state,
        step=last.step if last else None,
        total_steps=option_count(cell, "training.steps"),
        tokens_per_second=last.tokens_per_second if last else None,
        loss=last.loss if last else None,
        elapsed=end - state.started if state.started else None,
    )


def _named_cell(name: str | None) -> tuple[Run, str]:
    """RUN/CELL, RUN (its running cell) or nothing (of the newest run)."""
    run_name, _, cell = (name or "").partition("/")
    run = find_run(run_name or None)
    if cell:
        if cell not in run.cells:
            raise unknown_name(run.name, "cell", cell, run.cells)
        return run, cell
    states = cell_states(run)
    running = [state.cell for state in states if state.state == RUNNING]
    started = [state.cell for state in states if _log(run.cell_folder(state.cell))]
    waiting = [state.cell for state in states if state.state not in ENDED]
    return run, (running or started[-1:] or waiting or list(run.cells))[0]


def _state(run: Run, cell: str) -> CellState:
    return next(state for state in cell_states(run) if state.cell == cell)


def _log(folder: Path) -> Path | None:
    """The newest log: of the last attempt, else what the job said before there was one."""
    for attempt in reversed(attempts(folder)):
        if (attempt / "train.log").exists():
            return attempt / "train.log"
    jobs = sorted((folder / "job").glob("*.log"), key=lambda path: path.stat().st_mtime)
    return jobs[-1] if jobs else None


def _print_from(log: Path, offset: int) -> int:
    with log.open("rb") as file:
        file.seek(offset)
        while block := file.read(1 << 16):
            sys.stdout.buffer.write(block)
            offset += len(block)
    sys.stdout.buffer.flush()
    return offset
