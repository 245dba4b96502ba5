"""One attempt of a cell: start its script, watch it, end it with all that it started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import psutil

from cookbook.base.errors import JobError
from cookbook.config.stack import load_stack
from cookbook.observe.console import StepMetrics
from cookbook.observe.history import longest_save
from cookbook.observe.metrics import Tail
from cookbook.observe.stacks import describe_stacks
from cookbook.run.attempts import AttemptEnd, Cause
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.slurm import kill_steps
from cookbook.supervise.exits import classify_exit, own_job, slurm_job
from cookbook.supervise.watchdog import EndSigns, StepClock, Timeouts

_POLL_S = 0.5
# For the rest of a step to end by itself, once a rank is gone.
_GRACE_S = 8.0
_STEP_S, _TERM_S, _KILL_S = 15.0, 5.0, 5.0


class RunningAttempt:
    """A cell's script at work.

    Args:
        record: the cell's, with all changes of its later attempts.
        environment: the script's variables beside this process's own.
        arguments: the TorchTitan options at the end of the sbatch line.
        usual: seconds of a usual step in earlier attempts.
    """

    def __init__(
        self,
        cell: CellFolder,
        attempt: Attempt,
        record: CellRecord,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        timeouts: Timeouts,
        usual: float | None,
    ) -> None:
        self.cell, self.attempt = cell, attempt
        self._record = record.as_of(attempt.number)
        self.clock = StepClock(
            timeouts.adjusted(self._record),
            usual,
            lambda: longest_save(cell, record, attempt.number),
            self._record.log_freq or load_stack().options["metrics.log_freq"].default,
        )
        self._tail = Tail(attempt, self._record.loss_rank)
        self._signs = EndSigns(attempt.log)
        self._is_stopped = False
        self._late_at: float | None = None
        self._started = time.time()
        # A session of its own, so that a signal reaches all that the script starts.
        self.process = subprocess.Popen(
            ["bash", str(cell.script), *arguments],
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def send(self, number: int) -> None:
        """Send a signal to all that the script has started; it then ends in its own time."""
        self._is_stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask_to_stop(self, within_s: float) -> None:
        """Have the ranks save a checkpoint and end; after `within_s`, `wait` returns TOO_LATE."""
        with contextlib.suppress(OSError):
            self.attempt.stop.touch()
        if within_s:
            self._late_at = time.monotonic() + within_s

    def wait(self) -> AttemptEnd:
        """Watch until the script has ended, and end it where it makes no progress.

        Returns once while the script still runs, with TOO_LATE.
        """
        seen: float | None = None
        cause, reason = None, None
        while self.process.poll() is None:
            time.sleep(_POLL_S)
            if self._is_stopped:
                continue
            if self._late_at is not None and time.monotonic() > self._late_at:
                self._late_at = None
                # Without a checkpoint, a requeued job would make the same steps again.
                if self._has_checkpoint():
                    late = "asked to stop, it has not ended in time"
                    return self._end(None, None, Cause.TOO_LATE, late)
            newest = self._tail.read()
            self.clock.look(newest, _size_of(self.attempt), time.monotonic())
            if seen is None and self._signs.found():
                seen = time.time()
            if seen is not None:
                if time.time() - seen > _GRACE_S:
                    end_step(self.process, self.attempt)
                continue
            if self._is_nan(newest.step):
                cause = Cause.NAN_LOSS
                assert newest.step
                reason = f"loss is {newest.step.loss} in step {newest.step.step}"
            elif hang := self.clock.hang:
                cause, who = Cause.HANG, describe_stacks(self.attempt, self._record.world)
                reason = "; ".join(filter(None, [hang, who]))
            if cause is not None:
                seen = time.time()
                end_step(self.process, self.attempt)
        code = self.process.returncode
        if code:
            # Ranks outlive a torchrun that was killed.
            end_orphan_processes(self.cell)
        return self._end(code, seen, cause, reason)

    def _is_nan(self, step: StepMetrics | None) -> bool:
        # Training itself counts and limits the steps that it skips.
        if self._record.options.get("training.max_skipped_steps"):
            return False
        return bool(step and step.loss and not math.isfinite(step.loss))

    def _has_checkpoint(self) -> bool:
        options = self._record.options
        folder = self.cell.path / str(options.get("checkpoint.folder", "checkpoint"))
        # A checkpoint that is still being written has no .metadata.
        return bool(options.get("checkpoint.enable")) and any(folder.glob("step-*/.metadata"))

    def _end(
        self, code: int | None, seen: float | None, cause: Cause | None, reason: str | None
    ) -> AttemptEnd:
        end = classify_exit(self.cell, self.attempt, self._record, self._started, code)
        end = replace(end, seen=seen or (end.ended if code else None))
        return end if cause is None else replace(end, cause=cause, reason=reason)


def _size_of(attempt: Attempt) -> int:
    try:
        return attempt.log.stat().st_size
    except OSError:
        return 0


def end_step(process: subprocess.Popen[bytes], attempt: Attempt) -> None:
    """End a script and its step; return when the script is gone.

    A dead or stopped rank keeps all others from another checkpoint, so nothing is lost.
    """
    if _kill_slurm_step(attempt):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STEP_S)
    for number, seconds in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def end_orphan_step(cell: CellFolder) -> None:
    """End the processes that the newest attempt left behind when its supervisor was killed."""
    for attempt in cell.attempts()[-1:]:
        _kill_slurm_step(attempt)
    end_orphan_processes(cell)


def _kill_slurm_step(attempt: Attempt) -> bool:
    """Kill the attempt's step by its name, on all nodes; whether there was one."""
    job_id = slurm_job()
    try:
        return bool(job_id) and kill_steps(str(job_id), attempt.path.name) > 0
    except JobError:
        # Slurm does not answer; srun ends its step when it is signalled.
        return False


def end_orphan_processes(cell: CellFolder) -> None:
    """End the processes on this machine that this job started to train the cell.

    They inherit the script's environment, which names the cell, the attempt and the job; torchrun's
    ranks have sessions of their own.
    """
    deadline = time.monotonic() + _TERM_S
    while orphans := _orphans(cell):
        is_late = time.monotonic() > deadline
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if is_late else signal.SIGTERM)
        if time.monotonic() > deadline + _KILL_S:
            return
        time.sleep(0.2)


def _orphans(cell: CellFolder) -> list[psutil.Process]:
    job, found = own_job(), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            is_of_cell = variables.get("CELL_DIR") == str(cell.path)
            jobs = {variables.get(name) for name in ("SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID")}
            if not (
                is_of_cell and "COOKBOOK_ATTEMPT_DIR" in variables and (not job or job in jobs)
            ):
                continue
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
