"""Who the job is that this process runs in: its id, its restarts, and why Slurm stops it."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cookbook.run.folder import Attempt
from cookbook.run.status import CANCELLED, FAILED, QUEUED

# The supervisor sets this variable to the scheduler of its cells. A local run inside an interactive
# Slurm job must not requeue or kill that job.
SCHEDULER_VARIABLE = "COOKBOOK_SCHEDULER"


def slurm_job() -> str | None:
    """Return the id by which Slurm's commands name this job; None if it is no Slurm job.

    An element of an array is named `ARRAY_INDEX`: the plain id of the last one is the array's own,
    and Slurm would do to all of them what is asked for one.
    """
    if os.environ.get(SCHEDULER_VARIABLE) != "slurm":
        return None
    array, index = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    return f"{array}_{index}" if array and index else os.environ.get("SLURM_JOB_ID")


def job_id() -> str:
    """Return the id of this job: Slurm's, or of the process that `submit.py` named."""
    return slurm_job() or os.environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())


def restarts() -> int:
    """Return how many times Slurm has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def is_own(variables: Mapping[str, str]) -> bool:
    """Whether a process with these environment variables may be of this job."""
    number = os.environ.get("SLURM_JOB_ID")
    return slurm_job() is None or variables.get("SLURM_JOB_ID") == number


def log(words: str, attempt: Attempt | None = None) -> None:
    """Write a line to the job's log, and to that of `attempt`; their disk may be full."""
    with contextlib.suppress(OSError):
        print(f"cookbook: {words}", file=sys.stderr, flush=True)
        if attempt is not None:
            with attempt.log.open("a", encoding="utf-8") as file:
                print(f"cookbook: {words}", file=file)


# slurmstepd writes this line to the batch step's standard error before it signals a job.
_CANCELLED_AT = re.compile(
    r"^slurmstepd\S*: error: \*\*\* JOB \d+ ON \S+ CANCELLED AT ([\dT:-]+)"
    r" (?:DUE TO ([A-Z ]+)(?:, [^*]*)? )?\*",
    re.MULTILINE,
)
_SLURM_REASONS = {
    "TIME LIMIT": (FAILED, "Slurm: TIMEOUT"),
    "NODE FAILURE": (FAILED, "Slurm: NODE_FAIL"),
    "PREEMPTION": (FAILED, "Slurm: PREEMPTED"),
    "JOB REQUEUE": (QUEUED, "requeued"),
}
_OWN_LOG = Path("/proc/self/fd/2")
_TAIL_BYTES = 1 << 16


def stop_reason(signal_name: str, started: float | None, log: Path = _OWN_LOG) -> tuple[str, str]:
    """Return the state and the reason to record when a signal ends this job.

    Args:
        started: ignore log lines from before this time (seconds since the epoch).
        log: the batch step's standard error, by default that of this process.
    """
    text = ""
    # A log that is a terminal or a pipe cannot be read back.
    if log.is_file():
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    for at, why in reversed(_CANCELLED_AT.findall(text)):
        # Allow 5 s: Slurm's time is in whole seconds, by another machine's clock.
        if time.mktime(time.strptime(at, "%Y-%m-%dT%H:%M:%S")) >= (started or 0.0) - 5:
            return _SLURM_REASONS.get(why, (CANCELLED, signal_name))
    return CANCELLED, signal_name
