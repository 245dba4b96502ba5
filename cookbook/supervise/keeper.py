"""Keeps a supervisor alive: one that is killed is started again, in the same job.

Slurm ends a job whose batch process was killed and never starts it again, and the out-of-memory
killer may choose any process. The keeper does nothing but wait, so there is little to kill it for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from cookbook.supervise.room import say

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_MOST_STARTS = 5


def keep(work: Callable[[], None], handle_signals: Callable[[], None]) -> None:
    """Do `work` in a child process, again where that is killed; then exit with its status.

    Args:
        handle_signals: sets the child's handlers; signals are handed on to it.
    """
    for start in range(1, _MOST_STARTS + 1):
        status = _wait_for(_fork(work, handle_signals))
        if status != -signal.SIGKILL or start == _MOST_STARTS:
            break
        say(f"the supervisor was killed; start {start + 1}")
    _flush()
    # Returning, submitit would write down a result that nobody reads.
    os._exit(status if status >= 0 else 128 - status)


def _fork(work: Callable[[], None], handle_signals: Callable[[], None]) -> int:
    _flush()
    # Until it has its own handlers, the child has the keeper's: none must run there.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child:

        def hand_on(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

        for number in _FORWARDED:
            signal.signal(number, hand_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return child
    status = 1
    try:
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        handle_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    # The log may be on a full disk.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _wait_for(child: int) -> int:
    """The child's exit status, negative for a signal."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
