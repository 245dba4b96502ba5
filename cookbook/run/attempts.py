"""How each attempt of a cell ended: `attempt-<k>/end.json`, written by the job, kept for good."""

from __future__ import annotations

import enum
import errno
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.run.folder import Attempt
from cookbook.run.status import read_json


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
    BAD_NODES = "bad nodes"
    """The look at the nodes before training found too few that are well."""
    ERROR = "error"
    SAVED = "saved"
    """Asked to stop, before its time limit or a preemption, it saved a checkpoint and ended."""
    TOO_LATE = "too late"
    """Asked so, it did not end in time."""
    STOPPED = "stopped"
    """A person, a time limit, a preemption or a requeue; the reason says which."""
    CUT_SHORT = "cut short"
    """Nobody was left to say why: the supervisor was killed, or its node is lost."""


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended; times in seconds since the epoch, unknown values None.

    Attributes:
        reason: the one line of its logs that tells most, with the rank.
        seen: when it was first seen that the attempt would not go on.
        job_id: the job that it ran in; a requeued job keeps its id.
        first_step: the first and the last step that its log shows.
        last_good_step: of a NaN loss, the last step before it.
        decision: what was done about it, and why.
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


_NUMBERS = {"started", "seen", "ended", "exit_code", "first_step", "last_step", "last_good_step"}


def write_attempt_end(attempt: Attempt, end: AttemptEnd) -> None:
    """Keep it in the attempt's folder; on a full disk it is lost, which costs no more than that."""
    try:
        write_whole(attempt.end, json.dumps(asdict(end), indent=1) + "\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_attempt_end(attempt: Attempt) -> AttemptEnd | None:
    """How the attempt ended; None where that was not written, or cannot be read."""
    if not attempt.end.is_file():
        return None
    try:
        content = read_json(attempt.end)
        return _checked(content, attempt.number)
    except (InputError, ValueError, TypeError):
        return None


def read_history(attempts: Iterable[Attempt]) -> list[AttemptEnd]:
    """The ends of the attempts that have one, in their order."""
    return [end for attempt in attempts if (end := read_attempt_end(attempt))]


def _checked(content: dict[str, Any], number: int) -> AttemptEnd:
    known = {one.name for one in fields(AttemptEnd)}
    values = {name: value for name, value in content.items() if name in known}
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _NUMBERS and value is not None and not is_number:
            raise ValueError(name)
    left_out = tuple(str(node) for node in values.get("left_out") or ())
    cause = Cause(values.get("cause", ""))
    return AttemptEnd(**values | {"attempt": number, "cause": cause, "left_out": left_out})


@dataclass(frozen=True)
class PassedOver:
    """A damaged checkpoint, why it is one, and where it lies now."""

    checkpoint: str
    damage: str
    moved_to: str


@dataclass(frozen=True)
class Resumption:
    """Where an attempt continues.

    Attributes:
        attempt: its number.
        step: the last step of the checkpoint that it loads; None where it starts at the beginning.
        passed_over: the newer checkpoints that are damaged.
    """

    attempt: int
    step: int | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def lines(self) -> list[str]:
        """What a person should know of it."""
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
    write_whole(attempt.resumption, json.dumps(asdict(resumption), indent=1) + "\n")


def read_resumptions(attempts: Iterable[Attempt]) -> Iterator[Resumption]:
    """What the attempts kept, in their order; what cannot be read is left out."""
    for attempt in attempts:
        if not attempt.resumption.is_file():
            continue
        try:
            content = read_json(attempt.resumption)
            passed = tuple(PassedOver(**one) for one in content["passed_over"])
            yield Resumption(attempt.number, content["step"], passed)
        except (InputError, KeyError, TypeError):
            continue
