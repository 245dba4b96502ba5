"""Watch an attempt's log: the step clock finds hangs, `EndSigns` finds ranks that are gone."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.observe.console import Phase
from cookbook.observe.metrics import Newest
from cookbook.run.record import CellRecord

# The usual time of a step is the median of the newest ones.
_MOST_STEPS = 20
_FEWEST_STEPS = 3
# With these, training pauses at times without a line in the log.
_PAUSES = ("validation.enable", "profiling.enable_profiling", "profiling.enable_memory_snapshot")
# Messages of torchrun and srun about a rank, a torchrun or a node that is gone.
_GONE = re.compile(
    rb"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+"
    rb"|srun: error: \S+: tasks? [0-9,-]+: |srun: error: Node failure on"
)
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Timeouts:
    """How long an attempt may make no step before it counts as hung.

    Attributes:
        steps: usual step times while it trains, plus one for each step that is not logged.
        more_s: seconds on top: a short pause of the file system is no hang.
        start_s: seconds without a new log line before the first steps; a large model compiles for
            many minutes.
        save_s: seconds for the first checkpoint and for the end of training.
        least_save_s: seconds for any checkpoint, however fast the earlier ones were.
    """

    steps: float = 5.0
    more_s: float = 20.0
    start_s: float = 1800.0
    save_s: float = 900.0
    least_save_s: float = 0.0

    def adjusted(self, record: CellRecord) -> Timeouts:
        """Return the timeouts for this cell's options."""
        timeouts = self
        if any(record.options.get(name) for name in _PAUSES):
            timeouts = replace(timeouts, more_s=timeouts.save_s)
        if record.options.get("checkpoint.async_mode", "disabled") != "disabled":
            # Async saves: the logged time covers only the copy; the next save waits for the write.
            timeouts = replace(timeouts, least_save_s=timeouts.save_s)
        return timeouts


class StepClock:
    """Measure how long an attempt has made no progress.

    Args:
        usual: seconds of a step in earlier attempts, None if unknown.
        longest_save: seconds of the longest checkpoint so far, None if there was none.
        log_freq: steps from one logged step to the next.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        usual: float | None = None,
        longest_save: Callable[[], float | None] = lambda: None,
        log_freq: int = 1,
    ) -> None:
        self._timeouts, self._log_freq = timeouts, log_freq
        self._earlier, self._longest_save = usual, longest_save
        self._times: deque[float] = deque(maxlen=_MOST_STEPS)
        self._newest = Newest()
        self._size = 0
        self._step_at: float | None = None
        self._looked_at: float | None = None
        self.silent = 0.0

    @property
    def usual(self) -> float | None:
        """Seconds of a usual step; None until enough steps are logged."""
        if len(self._times) >= _FEWEST_STEPS:
            return statistics.median(self._times)
        return self._earlier

    def look(self, newest: Newest, size: int, now: float) -> None:
        """Take in the newest step and phase.

        Args:
            size: the log's bytes, which grow with any rank's output.
            now: seconds of a steady clock.
        """
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        # While this process stood still (a suspended job), so did training.
        self.silent += min(gap, 5.0)
        step, before = newest.step, self._newest.step
        if step is not None and (before is None or step.step > before.step):
            if before is not None and self._step_at is not None:
                self._times.append((now - self._step_at) / (step.step - before.step))
            self._step_at, self.silent = now, 0.0
        elif newest.phase != self._newest.phase or (self._is_starting and size != self._size):
            self.silent = 0.0
        self._newest, self._size = newest, size

    @property
    def _is_starting(self) -> bool:
        """Whether any log line is a sign of life, for want of steps to judge by."""
        return self._newest.step is None or self.usual is None

    @property
    def limit(self) -> float:
        """Seconds of silence that count as a hang in the present phase."""
        usual, phase, timeouts = self.usual, self._newest.phase, self._timeouts
        if phase is Phase.FINISHING:
            return timeouts.save_s
        if phase is Phase.SAVING_CHECKPOINT:
            return self._save_limit(usual)
        if usual is None or self._is_starting or phase is not Phase.TRAINING:
            return timeouts.start_s
        # With a log_freq of 10, nine steps print nothing.
        return (timeouts.steps + self._log_freq - 1) * usual + timeouts.more_s

    def _save_limit(self, usual: float | None) -> float:
        timeouts, longest = self._timeouts, None
        if usual is not None:
            limit = timeouts.steps * usual + timeouts.more_s
            # Read the log for earlier saves only when the answer matters.
            if self.silent <= limit:
                return limit
            longest = self._longest_save()
        if usual is None or longest is None:
            return timeouts.save_s
        limit = timeouts.steps * (usual + longest) + timeouts.more_s
        return max(limit, timeouts.least_save_s)

    @property
    def hang(self) -> str | None:
        """A description of the hang; None while there is none."""
        if self.silent <= self.limit:
            return None
        if self._newest.step is None:
            return f"no log line for {self.silent:.0f} s, before the first step"
        usual = f" (usual: {self.usual:.1f} s)" if self.usual is not None else ""
        return f"no step for {self.silent:.0f} s{usual} after step {self._newest.step.step}"


class EndSigns:
    """Search a growing log for messages about the end of a rank."""

    def __init__(self, log: Path) -> None:
        self._log, self._offset = log, 0

    def found(self) -> bool:
        """Whether the log has grown by such a message since the last call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                block = file.read(_BLOCK_BYTES)
        except OSError:
            return False
        # Read an unfinished line again.
        whole = block.rfind(b"\n") + 1
        self._offset += whole or (len(block) if len(block) == _BLOCK_BYTES else 0)
        return bool(_GONE.search(block[:whole]))
