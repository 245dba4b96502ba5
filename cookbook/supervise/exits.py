"""Decides after each attempt whether the cell is started again, requeued, or stopped."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from cookbook.observe.failure import remedy_for
from cookbook.run.attempts import AttemptEnd, Cause

# Restarts in a row that come no further than an attempt before them: an error that is in the run
# and not in the machine happens again at the same step. An exception in Python is mostly such.
MOST_WITHOUT_PROGRESS = 2
_MOST_AFTER_ERROR = 1
# Starting again would meet the same.
_FINAL = frozenset(
    {
        Cause.OUT_OF_MEMORY,
        Cause.MISSING_FILE,
        Cause.MISSING_MODULE,
        Cause.WRONG_OPTION,
        Cause.BAD_NODES,
    }
)
# Nobody's fault in the run: these are not counted.
_NOT_COUNTED = frozenset({Cause.FINISHED, Cause.STOPPED, Cause.SAVED})

GO_ON = "python submit.py run --resume RUN"


class Action(enum.Enum):
    """What to do after an attempt."""

    RESTART = "restart"
    """In the same allocation: a new step."""
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """What is done, and why, for the history."""

    action: Action
    words: str


def decide(
    ends: Sequence[AttemptEnd],
    most: int,
    lost_nodes: Sequence[str] = (),
    is_asked: bool = False,
) -> Decision:
    """What follows from the ends of a job's attempts so far; the last one has not finished.

    Args:
        ends: in order, at least one.
        most: restarts that the recipe allows.
        lost_nodes: nodes of the allocation that Slurm gives no work to.
        is_asked: the job was asked to stop, since its time is almost over.
    """
    last = ends[-1]
    if last.cause is Cause.SAVED:
        return Decision(Action.REQUEUE, "requeued, to go on from there")
    if last.cause in _FINAL:
        return _stop(f"stopped: {last.cause} would come again", last.cause)
    counted = [end for end in ends if end.cause not in _NOT_COUNTED]
    if len(counted) > most:
        return _stop(f"stopped: restarted {most} times, as max_restarts allows", last.cause)
    idle = attempts_without_progress(ends)
    if idle > (_MOST_AFTER_ERROR if last.cause is Cause.ERROR else MOST_WITHOUT_PROGRESS):
        words = f"stopped: {idle} attempts in a row came no further"
        return _stop(words, last.cause)
    if lost_nodes or last.cause is Cause.LOST_NODE:
        nodes = ", ".join(lost_nodes) or "a node"
        return Decision(Action.REQUEUE, f"requeued without {nodes}, which Slurm cannot use")
    count = f"({len(counted)} of {most})"
    if is_asked:
        return Decision(Action.REQUEUE, f"requeued, since its time was almost over {count}")
    return Decision(Action.RESTART, f"restarted {count}")


def attempts_without_progress(ends: Sequence[AttemptEnd]) -> int:
    """How many attempts at the end made no step that none before them had made."""
    furthest, idle = 0, 0
    for end in ends:
        if end.cause in _NOT_COUNTED:
            furthest = max(furthest, end.last_step or 0)
        elif (end.last_step or 0) > furthest:
            furthest, idle = end.last_step or 0, 0
        else:
            idle += 1
    return idle


def _stop(words: str, cause: Cause) -> Decision:
    remedy = remedy_for(cause)
    return Decision(Action.STOP, f"{words}; {remedy}, then: {GO_ON}" if remedy else words)
