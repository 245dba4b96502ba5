"""One attempt of a cell: starts its script, watches its progress, ends it, says why it ended."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from cookbook.config.stack import load_stack
from cookbook.observe.history import longest_save
from cookbook.observe.metrics import Tail
from cookbook.observe.stacks import describe_stacks
from cookbook.run.attempts import AttemptEnd, Cause
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.supervise.ends import ended, record_of, slurm_job
from cookbook.supervise.leftovers import end_left_processes, end_step
from cookbook.supervise.step_clock import Patience, StepClock

_POLL_S = 0.5
# What torchrun and srun say of a rank, a torchrun or a node that is gone. What is left of the step
# mostly ends by itself then; what does not has nothing to wait for.
_FAILED = re.compile(
    rb"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+"
    rb"|srun: error: \S+: tasks? [0-9,-]+: |srun: error: Node failure on"
)
_GRACE_S = 8.0
_BLOCK_BYTES = 1 << 20
# What trains with these stands still at times, and no line says so.
_PAUSES = ("validation.enable", "profiling.enable_profiling", "profiling.enable_memory_snapshot")


class RunningAttempt:
    """A cell's script at work.

    Args:
        usual: seconds of a usual step, from the attempts before.
    """

    def __init__(
        self, cell: CellFolder, attempt: Attempt, patience: Patience, usual: float | None
    ) -> None:
        self.cell = cell
        self.attempt = attempt
        record = record_of(cell)
        # As this attempt is asked, which may be otherwise than the first one was.
        self._record = record.as_of(attempt.number)
        self.clock = StepClock(
            _patience_with(patience, self._record),
            usual,
            lambda: longest_save(cell, record, attempt.number),
            self._record.log_freq or load_stack().options["metrics.log_freq"].default,
        )
        self._tail = Tail(attempt, self._record.loss_rank)
        self._signs = _Signs(attempt.log)
        self._job_id = slurm_job()
        self._is_told = False
        self._is_asked = False
        self._late_at: float | None = None
        self._started = time.time()
        # A session of its own, so that a signal reaches all that the script started.
        self.process = subprocess.Popen(
            ["bash", str(cell.script)],
            env={**os.environ, "CELL_DIR": str(cell.path), "COOKBOOK_SUPERVISED": "1"},
            start_new_session=True,
        )

    def send(self, number: int) -> None:
        """Send a signal to all that the script has started here; it ends in its own time then."""
        self._is_told = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask_to_stop(self, within_s: float) -> None:
        """Have it save a checkpoint and end; where it takes longer than that, `wait` says so."""
        self._is_asked = True
        # Without checkpoints the run would start anew, and end no better. 0: nobody sets a limit.
        if within_s and self._record.options.get("checkpoint.enable"):
            self._late_at = time.monotonic() + within_s

    def wait(self) -> AttemptEnd:
        """Watch until the script has ended, or end it where it does not go on; how it ended.

        It returns once while the script runs, with `TOO_LATE`.
        """
        seen: float | None = None
        cause, reason = None, None
        while self.process.poll() is None:
            time.sleep(_POLL_S)
            if self._is_told:
                continue
            if self._is_asked:
                # Before the script has made the folder there is nothing to save.
                with contextlib.suppress(FileNotFoundError):
                    self.attempt.stop.touch()
                    self._is_asked = False
            if self._late_at is not None and time.monotonic() > self._late_at:
                self._late_at = None
                late = "asked to stop, it has not ended in time"
                return self._ended(None, None, Cause.TOO_LATE, late)
            self.clock.look(self._tail.read(), _size(self.attempt.log), time.monotonic())
            if seen is None and self._signs.found():
                seen = time.time()
            if seen is not None:
                if time.time() - seen > _GRACE_S:
                    self._end()
                continue
            cause, reason = self._fault()
            if cause is not None:
                seen = time.time()
                self._end()
        code = self.process.returncode
        if code:
            # Ranks outlive a torchrun that was killed.
            end_left_processes(self.cell)
        return self._ended(code, seen, cause, reason)

    def _fault(self) -> tuple[Cause | None, str | None]:
        """What is wrong with an attempt whose processes are all there."""
        step = self._tail.read().step
        if step is not None and step.loss is not None and not math.isfinite(step.loss):
            return Cause.NAN_LOSS, f"loss is {step.loss} in step {step.step}"
        if hang := self.clock.hang:
            who = describe_stacks(self.attempt, self._record.world)
            return Cause.HANG, "; ".join(filter(None, [hang, who]))
        return None, None

    def _end(self) -> None:
        end_step(self.process, self.attempt, self._job_id)

    def _ended(
        self, code: int | None, seen: float | None, cause: Cause | None, reason: str | None
    ) -> AttemptEnd:
        end, _ = ended(self.cell, self.attempt.number, self._started, code, record=self._record)
        # A script that ended by itself is seen then.
        end = replace(end, seen=seen or (end.ended if code else None))
        return end if cause is None else replace(end, cause=cause, reason=reason)


def _patience_with(patience: Patience, record: CellRecord) -> Patience:
    """The patience with what is trained so."""
    if any(record.options.get(name) for name in _PAUSES):
        patience = replace(patience, more_s=patience.save_s)
    if record.options.get("checkpoint.async_mode", "disabled") != "disabled":
        # Its saves took as long as the copying. The next one, or the last, waits for the writing.
        patience = replace(patience, least_save_s=patience.save_s)
    return patience


class _Signs:
    """Looks for the end of a rank in what a log has grown by."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0

    def found(self) -> bool:
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                block = file.read(_BLOCK_BYTES)
        except OSError:
            return False
        # A line whose end is not there yet is read again.
        whole = block.rfind(b"\n") + 1
        self._offset += whole or (len(block) if len(block) == _BLOCK_BYTES else 0)
        return bool(_FAILED.search(block[:whole]))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
