"""Follow a run to its end: the verbs `status`, `logs` and `cancel`, and the watch of `run`."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.base.errors import InputError, JobError
from cookbook.base.gpus import has_slurm
from cookbook.base.paths import runs_folder
from cookbook.base.tables import terminal_width, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.cli.display import CellProgress, Progress
from cookbook.cli.results import print_report
from cookbook.observe.console import Phase, StepMetrics
from cookbook.observe.history import collect_history
from cookbook.observe.metrics import Tail
from cookbook.run import slurm
from cookbook.run.attempts import read_resumptions
from cookbook.run.excluded import read_excluded
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run, find_cell, find_run, is_run, run_names
from cookbook.run.states import CellState, cancel_deleted, cancel_run, cell_states
from cookbook.run.status import ENDED, FAILED, FINISHED, REFUSED, RUNNING

# As many as the sparkline shows.
_NUM_SPEEDS = 20
# The first steps hold compilation.
_LEAST_SPEEDS = 4
POLL_S = {"local": 1.0, "slurm": 5.0}
# A watcher waits longer for a busy controller than a person.
_PATIENCE_S = 20.0


def show_status(arguments: argparse.Namespace) -> int:
    """Print a line for each cell: state, job, step, reason; or watch on, as `run` does."""
    pending = _pending_scripts() if arguments.run is None and not run_names() else []
    if pending:
        print("\n".join(pending))
        return 0
    run = find_run(arguments.run)
    if arguments.watch:
        return wait_for(run)
    print(f"{run.name} ({run.scheduler})")
    looks = Watcher(run).look()
    rows = []
    for state, progress in looks:
        step = f"step {progress.step}/{progress.total_steps}" if progress.step else ""
        if progress.validation_loss is not None:
            step += f", validation loss {progress.validation_loss:.4f}"
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
        for line in collect_history(cell, _record(cell)).lines:
            print(f"{cell.name}: {line}")
    if run.scheduler == "slurm":
        try:
            for node in read_excluded():
                print(f"left out of new jobs: {node}")
        except InputError as error:
            print(error, file=sys.stderr)
    # A Slurm that has not answered is not asked again.
    if arguments.run is None and all(state.is_known for state, _ in looks):
        for line in _pending_scripts():
            print(line)
    return 0


def _pending_scripts() -> list[str]:
    """Return a line for each waiting job of plain sbatch: its run begins when it starts."""
    if not has_slurm():
        return []
    try:
        jobs = slurm.user_jobs(os.getuid(), slurm.PATIENCE_S)
    except JobError:
        return []
    lines = []
    for job in jobs:
        is_ours = job.state in slurm.WAITING and job.script.name != "submission.sh"
        if is_ours and job.script.is_file() and "cookbook.supervise" in job.script.read_text():
            why = f": {job.reason}" if job.reason else ""
            lines.append(f"waits, started by sbatch {job.script}: job {job.job_id}{why}")
    return lines


def show_logs(arguments: argparse.Namespace) -> int:
    """Print the log of a cell's last attempt; with -f, go on until the cell has ended."""
    run, cell = named_cell(arguments.cell)
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


def named_cell(name: str | None) -> tuple[Run, CellFolder]:
    """Find RUN/CELL, CELL of the newest run, RUN (its running cell), or the newest run's."""
    if name and "/" not in name and name not in (names := run_names()) and names:
        newest = find_run(None)
        if any(cell.name == name for cell in newest.cells):
            return newest, newest.cell(name)
    run, named = find_cell(name)
    if named is not None:
        return run, named
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


def cancel(arguments: argparse.Namespace) -> int:
    """Cancel the cells of a run that wait or run."""
    try:
        run = find_run(arguments.run)
    except InputError:
        folder = runs_folder() / (arguments.run or "")
        if arguments.run is None or folder.exists() or not (found := cancel_deleted(folder)):
            raise
        print(f"{arguments.run}: its folder was deleted; cancelled what still ran of it ({found})")
        return 0

    def report(num_jobs: int) -> None:
        # Without a name, show which run is meant before a command that may be slow.
        if arguments.run is None and num_jobs:
            jobs = "1 job" if num_jobs == 1 else f"{num_jobs} jobs"
            print(f"{run.name}, the newest run: cancels {jobs}", flush=True)

    cells = cancel_run(run, report)
    ending = [state.cell for state in cell_states(run) if state.is_ending]
    ending = [cell for cell in ending if cell not in cells]
    if cells:
        print(f"cancelled: {', '.join(cells)}")
    if ending:
        print(f"ended already, and Slurm is still clearing up: {', '.join(ending)}")
    if not cells and not ending:
        print(f"{run.name}: all cells have ended already")
    return 0


@dataclass
class _Watched:
    """State of a cell between two looks.

    `first_seen` is the first step that was seen of an attempt, and when: (attempt, step, time).
    `speeds` has attempt, step and speed of the newest steps.
    """

    folder: CellFolder
    record: CellRecord
    tails: dict[int, Tail] = field(default_factory=dict)
    first_seen: tuple[int, int, float] | None = None
    speeds: deque[tuple[tuple[int, int], float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_SPEEDS)
    )


class Watcher:
    """Looks at a run's cells; each look reads only the growth of their logs."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._cells = {cell.name: _Watched(cell, _record(cell)) for cell in run.cells}

    def look(self, patience: float = slurm.PATIENCE_S) -> list[tuple[CellState, CellProgress]]:
        """Return the cells as they are now, in the run's order."""
        return [(state, self._progress(state)) for state in cell_states(self.run, patience)]

    def _progress(self, state: CellState) -> CellProgress:
        cell = self._cells[state.cell]
        attempts = cell.folder.attempts()
        step, phase, validation_loss = _newest(cell, attempts)
        is_running = state.state == RUNNING
        return CellProgress(
            name=state.cell,
            state=state.state,
            step=step.step if step else None,
            total_steps=cell.record.steps,
            tokens_per_second=step.tokens_per_second if step else None,
            loss=step.loss if step else None,
            validation_loss=validation_loss,
            elapsed=(state.ended or time.time()) - state.started if state.started else None,
            phase=phase.value if phase and is_running and phase != Phase.TRAINING else None,
            is_known=state.is_known,
            left=_seconds_left(cell, attempts, step) if is_running else None,
            emulated=cell.record.emulated,
            speeds=tuple(speed for _, speed in cell.speeds) if is_running else (),
        )


def _newest(
    cell: _Watched, attempts: list[Attempt]
) -> tuple[StepMetrics | None, Phase | None, float | None]:
    """Return the newest step and validation loss of any attempt, and the phase of the last one."""
    phase, validation_loss = None, None
    for attempt in reversed(attempts):
        rank = cell.record.as_of(attempt.number).loss_rank
        tail = cell.tails.setdefault(attempt.number, Tail(attempt, rank))
        newest = tail.read()
        if attempt is attempts[-1]:
            phase = newest.phase
            for step in tail.recent:
                place, speed = (attempt.number, step.step), step.tokens_per_second
                is_new = not cell.speeds or place > cell.speeds[-1][0]
                if is_new and speed is not None and 0 < speed < math.inf:
                    cell.speeds.append((place, speed))
        validation_loss = validation_loss or newest.validation_loss
        if newest.step is not None:
            return newest.step, phase, validation_loss
    return None, phase, validation_loss


def _seconds_left(
    cell: _Watched, attempts: list[Attempt], step: StepMetrics | None
) -> float | None:
    """Return the seconds to the last step, at the pace since the first step that was seen."""
    total, now = cell.record.steps, time.monotonic()
    if step is None or total is None or not attempts:
        return None
    number = attempts[-1].number
    seen = cell.first_seen
    if seen is None or seen[0] != number or step.step < seen[1]:
        seen = cell.first_seen = (number, step.step, now)
    if steps := step.step - seen[1]:
        return (total - step.step) * (now - seen[2]) / steps
    # At the first look the speed of the last steps must do.
    tokens = cell.record.tokens_per_step_per_gpu
    if tokens is None or len(cell.speeds) < _LEAST_SPEEDS:
        return None
    return (total - step.step) * tokens / statistics.median(speed for _, speed in cell.speeds)


def _record(cell: CellFolder) -> CellRecord:
    try:
        return read_record(cell.record)
    except InputError:
        # `report` names the mistake; here it costs the number of steps.
        return CellRecord()


def watch(run: Run) -> None:
    """Show progress until every cell has ended.

    Raises:
        JobError: somebody deleted the run's folder.
    """
    progress, watcher = Progress(sys.stdout), Watcher(run)
    try:
        while True:
            if not is_run(run.folder):
                raise JobError(
                    f"{shown_path(run.folder)}: was deleted, and its jobs may go on; "
                    f"stop them: python submit.py cancel {run.name}"
                )
            cells = watcher.look(_PATIENCE_S)
            progress.update([cell for _, cell in cells])
            # While Slurm does not answer, the jobs go on, and so does this.
            if all(state.has_ended for state, _ in cells):
                return
            time.sleep(POLL_S[run.scheduler])
    finally:
        progress.close()


def watch_run(run: Run) -> bool:
    """Show the progress until all has ended; False if the user stopped watching."""
    try:
        watch(run)
    except KeyboardInterrupt:
        print(
            f"\nThe jobs go on. To follow them:\n"
            f"  python submit.py status {run.name} --watch\n"
            f"  python submit.py logs {run.name} -f\n"
            f"  python submit.py report {run.name}\n"
            f"To stop them:\n"
            f"  python submit.py cancel {run.name}"
        )
        return False
    return True


def wait_for(run: Run) -> int:
    """Show progress to the end, then the report; the exit status, 130 if the user left."""
    if not watch_run(run):
        return 130
    states = print_report(run, "md")
    failed = [cell for cell, state in states.items() if state == FAILED]
    for cell in failed:
        print(f"{cell} failed; its log: python submit.py logs {run.name}/{cell}")
    return 0 if set(states.values()) <= {FINISHED, REFUSED} else 1
