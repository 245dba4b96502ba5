"""Run one attempt of a cell: start its script, watch it, and end all its processes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from cookbook.base.errors import JobError
from cookbook.config.facts import facts_of
from cookbook.observe.failure import describe_stacks
from cookbook.observe.history import usual_step_time
from cookbook.observe.metrics import Phase, StepMetrics, Tail, longest_save, step_seconds
from cookbook.run import own_job
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.slurm import is_preempted, kill_steps
from cookbook.run.states import processes_with
from cookbook.run.status import AttemptEnd, Cause
from cookbook.supervise.exits import classify_exit

# torchrun and srun print these when a rank, a torchrun or a node is lost.
_GONE = re.compile(
    rb"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+"
    rb"|srun: error: \S+: tasks? [0-9,-]+: |srun: error: Node failure on"
)
# cookbook/titan/common/outlive.py prints this.
_TERMED = re.compile(rb"^cookbook: a node got SIGTERM")


@dataclass(frozen=True)
class Timeouts:
    """How long an attempt may go without a step before it counts as hung.

    Attributes:
        steps: a step may take this many times as long as usual, and a checkpoint save this many
            times as long as the longest earlier save.
        more_s: seconds to wait in addition, since a short file-system pause is not a hang.
        start_s: seconds to wait for a new log line during startup, which includes compilation.
        save_s: seconds to wait for the first checkpoint save, and for the exit after the last step.
        least_save_s: minimum seconds to wait for any checkpoint save.
    """

    steps: float = 5.0
    more_s: float = 20.0
    start_s: float = 1800.0
    save_s: float = 900.0
    least_save_s: float = 0.0

    def adjusted(self, record: CellRecord) -> Timeouts:
        facts = facts_of(record)
        # Then training sometimes pauses without logging.
        pauses = facts.validates or facts.profiles or facts.memory_snapshots
        # The logged duration of an async save is too short: it excludes writing the files.
        is_async = facts.async_mode != "disabled"
        return replace(
            self,
            more_s=self.save_s if pauses else self.more_s,
            least_save_s=self.save_s if is_async else self.least_save_s,
        )


class StepClock:
    """Measure how long an attempt has made no progress.

    `usual` is the usual step time in seconds; None until enough steps are logged.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        usual: float | None = None,
        longest_save: Callable[[], float | None] = lambda: None,
        log_freq: int = 1,
    ) -> None:
        self._timeouts, self._log_freq = timeouts, log_freq
        self.usual, self._longest_save = usual, longest_save
        self._step: StepMetrics | None = None
        self._phase: Phase | None = None
        self._looked_at: float | None = None
        self._num_looks, self.silent = 0, 0.0

    def look(self, tail: Tail, lines: Sequence[bytes], now: float) -> None:
        """Update the seconds without progress; `lines` is what `tail.read()` just returned."""
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        # Count at most 5 s per call: a longer gap means that the job was suspended, not hung.
        self.silent += min(gap, 5.0)
        step, before = tail.step, self._step
        is_new_step = step is not None and (before is None or step.step > before.step)
        self._num_looks += is_new_step
        # Early steps may be slow because they compile, so wait for a few before using step times.
        if self._num_looks > 3 and (usual := step_seconds(tail.recent)) is not None:
            self.usual = usual
        is_new_line = bool(lines) and (before is None or self.usual is None)
        if is_new_step or is_new_line or tail.phase != self._phase:
            self.silent = 0.0
        self._step, self._phase = step, tail.phase

    @property
    def limit(self) -> float:
        """Seconds without progress that count as a hang in the current phase."""
        usual, phase, timeouts = self.usual, self._phase, self._timeouts
        if phase is Phase.FINISHING or (phase is Phase.SAVING_CHECKPOINT and usual is None):
            return timeouts.save_s
        if usual is None:
            return timeouts.start_s
        limit = timeouts.steps * usual + timeouts.more_s
        if phase is Phase.SAVING_CHECKPOINT:
            # `_longest_save` is slow, as it reads whole logs: call it only if a step is overdue.
            if self.silent <= limit:
                return limit
            longest = self._longest_save()
            long = limit + timeouts.steps * longest if longest is not None else timeouts.save_s
            return max(long, timeouts.least_save_s)
        if self._step is None or phase is not Phase.TRAINING:
            return timeouts.start_s
        return limit + (self._log_freq - 1) * usual

    @property
    def hang(self) -> str | None:
        """A description of the hang; None while training is not hung."""
        if self.silent <= self.limit:
            return None
        if self._step is None:
            return f"no log line for {self.silent:.0f} s, before the first step"
        usual = f" (usual: {self.usual:.1f} s)" if self.usual is not None else ""
        return f"no step for {self.silent:.0f} s{usual} after step {self._step.step}"


_POLL_S = 0.5
# Seconds for the other ranks to exit by themselves after one is lost.
_GRACE_S = 8.0
_STEP_S, _TERM_S, _KILL_S = 15.0, 5.0, 5.0


class RunningAttempt:
    def __init__(
        self,
        cell: CellFolder,
        attempt: Attempt,
        record: CellRecord,
        environment: dict[str, str],
        timeouts: Timeouts,
        earlier: Sequence[Attempt] = (),
    ) -> None:
        self.cell, self.attempt = cell, attempt
        self._record = record
        self.clock = StepClock(
            timeouts.adjusted(record),
            usual_step_time(earlier),
            lambda: longest_save([*earlier, attempt]),
            facts_of(record).log_freq,
        )
        self._tail = Tail(attempt, record.loss_rank)
        self._is_stopped = False
        self._late_at: float | None = None
        self._started = time.time()
        # Start a new session, so that a signal reaches every process that the script starts.
        self.process = subprocess.Popen(
            ["bash", str(attempt.script)],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def send(self, number: int) -> None:
        """Signal the script's processes; from then on, `wait` no longer looks for hangs and NaN."""
        self._is_stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask_to_stop(self, within_s: float) -> None:
        """Ask the ranks to save a checkpoint and exit.

        After `within_s` seconds, `wait` may return even if they still run; 0 means no limit.
        """
        with contextlib.suppress(OSError):
            self.attempt.stop.touch()
        if within_s:
            self._late_at = time.monotonic() + within_s

    def wait(self) -> AttemptEnd:
        """Wait for the script to exit; stop it if it hangs, loses a rank or gets a NaN loss.

        If the cause in the result is TOO_LATE, the script did not exit within the time limit of
        `ask_to_stop`. It still runs, so call `wait` again.
        """
        seen: float | None = None
        cause, reason, is_termed = None, None, False
        while self.process.poll() is None:
            time.sleep(_POLL_S)
            if self._is_stopped:
                continue
            if self._late_at is not None and time.monotonic() > self._late_at:
                folder = self.cell.checkpoints(self._record.options)
                # Requeue only with a finished checkpoint to resume from, else the job would repeat
                # its steps. A save writes .metadata last, so look until it has.
                if facts_of(self._record).checkpoints and any(folder.glob("step-*/.metadata")):
                    self._late_at = None
                    late = "asked to stop, it has not ended in time"
                    return self._end(None, None, Cause.TOO_LATE, late)
            lines = self._tail.read()
            self.clock.look(self._tail, lines, time.monotonic())
            if seen is None and any(map(_GONE.search, lines)):
                seen = time.time()
            is_termed |= any(map(_TERMED.match, lines))
            if seen is not None:
                if time.time() - seen > _GRACE_S:
                    end_step(self.process, self.attempt)
                continue
            step = self._tail.step
            # With max_skipped_steps, training itself skips a limited number of non-finite steps.
            is_limited = facts_of(self._record).max_skipped_steps
            if step and step.loss and not math.isfinite(step.loss) and not is_limited:
                cause, reason = Cause.NAN_LOSS, f"loss is {step.loss} in step {step.step}"
            elif hang := self.clock.hang:
                cause, who = Cause.HANG, describe_stacks(self.attempt, self._record.world)
                reason = "; ".join(filter(None, [hang, who]))
            elif is_termed and (is_own := is_preempted(own_job.slurm_job() or "")) is not None:
                is_termed = False
                if is_own:
                    own_job.log("Slurm preempts this job: a checkpoint is saved in the grace time")
                    self.ask_to_stop(0)
                else:
                    cause, reason = Cause.DEAD_RANK, "a node got SIGTERM, and no preemption"
            if cause is not None:
                seen = time.time()
                end_step(self.process, self.attempt)
        code = self.process.returncode
        if code:
            # Ranks outlive a killed torchrun.
            end_orphan_processes(self.cell)
        return self._end(code, seen, cause, reason)

    def _end(
        self, code: int | None, seen: float | None, cause: Cause | None, reason: str | None
    ) -> AttemptEnd:
        end = classify_exit(self.cell, self.attempt, self._started, code)
        end = replace(end, seen=seen or (end.ended if code else None))
        return end if cause is None else replace(end, cause=cause, reason=reason)


def end_step(process: subprocess.Popen[bytes], attempt: Attempt) -> None:
    """End a script and its Slurm step; return when the script has exited."""
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
    deadline = time.monotonic() + _STEP_S
    for attempt in cell.attempts()[-1:]:
        # Slurm ends the tasks on other nodes after it has answered.
        while _kill_slurm_step(attempt) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    end_orphan_processes(cell)


def _kill_slurm_step(attempt: Attempt) -> bool:
    job_id = own_job.slurm_job()
    # If this fails, the caller ends the srun process, which then ends the Slurm step.
    with contextlib.suppress(JobError):
        return job_id is not None and kill_steps(job_id, attempt.path.name) > 0
    return False


def end_orphan_processes(cell: CellFolder) -> None:
    """End the processes on this machine that this job started to train the cell.

    Find them by their environment variables, since ranks are not in the script's process group.
    """
    for number, seconds in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        orphans = _orphans(cell)
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(orphans, seconds)


def _orphans(cell: CellFolder) -> list[psutil.Process]:
    found = processes_with("CELL_DIR", str(cell.path))
    return [
        one
        for one, own in found.items()
        if "COOKBOOK_ATTEMPT_DIR" in own and one.pid != os.getpid() and own_job.is_own(own)
    ]
