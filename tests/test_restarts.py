"""What follows from how an attempt ended: another one, the queue, or the end."""

from __future__ import annotations

import pytest

from cookbook.run.attempts import AttemptEnd, Cause
from cookbook.supervise.restarts import Action, Decision, decide


def ends(*causes: Cause, step: int = 1) -> list[AttemptEnd]:
    """Attempts of which each came a step further than the one before."""
    return [AttemptEnd(n, cause, last_step=step + n) for n, cause in enumerate(causes)]


def test_what_was_saved_as_asked_is_requeued_and_never_counted() -> None:
    for is_asked in (True, False):
        decision = decide(ends(*[Cause.SAVED] * 20), most=0, is_asked=is_asked)
        assert decision == Decision(Action.REQUEUE, "requeued, to go on from there")
    # Nor does it stand in the way of a failure after it.
    failed = decide(ends(*[Cause.SAVED] * 20, Cause.DEAD_RANK), most=1)
    assert (failed.action, failed.words) == (Action.RESTART, "restarted (1 of 1)")


@pytest.mark.parametrize("cause", [Cause.TOO_LATE, Cause.DEAD_RANK, Cause.HANG])
def test_what_failed_when_its_time_was_almost_over_is_requeued_within_the_bound(
    cause: Cause,
) -> None:
    asked = decide(ends(cause), most=1, is_asked=True)
    assert (asked.action, asked.words) == (
        Action.REQUEUE,
        "requeued, since its time was almost over (1 of 1)",
    )
    assert decide(ends(cause, cause), most=1, is_asked=True).action is Action.STOP


@pytest.mark.parametrize(
    "cause", [Cause.OUT_OF_MEMORY, Cause.MISSING_FILE, Cause.WRONG_OPTION, Cause.BAD_NODES]
)
def test_what_would_come_again_is_not_requeued_either(cause: Cause) -> None:
    decision = decide(ends(cause), most=9, lost_nodes=["worker-1"], is_asked=True)
    assert decision.action is Action.STOP
    assert "then: python submit.py run --resume RUN" in decision.words


def test_a_lost_node_is_requeued_and_counted() -> None:
    assert decide(ends(Cause.DEAD_RANK), 1, ["worker-1"]).action is Action.REQUEUE
    assert decide(ends(*[Cause.LOST_NODE] * 2), 1).action is Action.STOP


@pytest.mark.parametrize(("cause", "most"), [(Cause.DEAD_RANK, 2), (Cause.ERROR, 1)])
def test_attempts_that_come_no_further_are_bounded_and_a_save_is_none_of_them(
    cause: Cause, most: int
) -> None:
    def after(*causes: Cause) -> Action:
        history = [AttemptEnd(0, cause, last_step=5)]
        history += [AttemptEnd(n, one, last_step=5) for n, one in enumerate(causes, 1)]
        return decide(history, most=9).action

    assert after(*[cause] * most) is Action.RESTART
    assert after(Cause.SAVED, *[cause] * most) is Action.RESTART
    assert after(*[cause] * (most + 1)) is Action.STOP
    # What a save had reached is no progress of the failure after it.
    furthest = [AttemptEnd(0, Cause.SAVED, last_step=9), AttemptEnd(1, cause, last_step=9)]
    assert decide([*furthest, *furthest[1:] * most], most=9).action is Action.STOP
