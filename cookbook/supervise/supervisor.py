"""What runs in a job: the `train.sh` of its cells in turn, and their status files.

On Slurm the batch step becomes this (one cell), on the local machine one process runs all cells of
a sweep. It imports neither submitit nor torch. An attempt that fails is followed by another one in
the same job, as `restarts.decide` says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from cookbook.base.errors import JobError
from cookbook.observe.history import usual_step_time
from cookbook.run import slurm
from cookbook.run.attempts import AttemptEnd, Cause, read_history, write_attempt_end
from cookbook.run.folder import CellFolder
from cookbook.run.processes import process_job
from cookbook.run.status import (
    CANCELLED,
    FAILED,
    FINISHED,
    QUEUED,
    REFUSED,
    RUNNING,
    Status,
    read_status,
    write_job,
    write_status,
)
from cookbook.supervise.attempt import RunningAttempt
from cookbook.supervise.ends import close_history, own_job, record_of, slurm_job, stopped
from cookbook.supervise.keeper import keep
from cookbook.supervise.leftovers import end_left_step
from cookbook.supervise.restarts import GO_ON, Action, Decision, decide
from cookbook.supervise.room import blame_full_disk, has_room, say
from cookbook.supervise.step_clock import Patience
from cookbook.supervise.stop import restarts, stopped_as

_POLL_S = 2.0
# Somebody must make room; then what a recipe bounds are the restarts.
_ROOM_S = 600.0
# Slurm ends a job that it requeues at once.
_REQUEUE_S = 120.0


class Supervisor:
    """What submitit pickles and a job calls: runs the cells in `folders`, in order.

    A cell that has finished is not run again; one that failed or was cut short is, as the next
    attempt, since a job that Slurm requeues starts from the top.
    """

    patience = Patience()

    def __init__(self, cells: Sequence[CellFolder]) -> None:
        self.folders = [str(cell.path) for cell in cells]
        self.running: RunningAttempt | None = None
        self.signal_number = 0
        self.is_asked = False

    def __call__(self) -> None:
        """Run the cells, then exit with status 0; JobError where one failed: the job fails too."""
        if slurm_job():
            keep(self.supervise, self._handle_signals)
        self._handle_signals()
        self.supervise()
        # Returning, submitit would write down that nothing was returned. Nobody reads it, and on a
        # full disk the job would fail of it.
        sys.exit(0)

    def _handle_signals(self) -> None:
        # `cancel` and Slurm's end of a job come as SIGTERM.
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        # Before the time limit, and before preemption where the cluster is set up so.
        signal.signal(signal.SIGUSR1, self._ask_to_stop)

    def supervise(self) -> None:
        """Run the cells."""
        self._note_job()
        failed, began = [], time.time()
        for cell in [CellFolder(Path(folder)) for folder in self.folders]:
            if read_status(cell).state in (FINISHED, REFUSED):
                continue
            if self.signal_number:
                self._pass_over(cell, began)
            elif not self._run_cell(cell):
                failed.append(cell.name)
        if failed:
            raise JobError(f"failed: {', '.join(failed)}")

    def _pass_over(self, cell: CellFolder, began: float) -> None:
        """Write why a cell does not get its turn in this job, which was told to stop."""
        state, why = stopped_as(signal.Signals(self.signal_number).name, began)
        if state == QUEUED:
            # Slurm starts the job again, and the cell has its turn then.
            return
        reason = "cancelled before it started"
        if state != CANCELLED:
            reason = f"the allocation ended before its turn ({why})"
        last = read_status(cell)
        write_status(
            cell, replace(last, state=CANCELLED, reason=reason, exit_code=None, restarts=restarts())
        )

    def _note_job(self) -> None:
        """Note the job where its submitter was killed before it could."""
        job_id = own_job()
        for cell in [CellFolder(Path(folder)) for folder in self.folders]:
            if job_id and not cell.job.exists():
                write_job(cell, job_id if slurm_job() else process_job(int(job_id)))

    def _run_cell(self, cell: CellFolder) -> bool:
        """Run attempts until the cell has ended; whether nothing is wrong with it."""
        record = record_of(cell)
        asked = record.newest
        end_left_step(cell, slurm_job())
        close_history(cell, record)
        ends = [end for end in read_history(cell.attempts()) if end.job_id == own_job()]
        usual = usual_step_time(cell, record, cell.next_attempt().number)
        while True:
            end, usual = self._attempt(cell, usual)
            if self.signal_number:
                end, state = stopped(end, signal.Signals(self.signal_number).name)
                self._write(cell, end, state, end.reason)
                return not end.exit_code
            if end.cause is Cause.FINISHED:
                self._write(cell, end, FINISHED, None)
                return True
            if end.cause is not Cause.SAVED:
                end = blame_full_disk(end, cell)
            decision = decide([*ends, end], record.max_restarts, self._lost_nodes(), self.is_asked)
            if decision.action is Action.REQUEUE:
                decision = self._requeue(cell, end, decision)
            end = replace(end, decision=decision.words)
            say(f"attempt {end.attempt} ended: {end.cause}: {end.reason}; {decision.words}")
            if decision.action is Action.REQUEUE:
                return True
            if end.cause is Cause.TOO_LATE:
                # It may save yet, before its time is over.
                continue
            ends.append(end)
            if decision.action is Action.STOP:
                self._write(cell, end, FAILED, f"{end.reason}; {decision.words}")
                return False
            self._write(cell, end, RUNNING, None)
            if end.cause is Cause.DISK_FULL:
                self._wait_for_room(cell, asked.options.get("checkpoint.folder", "checkpoint"))
            # Later the disk may take what it did not take before.
            self._write(cell, end, RUNNING, None)

    def _wait_for_room(self, cell: CellFolder, folder: str) -> None:
        deadline = time.monotonic() + _ROOM_S
        if not has_room(cell, folder):
            say(f"waiting for room at {cell.path}")
        while not (self.signal_number or has_room(cell, folder) or time.monotonic() > deadline):
            time.sleep(_POLL_S)

    def _attempt(self, cell: CellFolder, usual: float | None) -> tuple[AttemptEnd, float | None]:
        """Run the next attempt, or the one that is still running; how it ended, and `usual` now.

        Args:
            usual: seconds of a usual step.
        """
        if self.running is None:
            attempt = cell.next_attempt()
            now = Status(RUNNING, attempt.number, started=time.time(), restarts=restarts())
            write_status(cell, now)
            self.running = RunningAttempt(cell, attempt, self.patience, usual)
            if self.is_asked:
                self._ask_to_stop(signal.SIGUSR1, None)
            if self.signal_number:
                self._stop(self.signal_number, None)
        end = self.running.wait()
        usual = self.running.clock.usual
        if end.cause is not Cause.TOO_LATE:
            self.running = None
        return end, usual

    def _write(self, cell: CellFolder, end: AttemptEnd, state: str, reason: str | None) -> None:
        """Keep an attempt's end, and the cell's state after it."""
        attempt = cell.attempt(end.attempt)
        # One that was refused has no folder, and its number is the next one's.
        if attempt.path.is_dir():
            write_attempt_end(attempt, end)
        is_over = state != RUNNING
        write_status(
            cell,
            Status(
                state,
                end.attempt,
                reason,
                end.exit_code if is_over else None,
                end.started,
                end.ended if is_over else None,
                restarts(),
            ),
        )

    def _lost_nodes(self) -> list[str]:
        """The nodes of the job that Slurm cannot use; waits where the controller is away."""
        nodes = os.environ.get("SLURM_JOB_NODELIST") if slurm_job() else None
        is_said = False
        while nodes and not self.signal_number:
            try:
                return slurm.lost_nodes(nodes)
            except JobError as error:
                if not is_said:
                    say(f"waiting for Slurm: {error}")
                is_said = True
                time.sleep(_POLL_S)
        return []

    def _requeue(self, cell: CellFolder, end: AttemptEnd, decision: Decision) -> Decision:
        """Requeue this job, which ends this process; another decision where Slurm refuses."""
        job_id = slurm_job()
        if job_id is None:
            return Decision(Action.STOP, f"stopped; to go on: {GO_ON}")
        before = read_status(cell)
        self._write(cell, replace(end, decision=decision.words), QUEUED, decision.words)
        try:
            # A job that is being cancelled would be brought back.
            if not self.signal_number:
                slurm.requeue(job_id)
        except JobError as error:
            write_status(cell, before)
            words = f"stopped: could not be {decision.words} ({error}); to go on: {GO_ON}"
            return Decision(Action.STOP, words)
        deadline = time.monotonic() + _REQUEUE_S
        while not self.signal_number and time.monotonic() < deadline:
            time.sleep(0.2)
        if self.signal_number:
            told, state = stopped(end, signal.Signals(self.signal_number).name)
            if state != QUEUED:
                # Somebody has cancelled it meanwhile.
                self._write(cell, end, state, told.reason)
        return decision

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self.running is not None:
            self.running.send(number)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self.running is not None:
            self.running.ask_to_stop(float(os.environ.get("COOKBOOK_LATE_S", "0")))

    def __getstate__(self) -> dict[str, object]:
        return {"folders": self.folders}

    def __setstate__(self, state: dict[str, object]) -> None:
        # Jobs that were queued before have other names in their pickles.
        self.__init__([])  # type: ignore[misc]
        self.folders = list(state["folders"])  # type: ignore[call-overload]
