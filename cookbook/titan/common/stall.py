"""What a training process leaves behind when it makes no step: its stacks, its flight recorder.

A rank that stands still in a collective cannot be asked, and asking all ranks of all nodes takes a
way to each of them. So each rank sets an alarm at every step. The stacks are written by
faulthandler's own thread, which needs no GIL; torch's flight recorder is read by a Python thread,
which needs it, and says nothing where the hang holds it. The supervisor decides what is a hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

# Earlier than the supervisor ends the attempt (cookbook/supervise/step_clock.py).
STEPS, MORE_S = 4.0, 8.0
_FEWEST = 3
# How often the thread looks whether a step is late.
_LOOK_S = 1.0


class StallAlarm:
    """Writes `stacks/rank-<r>.txt` and a flight recorder's trace where no step comes.

    Args:
        attempt: the attempt's folder.
        traces: how the files of the flight recorder begin; the rank follows.
    """

    def __init__(self, attempt: Path, traces: Path, rank: int) -> None:
        self._rank = rank
        self._traces = traces
        self._times: deque[float] = deque(maxlen=20)
        self._stepped_at: float | None = None
        self._due: float | None = None
        self._path = attempt / "stacks" / f"rank-{rank}.txt"
        # Open before it is needed: a process that hangs may open nothing.
        self._file: TextIO | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._trace, name="stall alarm", daemon=True).start()

    def step(self) -> None:
        """A step is made: set the alarm anew."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._times.append(now - self._stepped_at)
        self._stepped_at = now
        if len(self._times) < _FEWEST:
            return
        seconds = STEPS * statistics.median(self._times) + MORE_S
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        elif os.fstat(self._file.fileno()).st_size:
            # It went on after all, after a long save perhaps.
            os.ftruncate(self._file.fileno(), 0)
            os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(seconds, file=self._file)
        self._due = now + seconds

    def end(self) -> None:
        """All steps are made."""
        faulthandler.cancel_dump_traceback_later()
        self._ended.set()
        if self._file is not None and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
            # Other ranks may have something to say.
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def _trace(self) -> None:
        written: float | None = None
        while not self._ended.wait(_LOOK_S):
            due = self._due
            if due is None or due == written or time.monotonic() < due:
                continue
            written = due
            if content := recorded_collectives():
                trace = Path(f"{self._traces}{self._rank}")
                trace.parent.mkdir(parents=True, exist_ok=True)
                trace.write_bytes(content)


def recorded_collectives() -> bytes | None:
    """The flight recorder's trace, as torch's own analyzer reads it; None where it has none."""
    import torch.distributed.distributed_c10d as c10d

    functions: Any = c10d.torch._C._distributed_c10d
    name = "_dump_nccl_trace" if c10d.is_nccl_available() and _uses_nccl(c10d) else "_dump_fr_trace"
    dump = getattr(functions, name, None)
    return dump() if dump else None


def _uses_nccl(c10d: Any) -> bool:
    return "nccl" in c10d.get_backend()
