"""The files that an attempt leaves: how it ended (`end.json`), where it continued (`resume.json`).

The job writes them, and they are kept for good.
"""

from __future__ import annotations

import contextlib
import enum
import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cookbook.base.errors import InputError
from cookbook.run.folder import Attempt
from cookbook.run.status import read_json_as, write_json


class Cause(enum.StrEnum):
    """Why an attempt ended; the value is the text to show."""

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
    # The preflight found too few healthy nodes.
    BAD_NODES = "bad nodes"
    ERROR = "error"
    # Asked to stop before its time limit or a preemption, it saved a checkpoint and ended.
    SAVED = "saved"
    # Asked so, it did not end in time.
    TOO_LATE = "too late"
    # A person, a time limit, a preemption or a requeue; the reason names which.
    STOPPED = "stopped"
    # Nobody was left to write why: the supervisor was killed, or its node is lost.
    CUT_SHORT = "cut short"


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended; times in seconds since the epoch, unknown values None.

    Attributes:
        reason: the most telling line of its logs, with the rank.
        seen: when it was first clear that the attempt would not go on.
        job_id: the job that it ran in; a requeued job keeps its id.
        first_step: the first and the last step in its log.
        last_good_step: of a NaN loss, the last step before it.
        decision: what the supervisor did about it, and why.
        left_out: the nodes that the next attempt does without.
    """

    attempt: int
    cause: Cause
    reason: str | None = None
    exit_code: int | None = None
    started: float | None = None
    seen: float | None = None
    ended: float | None = None
    job_id: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_good_step: int | None = None
    decision: str | None = None
    left_out: tuple[str, ...] = ()


def write_attempt_end(attempt: Attempt, end: AttemptEnd) -> None:
    """Keep it in the attempt's folder; a full disk costs no more than this file."""
    try:
        write_json(attempt.end, end)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_attempt_end(attempt: Attempt) -> AttemptEnd | None:
    """Read how the attempt ended; None if that was not written, or is damaged."""
    with contextlib.suppress(InputError):
        return replace(read_json_as(AttemptEnd, attempt.end), attempt=attempt.number)
    return None


def read_history(attempts: Iterable[Attempt]) -> list[AttemptEnd]:
    """Read the ends of the attempts that have one, in their order."""
    return [end for attempt in attempts if (end := read_attempt_end(attempt))]


@dataclass(frozen=True)
class PassedOver:
    """A damaged checkpoint, its damage, and where it lies now."""

    checkpoint: str
    damage: str
    moved_to: str


@dataclass(frozen=True)
class Resumption:
    """Where an attempt continues.

    Attributes:
        step: the last step of the checkpoint that it loads; None for a start from the beginning.
        passed_over: the newer checkpoints that are damaged.
    """

    attempt: int
    step: int | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Lines to show the user."""
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


def write_resumption(attempt: Attempt, resumption: Resumption) -> None:
    """Keep it in the attempt's folder."""
    write_json(attempt.resumption, resumption)


def read_resumptions(attempts: Iterable[Attempt]) -> Iterator[Resumption]:
    """Read where the attempts continued, in their order; damaged files are left out."""
    for attempt in attempts:
        with contextlib.suppress(InputError):
            yield replace(read_json_as(Resumption, attempt.resumption), attempt=attempt.number)
