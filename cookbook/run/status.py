"""A cell's small files: the job writes `status.json`, its submitter `job.json`.

Whoever sees the job's end in Slurm writes `end.json`, since Slurm forgets.
"""

from __future__ import annotations

import errno
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.run.folder import CellFolder

QUEUED, RUNNING, FINISHED = "queued", "running", "finished"
FAILED, CANCELLED, REFUSED = "failed", "cancelled", "refused"
# Of a cell whose files cannot be read, and of which the scheduler knows nothing either.
UNKNOWN = "unknown"
OPEN = frozenset({QUEUED, RUNNING})
ENDED = frozenset({FINISHED, FAILED, CANCELLED, REFUSED})
STATES = OPEN | ENDED

_Number = (int, float, type(None))


@dataclass(frozen=True)
class Status:
    """What a cell's status file says; times in seconds since the epoch, unknown values None."""

    state: str
    attempt: int = 0
    reason: str | None = None
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    """How often Slurm had requeued the job when it wrote this."""


@dataclass(frozen=True)
class Job:
    """The job that a cell was submitted as: Slurm's id, or the id of a process on this machine."""

    job_id: str
    queued: float


@dataclass(frozen=True)
class End:
    """How Slurm said that a job ended, in its words, after so many requeues."""

    job_id: str
    restarts: int
    state: str
    reason: str


def read_status(cell: CellFolder) -> Status:
    """The cell's status; a file that is missing or holds something else is an InputError."""
    content = read_json(cell.status)
    allowed: dict[str, tuple[type, ...]] = {
        "state": (str,),
        "attempt": (int,),
        "reason": (str, type(None)),
        "exit_code": (int, type(None)),
        "started": _Number,
        "ended": _Number,
        "restarts": (int,),
    }
    known = {name: value for name, value in content.items() if name in allowed}
    for name, value in known.items():
        if not isinstance(value, allowed[name]) or isinstance(value, bool):
            raise InputError(f"{shown_path(cell.status)}: {name}", f"cannot be {value!r}")
    if known.get("state") not in STATES:
        found = known.get("state")
        states = ", ".join(sorted(STATES))
        raise InputError(f"{shown_path(cell.status)}: state", f"found {found!r}, allowed: {states}")
    return Status(**known)


def write_status(cell: CellFolder, status: Status) -> None:
    """Write the cell's status, also where the disk is full: the last word must not be lost."""
    text = json.dumps(asdict(status), indent=1) + "\n"
    try:
        write_whole(cell.status, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # The old file has its block already. One write of a few hundred bytes, then the cut.
        with cell.status.open("r+b", buffering=0) as file:
            file.write(text.encode())
            file.truncate()


def read_job(cell: CellFolder) -> Job | None:
    """The cell's job; None where it was not submitted."""
    if not cell.job.exists():
        return None
    content = read_json(cell.job)
    job_id, queued = content.get("job_id"), content.get("queued", 0.0)
    if not isinstance(job_id, str) or not (job_id.isascii() and job_id.isdecimal()):
        raise InputError(shown_path(cell.job), "holds no job id")
    if not isinstance(queued, int | float):
        raise InputError(shown_path(cell.job), "holds no time of submission")
    return Job(job_id, queued)


def write_job(cell: CellFolder, job_id: str) -> None:
    """Note that the cell was submitted as `job_id`, now."""
    write_whole(cell.job, json.dumps(asdict(Job(job_id, time.time()))) + "\n")


def read_end(cell: CellFolder) -> End | None:
    """How the cell's job was last seen to have ended; None where nobody saw it."""
    try:
        content = read_json(cell.end)
        end = End(**{name: content[name] for name in ("job_id", "restarts", "state", "reason")})
    except (InputError, KeyError):
        return None
    words = (end.job_id, end.state, end.reason)
    is_whole = isinstance(end.restarts, int) and all(isinstance(word, str) for word in words)
    return end if is_whole else None


def write_end(cell: CellFolder, end: End) -> None:
    """Keep how the cell's job was seen to have ended."""
    write_whole(cell.end, json.dumps(asdict(end)) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; anything else is an InputError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise InputError(shown_path(path), f"cannot be read: {words}") from None
    if not isinstance(content, dict):
        found = shorten(json.dumps(content), 40, placeholder=" ...")
        raise InputError(shown_path(path), f"found {found}, allowed: a JSON object")
    return content
