"""The verbs that follow a run: `status`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.log.curve import last_step
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run, find_run, is_run
from cookbook.run.states import CellState, cancel_run, cell_states
from cookbook.run.status import ENDED, OPEN, RUNNING
from cookbook.verbs.progress import CellProgress, Progress

_POLL_S = {"local": 1.0, "slurm": 5.0}


def show_status(arguments: argparse.Namespace) -> int:
    """Print a line for each cell: state, job, step, reason."""
    run = find_run(arguments.run)
    states = cell_states(run)
    print(f"{run.name} ({run.scheduler})")
    width = max((len(state.cell) for state in states), default=0)
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
    log = cell.newest_log()
    while log is None and arguments.follow and _state(run, cell).state in OPEN:
        time.sleep(_POLL_S[run.scheduler])
        log = cell.newest_log()
    if log is None:
        state = _state(run, cell)
        why = state.reason or "not started"
        raise InputError(f"{run.name}/{cell.name}", f"has no log: {state.state}, {why}")
    offset, asked = 0, 0.0
    ended = not arguments.follow
    while True:
        # The log is read every second; the scheduler is not to be asked as often.
        if not ended and time.monotonic() - asked >= _POLL_S[run.scheduler]:
            asked = time.monotonic()
            ended = _state(run, cell).state not in OPEN
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
    cells = cancel_run(run)
    done = f"{run.name}: all cells have ended already"
    print(f"cancelled: {', '.join(cells)}" if cells else done)
    return 0


def watch(run: Run) -> None:
    """Show progress until every cell has ended."""
    progress = Progress(sys.stdout)
    try:
        while True:
            states = cell_states(run)
            progress.update([cell_progress(run, state) for state in states])
            if all(state.state not in OPEN for state in states):
                return
            time.sleep(_POLL_S[run.scheduler])
    finally:
        progress.close()


def cell_progress(run: Run, state: CellState) -> CellProgress:
    """How far a cell is, by its log."""
    folder = run.cell(state.cell)
    try:
        record = read_record(folder.record)
    except InputError:
        # What is wrong with it is `report`'s to say; here it costs the number of steps.
        record = CellRecord()
    last = last_step(folder, record)
    end = state.ended or time.time()
    return CellProgress(
        name=state.cell,
        state=state.state,
        step=last.step if last else None,
        total_steps=record.steps,
        tokens_per_second=last.tokens_per_second if last else None,
        loss=last.loss if last else None,
        elapsed=end - state.started if state.started else None,
    )


def _named_cell(name: str | None) -> tuple[Run, CellFolder]:
    """RUN/CELL, RUN (its running cell) or nothing (of the newest run)."""
    run_name, _, cell = (name or "").rpartition("/")
    if run_name and not is_run(Path(name or "")):
        run = find_run(run_name)
        return run, run.cell(cell)
    run = find_run(name)
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
