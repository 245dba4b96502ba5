"""Read and write the small JSON files of a run, a cell and an attempt; run/folder.py lists them."""

import contextlib
import enum
import errno
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, StringConstraints, TypeAdapter, ValidationError

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.run.folder import Attempt, CellFolder

T = TypeVar("T")
_adapter: Any = functools.cache(TypeAdapter)

QUEUED, RUNNING, FINISHED = "queued", "running", "finished"
FAILED, CANCELLED, REFUSED = "failed", "cancelled", "refused"
# State of a cell whose files cannot be read and whose job the scheduler does not know.
UNKNOWN = "unknown"
OPEN = frozenset({QUEUED, RUNNING})
ENDED = frozenset({FINISHED, FAILED, CANCELLED, REFUSED})
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; return an empty dict if that fails."""
    with contextlib.suppress(InputError):
        return read_json_as(dict[str, Any], path)
    return {}


def read_json_as(kind: type[T], path: Path) -> T:
    """Read the JSON object in `path` as a `kind`; unknown keys are ignored."""
    try:
        content: T = _adapter(kind).validate_json(path.read_bytes(), strict=True)
        return content
    except OSError as error:
        raise InputError(shown_path(path), f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ": ".join([shown_path(path), *map(str, first["loc"][:1])])
        if first["type"] == "missing":
            raise InputError(place, "is missing") from None
        if first["type"] == "json_invalid":
            raise InputError(place, f"cannot be read: {first['msg']}") from None
        allowed = re.sub("^(Input should be|Value error,) ", "", first["msg"])
        raise InputError(place, f"found {first['input']!r:.40}, allowed: {allowed}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a dataclass to `path`; raise FileNotFoundError if the folder was deleted."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder was deleted", str(path))
    write_whole(path, json.dumps(asdict(content), indent=1) + "\n")


def _known_state(state: str) -> str:
    if state not in OPEN | ENDED:
        raise ValueError(", ".join(sorted(OPEN | ENDED)))
    return state


@dataclass(frozen=True)
class Status:
    """The state of a cell as written by its job; times in seconds since the epoch."""

    state: Annotated[str, AfterValidator(_known_state)]
    attempt: int = 0
    reason: str | None = None
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0  # how many times Slurm had requeued the job when this was written


@dataclass(frozen=True)
class Job:
    """The job of a cell: a Slurm job id, or a process on this or another machine."""

    # An element of an array is ARRAY_INDEX.
    job_id: Annotated[str, StringConstraints(pattern=r"^[0-9]+(_[0-9]+)?$")]
    # If `job_id` is a process id, these fields tell the process from a later one with the same id.
    host: str | None = None
    boot: str | None = None
    started: str | None = None  # the process's start time, in clock ticks since the machine's boot


def read_status(cell: CellFolder) -> Status:
    return read_json_as(Status, cell.status)


def write_status(cell: CellFolder, status: Status) -> None:
    """Write the cell's status even on a full disk, so that the final state is not lost."""
    try:
        write_json(cell.status, status)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        # The disk is full: overwrite the old file in place, which needs no new disk block.
        with cell.status.open("r+b", buffering=0) as file:
            file.write(json.dumps(asdict(status)).encode())
            file.truncate()


def read_job(cell: CellFolder) -> Job | None:
    """Read the cell's job; None if the cell was not submitted."""
    return read_json_as(Job, cell.job) if cell.job.exists() else None


def write_job(cell: CellFolder, job: Job | str) -> None:
    """Record the cell's job, given as a Job or as a Slurm job id."""
    write_json(cell.job, Job(job) if isinstance(job, str) else job)


class Cause(enum.StrEnum):
    """Why an attempt ended; the value is the text shown to users."""

    FINISHED = "finished"
    DEAD_RANK = "dead rank"
    LOST_NODE = "lost node"
    HANG = "hang"
    NAN_LOSS = "NaN loss"
    DISK_FULL = "disk full"
    OUT_OF_MEMORY = "out of memory"
    MISSING_FILE = "missing file"
    MISSING_MODULE = "missing module"
    WRONG_OPTION = "wrong option"
    BAD_NODES = "bad nodes"  # preflight found too few healthy nodes
    ERROR = "error"
    SAVED = "saved"  # saved a checkpoint and exited on request (time limit, preemption)
    TOO_LATE = "too late"  # did not exit in time after a request to stop
    STOPPED = "stopped"  # stopped by the user, a time limit, a preemption or a requeue
    CUT_SHORT = "cut short"  # the supervisor was killed or its node lost, so no end was recorded


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended; times in seconds since the epoch; unknown values are None."""

    attempt: int
    cause: Cause
    reason: str | None = None  # why the attempt ended, such as a line of its log
    exit_code: int | None = None
    started: float | None = None
    seen: float | None = None  # when the failure was first noticed
    ended: float | None = None
    job_id: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_good_step: int | None = None  # last step with finite loss and gradient
    decision: str | None = None  # what the supervisor did next, and why
    excluded: tuple[str, ...] = ()  # nodes excluded by this attempt's preflight


def write_attempt_end(attempt: Attempt, end: AttemptEnd) -> None:
    """Record the attempt's end in its folder, unless the disk is full."""
    try:
        write_json(attempt.end, end)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def read_attempt_end(attempt: Attempt) -> AttemptEnd | None:
    """Read how the attempt ended; None if the file is missing or damaged."""
    with contextlib.suppress(InputError):
        return replace(read_json_as(AttemptEnd, attempt.end), attempt=attempt.number)
    return None


def read_history(attempts: Iterable[Attempt]) -> list[AttemptEnd]:
    return [end for attempt in attempts if (end := read_attempt_end(attempt))]


@dataclass(frozen=True)
class PassedOver:
    """A damaged checkpoint, its damage, and the folder it was moved to."""

    checkpoint: str
    damage: str
    moved_to: str


@dataclass(frozen=True)
class Resumption:
    attempt: int
    step: int | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def lines(self) -> list[str]:
        lines = [
            f"attempt {self.attempt} passed over {one.checkpoint}: {one.damage}; "
            f"moved to {one.moved_to}"
            for one in self.passed_over
        ]
        if self.step is not None:
            lines.append(f"attempt {self.attempt} continues after step {self.step}")
        elif self.passed_over:
            lines.append(f"attempt {self.attempt} starts at the beginning: no checkpoint is whole")
        return lines


def read_resumptions(attempts: Iterable[Attempt]) -> Iterator[Resumption]:
    """Read where each attempt resumed, in order; skip damaged files."""
    for attempt in attempts:
        with contextlib.suppress(InputError):
            yield replace(read_json_as(Resumption, attempt.resumption), attempt=attempt.number)
