"""Run a node's torchrun so that SIGTERM does not end it, and say in the log that it came.

    python -m cookbook.titan.common.outlive torchrun ...

Before it preempts a job with a grace time, Slurm sends SIGTERM to what srun started, and with
proctrack/linuxproc to its children too, but not to the batch step. torchrun would end its ranks,
which should save. The supervisor reads the line, and asks Slurm what the signal means.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_WAITED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def main(command: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where torchrun ends by it
    # What is started now inherits this mask: torchrun, its ranks and their helpers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    while (code := process.poll()) is None:
        # A child that ended before the mask was set gives no signal.
        found = signal.sigtimedwait(_WAITED, 1.0)
        number = found.si_signo if found else signal.SIGCHLD
        if number == signal.SIGTERM:
            with contextlib.suppress(OSError):
                print("cookbook: a node got SIGTERM", flush=True)
        elif number != signal.SIGCHLD:
            process.send_signal(number)
    if code < 0:
        # srun names the signal.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)
        os.kill(os.getpid(), -code)
    return abs(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
