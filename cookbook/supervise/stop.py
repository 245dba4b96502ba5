"""Why a job was told to stop, and whether it ended at a checkpoint for that.

Slurm always ends a job with the same signal, so its line in the job's log says why.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.status import CANCELLED, FAILED, QUEUED

# slurmstepd writes it to the batch step's standard error before it sends the signal. The time is
# local, without a zone.
_TOLD = re.compile(
    r"^slurmstepd\S*: error: \*\*\* JOB \d+ ON \S+ CANCELLED AT ([\dT:-]+)"
    # A lost node's goes on: `DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS`.
    r" (?:DUE TO ([A-Z ]+)(?:, [^*]*)? )?\*",
    re.MULTILINE,
)
_ENDS = {
    "TIME LIMIT": (FAILED, "Slurm: TIMEOUT"),
    "NODE FAILURE": (FAILED, "Slurm: NODE_FAIL"),
    "PREEMPTION": (FAILED, "Slurm: PREEMPTED"),
    # It starts again, and the next attempt writes what becomes of it.
    "JOB REQUEUE": (QUEUED, "requeued"),
}
_OWN_LOG = Path("/proc/self/fd/2")
_TAIL_BYTES = 1 << 16


def stopped_as(signal_name: str, started: float | None, log: Path = _OWN_LOG) -> tuple[str, str]:
    """The state and the reason of a job that got this signal.

    Args:
        started: seconds since the epoch; a requeued job's log holds the lines of earlier attempts.
        log: the batch step's standard error, by default this process's own.
    """
    return _ENDS.get(_told(log, started or 0.0) or "", (CANCELLED, signal_name))


def saved_step(attempt: Attempt) -> int | None:
    """The step at which the attempt ended, saved as it was asked to; None where it did not."""
    step = _said(attempt)[1]
    return int(step) if step.isdecimal() else None


def _said(attempt: Attempt) -> tuple[str, str]:
    """The job and the step that the ranks wrote when they had saved, else empty texts."""
    try:
        job_id, step = attempt.stopped.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "", ""
    return job_id, step


def restarts_after_failure(cell: CellFolder) -> int:
    """How often Slurm has requeued this job, but for the times that it had saved as asked."""
    job_id = os.environ.get("SLURM_JOB_ID")
    saved = [one for one in cell.attempts() if job_id and _said(one)[0] == job_id]
    return restarts() - len(saved)


def restarts() -> int:
    """How often Slurm has requeued this job."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isascii() and count.isdecimal() else 0


def _told(log: Path, started: float) -> str | None:
    """What Slurm said of the end in `log`; None where it said nothing since `started`."""
    try:
        # A terminal or a pipe can't be read back.
        if not log.is_file():
            return None
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    for at, why in reversed(_TOLD.findall(text)):
        # Whole seconds, of another machine's clock.
        if time.mktime(time.strptime(at, "%Y-%m-%dT%H:%M:%S")) >= started - 5:
            return str(why)
    return None
