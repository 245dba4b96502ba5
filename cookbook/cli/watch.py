"""How far the cells of a run are, asked again and again at little cost."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from cookbook.base.errors import InputError
from cookbook.cli.display import CellProgress, Progress
from cookbook.cli.results import print_report
from cookbook.observe.console import Phase, StepMetrics
from cookbook.observe.metrics import Tail
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run
from cookbook.run.states import CellState, cell_states
from cookbook.run.status import FAILED, FINISHED, REFUSED, RUNNING

# As many as the widest sparkline shows.
_NUM_SPEEDS = 20
# The first steps hold compilation.
_LEAST_SPEEDS = 4
POLL_S = {"local": 1.0, "slurm": 5.0}


@dataclass
class _Cell:
    """What is kept of a cell between two looks."""

    folder: CellFolder
    record: CellRecord
    tails: dict[int, Tail] = field(default_factory=dict)
    # The first step that was seen of an attempt, and when: its pace follows from the later ones.
    first_seen: tuple[int, int, float] | None = None
    # Attempt, step and speed of the newest steps: one that is made again stands for itself.
    speeds: deque[tuple[tuple[int, int], float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_SPEEDS)
    )


class Watcher:
    """Looks at a run's cells; each look reads only what their logs have grown by."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._cells = {cell.name: _Cell(cell, _record(cell)) for cell in run.cells}

    def look(self) -> list[tuple[CellState, CellProgress]]:
        """The cells as they are now, in the run's order."""
        return [(state, self._progress(state)) for state in cell_states(self.run)]

    def _progress(self, state: CellState) -> CellProgress:
        cell = self._cells[state.cell]
        attempts = cell.folder.attempts()
        step, phase = self._newest(cell, attempts)
        end = state.ended or time.time()
        is_running = state.state == RUNNING
        return CellProgress(
            name=state.cell,
            state=state.state,
            step=step.step if step else None,
            total_steps=cell.record.steps,
            tokens_per_second=step.tokens_per_second if step else None,
            loss=step.loss if step else None,
            elapsed=end - state.started if state.started else None,
            phase=phase.value if phase and is_running and phase != Phase.TRAINING else None,
            is_known=state.is_known,
            left=self._left(cell, attempts, step) if is_running else None,
            emulated=cell.record.emulated,
            speeds=tuple(speed for _, speed in cell.speeds) if is_running else (),
        )

    def _newest(
        self, cell: _Cell, attempts: list[Attempt]
    ) -> tuple[StepMetrics | None, Phase | None]:
        """The newest step of any attempt, and what the last one does."""
        phase = None
        for attempt in reversed(attempts):
            rank = cell.record.as_of(attempt.number).loss_rank
            tail = cell.tails.setdefault(attempt.number, Tail(attempt, rank))
            newest = tail.read()
            if attempt is attempts[-1]:
                for step in tail.recent:
                    _keep_speed(cell, attempt, step)
            if attempt is attempts[-1]:
                phase = newest.phase
            if newest.step is not None:
                return newest.step, phase
        return None, phase

    def _left(self, cell: _Cell, attempts: list[Attempt], step: StepMetrics | None) -> float | None:
        """Seconds to the last step, at the pace since the first step that this watcher saw."""
        total, now = cell.record.steps, time.monotonic()
        if step is None or total is None or not attempts:
            return None
        number = attempts[-1].number
        seen = cell.first_seen
        if seen is None or seen[0] != number or step.step < seen[1]:
            seen = cell.first_seen = (number, step.step, now)
        if steps := step.step - seen[1]:
            return (total - step.step) * (now - seen[2]) / steps
        # Somebody who has just come is told by the speed of the last steps.
        tokens = cell.record.tokens_per_step_per_gpu
        if tokens is None or len(cell.speeds) < _LEAST_SPEEDS:
            return None
        return (total - step.step) * tokens / statistics.median(speed for _, speed in cell.speeds)


def _keep_speed(cell: _Cell, attempt: Attempt, step: StepMetrics) -> None:
    place, speed = (attempt.number, step.step), step.tokens_per_second
    is_new = not cell.speeds or place > cell.speeds[-1][0]
    if is_new and speed is not None and 0 < speed < math.inf:
        cell.speeds.append((place, speed))


def watch(run: Run) -> None:
    """Show progress until every cell has ended."""
    progress, watcher = Progress(sys.stdout), Watcher(run)
    try:
        while True:
            cells = watcher.look()
            progress.update([cell for _, cell in cells])
            # Where Slurm does not answer, the jobs go on, and so does this.
            if all(state.has_ended for state, _ in cells):
                return
            time.sleep(POLL_S[run.scheduler])
    finally:
        progress.close()


def watch_run(run: Run) -> bool:
    """Show the progress until all has ended; False where the user stopped watching."""
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
    """Show progress to the end, then the report; the exit status, 130 where the user left."""
    if not watch_run(run):
        return 130
    states = print_report(run, "md")
    failed = [cell for cell, state in states.items() if state == FAILED]
    for cell in failed:
        print(f"{cell} failed; its log: python submit.py logs {run.name}/{cell}")
    return 0 if set(states.values()) <= {FINISHED, REFUSED} else 1


def _record(cell: CellFolder) -> CellRecord:
    try:
        return read_record(cell.record)
    except InputError:
        # What is wrong with it is `report`'s to say; here it costs the number of steps.
        return CellRecord()
