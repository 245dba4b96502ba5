"""Ends a rank whose torchrun is gone: it would train on, and save over the next attempt's work.

torchrun gives each rank a session of its own, so no signal to torchrun's group reaches it, and
where Slurm does not track processes by cgroups, it is lost to the step as well.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel end this process when the torchrun that started it ends; no other program."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
