"""How a job puts itself back into the queue, though Slurm ends it while it says so."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from cookbook.run.slurm import requeue

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LONGEST_S = 60.0
# As bash has it for a process that SIGTERM ended.
_TOLD_TO_STOP = 128 + signal.SIGTERM


def leave_for_queue(job_id: str, nodes: Sequence[str], begin: float | None) -> None:
    """Requeue this job, to start without `nodes` and not before `begin`; does not return.

    Slurm's signal comes between the two commands of that: they are told to ignore it, and the
    process waits for it before it ends, so that its script ends as one that was told to stop.

    Raises:
        JobError: Slurm refuses, as for a job that was submitted with --no-requeue.
    """
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    for number in _SIGNALS:
        signal.signal(number, note)
    # A blocked signal stays blocked in the commands that are started here.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        requeue(job_id, nodes, begin)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    deadline = time.monotonic() + _LONGEST_S
    while not told and time.monotonic() < deadline:
        time.sleep(0.1)
    sys.exit(_TOLD_TO_STOP)
