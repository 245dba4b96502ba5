"""Says when an attempt makes no step for too long: the usual time of a step is the measure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cookbook.observe.console import Phase
from cookbook.observe.metrics import Newest

# How many of the newest steps say what is usual.
_KEPT = 20
_FEWEST = 3


@dataclass(frozen=True)
class Patience:
    """How long an attempt may make no step.

    Attributes:
        steps: usual step times, while it trains; of steps that nobody logs, as many more.
        more_s: seconds on top of those: a short pause of the file system is no hang.
        start_s: seconds without a new line in the log, until there are steps to judge by. To
            compile a large model takes many minutes.
        save_s: seconds for the first save of a checkpoint and for the end of the training.
        least_save_s: seconds for any save, however short those before it were.
    """

    steps: float = 5.0
    more_s: float = 20.0
    start_s: float = 1800.0
    save_s: float = 900.0
    least_save_s: float = 0.0


class StepClock:
    """Takes looks at a log, and tells how long nothing has come.

    Args:
        usual: seconds of a step in the attempts before, None where that is not known.
        longest_save: the seconds of the longest save so far, None where there was none.
        log_freq: the steps from one that is logged to the next.
    """

    def __init__(
        self,
        patience: Patience,
        usual: float | None = None,
        longest_save: Callable[[], float | None] = lambda: None,
        log_freq: int = 1,
    ) -> None:
        self._patience = patience
        self._before = usual
        self._longest_save = longest_save
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._newest = Newest()
        self._size = 0
        self._log_freq = log_freq
        self._step_at: float | None = None
        self._looked_at: float | None = None
        self.silent = 0.0

    @property
    def usual(self) -> float | None:
        """Seconds of a usual step; None until there are some."""
        if len(self._times) >= _FEWEST:
            return statistics.median(self._times)
        return self._before

    def look(self, newest: Newest, size: int, now: float) -> None:
        """Take note of what the log says.

        Args:
            newest: of the rank that prints the loss.
            size: of the log in bytes, which grows by what any rank prints.
            now: seconds, of any clock that runs on.
        """
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        # Where this process stood still (a suspended job), so did the training.
        self.silent += min(gap, 5.0)
        step, before = newest.step, self._newest.step
        if step is not None and (before is None or step.step > before.step):
            if before is not None and self._step_at is not None:
                self._times.append((now - self._step_at) / (step.step - before.step))
            self._step_at, self.silent = now, 0.0
        elif newest.phase != self._newest.phase or (self._listens and size != self._size):
            self.silent = 0.0
        self._newest, self._size = newest, size

    @property
    def _listens(self) -> bool:
        """Whether any line is a sign of life: there are no steps to judge by yet."""
        return self._newest.step is None or self.usual is None

    @property
    def limit(self) -> float:
        """Seconds of silence that are a hang, in what the attempt does now."""
        usual = self.usual
        if self._newest.phase is Phase.FINISHING:
            return self._patience.save_s
        if self._newest.phase is Phase.SAVING_CHECKPOINT:
            return self._limit_of_save(usual)
        if usual is None or self._listens or self._newest.phase is not Phase.TRAINING:
            return self._patience.start_s
        # Where only each tenth step is logged, nine say nothing.
        return (self._patience.steps + self._log_freq - 1) * usual + self._patience.more_s

    def _limit_of_save(self, usual: float | None) -> float:
        longest = None
        if usual is not None:
            limit = self._patience.steps * usual + self._patience.more_s
            # Until then nobody needs to know, and the log need not be read.
            if self.silent <= limit:
                return limit
            longest = self._longest_save()
        if usual is None or longest is None:
            return self._patience.save_s
        limit = self._patience.steps * (usual + longest) + self._patience.more_s
        return max(limit, self._patience.least_save_s)

    @property
    def hang(self) -> str | None:
        """What is wrong, in words; None while all may be well."""
        if self.silent <= self.limit:
            return None
        if self._newest.step is None:
            return f"no word for {self.silent:.0f} s, before the first step"
        usual = f" (usual: {self.usual:.1f} s)" if self.usual is not None else ""
        return f"no step for {self.silent:.0f} s{usual} after step {self._newest.step.step}"
