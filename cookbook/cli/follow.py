"""The verbs that follow a run: `status`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.tables import terminal_width, text_table
from cookbook.cli.watch import POLL_S, Watcher, wait_for
from cookbook.observe.history import collect_history
from cookbook.run.attempts import read_resumptions
from cookbook.run.excluded import read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.run import Run, find_run, is_run, run_names
from cookbook.run.states import CellState, cancel_run, cell_states
from cookbook.run.status import ENDED, RUNNING
from cookbook.supervise.ends import record_of


def show_status(arguments: argparse.Namespace) -> int:
    """Print a line for each cell: state, job, step, reason; or watch on, as `run` does."""
    run = find_run(arguments.run)
    if arguments.watch:
        return wait_for(run)
    print(f"{run.name} ({run.scheduler})")
    rows = []
    for state, progress in Watcher(run).look():
        step = f"step {progress.step}/{progress.total_steps}" if progress.step else ""
        job = f"job {state.job_id}" if state.job_id else ""
        rows.append(
            [state.cell, state.state, job, step or progress.phase or "", state.reason or ""]
        )
    if rows:
        print(text_table(rows, width=terminal_width()))
    for cell in run.cells:
        for resumption in read_resumptions(cell.attempts()):
            for line in resumption.lines:
                print(f"{cell.name}: {line}")
        for line in collect_history(cell, record_of(cell)).lines:
            print(f"{cell.name}: {line}")
    if run.scheduler == "slurm":
        say_excluded()
    return 0


def say_excluded() -> None:
    """Name the nodes that jobs leave out now; a list that cannot be read is named too."""
    try:
        for node in read_excluded():
            print(f"left out of new jobs: {node}")
    except InputError as error:
        print(error, file=sys.stderr)


def show_logs(arguments: argparse.Namespace) -> int:
    """Print the log of a cell's last attempt; with -f, go on until the cell has ended."""
    run, cell = _named_cell(arguments.cell)
    log = cell.newest_log()
    while log is None and arguments.follow and not _state(run, cell).has_ended:
        time.sleep(POLL_S[run.scheduler])
        log = cell.newest_log()
    if log is None:
        state = _state(run, cell)
        is_started = state.state == RUNNING
        why = state.reason or ("nothing is written yet" if is_started else "not started")
        raise InputError(f"{run.name}/{cell.name}", f"has no log: {state.state}, {why}")
    offset, asked = 0, 0.0
    ended = not arguments.follow
    while True:
        # The log is read every second; the scheduler is not to be asked as often.
        if not ended and time.monotonic() - asked >= POLL_S[run.scheduler]:
            asked = time.monotonic()
            ended = _state(run, cell).has_ended
        offset = _print_from(log, offset)
        if ended:
            return 0
        time.sleep(1.0)
        # A requeued cell goes on in a new attempt.
        newest = cell.newest_log()
        if newest is not None and newest != log:
            _print_from(log, offset)
            log, offset = newest, 0


def cancel(arguments: argparse.Namespace) -> int:
    """Cancel what still waits or runs."""
    run = find_run(arguments.run)

    def say(num_jobs: int) -> None:
        # Whoever names no run must see which one it was, also where the command is slow.
        if arguments.run is None and num_jobs:
            jobs = "1 job" if num_jobs == 1 else f"{num_jobs} jobs"
            print(f"{run.name}, the newest run: cancels {jobs}", flush=True)

    cells = cancel_run(run, say)
    ending = [state.cell for state in cell_states(run) if state.is_ending]
    ending = [cell for cell in ending if cell not in cells]
    if cells:
        print(f"cancelled: {', '.join(cells)}")
    if ending:
        print(f"ended already, and Slurm is still clearing up: {', '.join(ending)}")
    if not cells and not ending:
        print(f"{run.name}: all cells have ended already")
    return 0


def _named_cell(name: str | None) -> tuple[Run, CellFolder]:
    """RUN/CELL, CELL of the newest run, RUN (its running cell) or nothing (the newest run's)."""
    run_name, _, cell = (name or "").rpartition("/")
    if run_name and not is_run(Path(name or "")):
        run = find_run(run_name)
        return run, run.cell(cell)
    if name and name not in (names := run_names()) and names:
        newest = find_run(None)
        if any(cell.name == name for cell in newest.cells):
            return newest, newest.cell(name)
    run = find_run(name)
    if not run.cells:
        raise InputError(run.name, "has no cell", "start a new run")
    states = cell_states(run)
    running = [state.cell for state in states if state.state == RUNNING]
    started = [cell.name for cell in run.cells if cell.newest_log()]
    waiting = [state.cell for state in states if state.state not in ENDED]
    everything = [cell.name for cell in run.cells]
    return run, run.cell((running or started[-1:] or waiting or everything)[0])


def _state(run: Run, cell: CellFolder) -> CellState:
    return next(state for state in cell_states(run) if state.cell == cell.name)


def _print_from(log: Path, offset: int) -> int:
    with log.open("rb") as file:
        file.seek(offset)
        while block := file.read(1 << 16):
            sys.stdout.buffer.write(block)
            offset += len(block)
    sys.stdout.buffer.flush()
    return offset
