"""The life of a rank's process: dies with torchrun, reports a stall, exits at once when done.

- torchrun gives each rank a session of its own, so no signal to torchrun's group reaches it. A rank
  that outlives its torchrun would train on and save over the next attempt's work. A data-loader
  worker that outlives its rank keeps the rank's GPU memory, which it has by fork.
- A rank that hangs in a collective cannot be asked. So each rank sets an alarm at every step:
  faulthandler's thread, which needs no GIL, writes the stacks; a Python thread writes torch's
  flight recorder. The supervisor decides whether it is a hang.
- A thread of PyArrow or gloo that takes the GIL during interpreter shutdown can abort the process,
  and a finished job counts as failed (huggingface/datasets#7566, pytorch/pytorch#179291).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1
# The alarm goes off before the supervisor ends the attempt (cookbook/supervise/).
STEPS, MORE_S = 4.0, 8.0
_FEWEST_STEPS = 3
_POLL_S = 1.0


def attempt_folder() -> Path | None:
    """Return the folder of this attempt's files; None in a job by hand."""
    attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
    return Path(attempt) if attempt else None


def die_with_parent(_worker: int = 0) -> None:
    """Let the kernel kill this rank with its torchrun, or this data-loader worker with its rank.

    Do nothing in other programs.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def exit_without_teardown() -> None:
    """Let `python -m torchtitan.train` exit with status 0 and without interpreter shutdown.

    Exit handlers registered after this one run before it. Other programs are left alone.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != "torchtitan.train":
        return
    destroy_process_group = dist.destroy_process_group
    destroyed = False

    @wraps(destroy_process_group)
    def destroy_and_note(*args: Any, **kwargs: Any) -> None:
        nonlocal destroyed
        destroy_process_group(*args, **kwargs)
        destroyed = True

    def leave() -> None:
        # After an exception Python sets the exit status.
        if destroyed and not hasattr(sys, "last_type"):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    # No door: TorchTitan has no hook for the end of a run, and closes its parts after a failure
    # too. Only after a success does it destroy the process group.
    dist.destroy_process_group = destroy_and_note
    atexit.register(leave)


class StallAlarm:
    """Write `stacks/rank-<r>.txt` and a flight recorder's trace when no step comes.

    The attempt's folder gets the stacks; `traces` is the path of the traces without the rank.
    """

    def __init__(self, attempt: Path, traces: Path, rank: int) -> None:
        self._trace_path = Path(f"{traces}{rank}")
        self._times: deque[float] = deque(maxlen=20)
        self._stepped_at: float | None = None
        self._due: float | None = None
        self._path = attempt / "stacks" / f"rank-{rank}.txt"
        # Opened early: a process that hangs may be unable to open a file.
        self._file: TextIO | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._trace, name="stall alarm", daemon=True).start()

    def step(self) -> None:
        """Set the alarm anew after a step."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._times.append(now - self._stepped_at)
        self._stepped_at = now
        if len(self._times) < _FEWEST_STEPS:
            return
        seconds = STEPS * statistics.median(self._times) + MORE_S
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        elif os.fstat(self._file.fileno()).st_size:
            # A false alarm, during a long save perhaps.
            os.ftruncate(self._file.fileno(), 0)
            os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(seconds, file=self._file)
        self._due = now + seconds

    def pause(self) -> None:
        """Set no limit until the next step: validation is not a step."""
        faulthandler.cancel_dump_traceback_later()
        self._due = self._stepped_at = None

    def end(self) -> None:
        """Cancel the alarm after the last step."""
        faulthandler.cancel_dump_traceback_later()
        self._ended.set()
        if self._file is not None and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
            # Other ranks may have written theirs.
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def _trace(self) -> None:
        written: float | None = None
        while not self._ended.wait(_POLL_S):
            due = self._due
            if due is not None and due != written and time.monotonic() >= due:
                written = due
                uses_nccl = dist.is_nccl_available() and "nccl" in dist.get_backend()
                # As torch's own analyzer reads it.
                record = "_dump_nccl_trace" if uses_nccl else "_dump_fr_trace"
                if content := getattr(torch._C._distributed_c10d, record)():
                    self._trace_path.parent.mkdir(parents=True, exist_ok=True)
                    self._trace_path.write_bytes(content)
