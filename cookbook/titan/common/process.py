"""A rank's process: it dies with torchrun, reports a stall, and exits at once when done.

- torchrun starts each rank in its own session, so signals to torchrun's process group miss it. A
  rank that outlives torchrun would continue training and overwrite the next attempt's checkpoints.
  A forked data-loader worker that outlives its rank would hold the rank's GPU memory.
- On Slurm, `outlive.py` has it inherit a blocked SIGTERM. It still obeys torchrun's, else torchrun
  would wait 30 s for the other ranks when one has died.
- A rank that hangs in a collective cannot report it. So each rank sets an alarm at every step. When
  it fires, faulthandler's thread, which needs no GIL, writes the stacks, and a Python thread writes
  the flight recorder's trace. The supervisor decides whether the rank hangs.
- A PyArrow or gloo thread that takes the GIL during interpreter shutdown can abort the process, so
  a finished job would count as failed (huggingface/datasets#7566, pytorch/pytorch#179291).
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
# The alarm fires if no step ends within STEPS times the median step plus MORE_S seconds. The
# supervisor waits longer before it ends the attempt.
STEPS, MORE_S = 4.0, 8.0
_FEWEST_STEPS = 3


def attempt_folder() -> Path | None:
    """Return the folder of this attempt's files; None if no supervisor started this job."""
    attempt = os.environ.get("COOKBOOK_ATTEMPT_DIR")
    return Path(attempt) if attempt else None


def die_with_parent(_worker: int = 0) -> None:
    """Have Linux kill this rank when torchrun dies, or this data-loader worker when its rank dies.

    Does nothing in a program that torchrun did not start.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            threading.Thread(target=_obey_all_but_slurm, daemon=True).start()


def _obey_all_but_slurm() -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        # Slurm's may be out of sight: in another namespace, or root's.
        with contextlib.suppress(OSError):
            if Path(f"/proc/{sender}/comm").read_text().strip() != "slurmstepd":
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                os.kill(os.getpid(), signal.SIGTERM)


def exit_without_teardown() -> None:
    """Make `python -m torchtitan.train` skip interpreter shutdown after a successful run.

    Exit handlers run only if registered after this call. Does nothing in other programs.
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
        # After an exception, leave the exit status to Python.
        if destroyed and not hasattr(sys, "last_type"):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    # TorchTitan has no hook for the end of a run, so patch `destroy_process_group`, which it calls
    # only after a success. Patching `Trainer.close` would not do: it is called after a failure too.
    dist.destroy_process_group = destroy_and_note
    atexit.register(leave)


class StallAlarm:
    """An alarm that saves the rank's stacks and flight-recorder trace if a step takes too long.

    Stacks go to `<attempt>/stacks/rank-<rank>.txt`. `traces` is the beginning of the trace's path,
    to which the rank is added.
    """

    def __init__(self, attempt: Path, traces: Path, rank: int) -> None:
        self._trace_path = Path(f"{traces}{rank}")
        self._times: deque[float] = deque(maxlen=20)
        self._stepped_at: float | None = None
        self._timer = threading.Timer(0, self._write_trace)
        self._path = attempt / "stacks" / f"rank-{rank}.txt"
        # `step` opens this file in advance: a process that hangs may be unable to.
        self._file: TextIO | None = None

    def step(self) -> None:
        """Reset the alarm after a step."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self._times.append(now - self._stepped_at)
        self._stepped_at = now
        if len(self._times) < _FEWEST_STEPS:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        elif os.fstat(self._file.fileno()).st_size:
            # Delete the stacks of a slow step that has ended after all, perhaps after a long save.
            os.ftruncate(self._file.fileno(), 0)
            os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        seconds = STEPS * statistics.median(self._times) + MORE_S
        faulthandler.dump_traceback_later(seconds, file=self._file)
        self._timer.cancel()
        # Wait until faulthandler's dump is done: it can crash while another thread runs.
        self._timer = threading.Timer(seconds + 1.0, self._write_trace)
        self._timer.daemon = True
        self._timer.start()

    def pause(self) -> None:
        """Disable the alarm until the next step: validation may take longer than a step."""
        faulthandler.cancel_dump_traceback_later()
        self._timer.cancel()
        self._stepped_at = None

    def end(self) -> None:
        """Stop the alarm when training ends; delete the file for stack traces if it is empty."""
        self.pause()
        if self._file is not None and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def _write_trace(self) -> None:
        uses_nccl = dist.is_nccl_available() and "nccl" in dist.get_backend()
        # With NCCL or gloo, the trace has the format that torch's flight-recorder analyzer reads.
        record = "_dump_nccl_trace" if uses_nccl else "_dump_fr_trace"
        if content := getattr(torch._C._distributed_c10d, record)():
            self._trace_path.parent.mkdir(parents=True, exist_ok=True)
            self._trace_path.write_bytes(content)
