"""A pipeline's actions, played through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cookbook.base.errors import InputError
from cookbook.predict.rank import Played, actions_of, play

pytestmark = pytest.mark.titan


def played(
    schedule: str,
    ranks: int,
    per_rank: int,
    count: int,
    forward: float = 1.0,
    transfer: float = 0.0,
    slow: dict[int, float] | None = None,
) -> Played:
    """With a backward of twice the forward; `slow` stages take that many times as long."""
    stages = ranks * per_rank
    times = {
        (stage, kind): factor * forward * (slow or {}).get(stage, 1.0)
        for stage, (kind, factor) in itertools.product(
            range(stages), {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.items()
        )
    }
    return play(actions_of(schedule, ranks, per_rank, count).actions, times, stages - 1, transfer)


@pytest.mark.parametrize(("schedule", "ranks", "count"), [("1F1B", 4, 8), ("GPipe", 2, 6)])
def test_the_bubble_is_that_of_the_literature(schedule: str, ranks: int, count: int) -> None:
    one = played(schedule, ranks, 1, count)
    # (p - 1) forwards and backwards of 3: Narayanan et al., arXiv:2104.04473.
    assert one.bubble_ms == pytest.approx(3 * (ranks - 1))
    assert one.end_ms == pytest.approx(3 * (count + ranks - 1))


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank() -> None:
    plain, twice = played("1F1B", 4, 1, 16, 2.0), played("Interleaved1F1B", 4, 2, 16)
    assert plain.busy_ms[0] == twice.busy_ms[0]
    assert twice.bubble_ms == pytest.approx(plain.bubble_ms / 2)


def test_a_backward_in_halves_leaves_less_bubble() -> None:
    whole, halves = played("1F1B", 4, 1, 16, 2.0), played("ZBVZeroBubble", 4, 2, 16)
    assert halves.end_ms < whole.end_ms


def test_every_rank_does_every_microbatch_once() -> None:
    for schedule, per_rank in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)):
        actions = actions_of(schedule, 4, per_rank, 8)
        assert sorted(stage for stages in actions.stages for stage in stages) == [
            *range(4 * per_rank)
        ]
        for own, stages in zip(actions.actions, actions.stages, strict=True):
            wanted = {(s, k, m) for s in stages for k in "FB" for m in range(8)}
            assert {tuple(action) for action in own} == wanted
            assert len(own) == len(wanted)


@settings(deadline=None, max_examples=25)
@given(
    slow=st.integers(0, 3),
    factor=st.floats(1.0, 4.0),
    transfer=st.floats(0.0, 3.0),
    count=st.sampled_from([4, 8, 12]),
)
def test_a_slower_stage_or_link_never_ends_earlier(
    slow: int, factor: float, transfer: float, count: int
) -> None:
    base = played("1F1B", 4, 1, count)
    slower = played("1F1B", 4, 1, count, transfer=transfer, slow={slow: factor})
    assert slower.end_ms >= base.end_ms - 1e-9
    assert slower.bubble_ms >= -1e-9
    assert slower.busiest == slow or factor == 1.0
    # No rank can be done before the work of the slowest is.
    assert slower.end_ms >= max(slower.busy_ms)


def test_numbers_that_torch_refuses_are_an_error_of_the_input() -> None:
    with pytest.raises(InputError, match="DualPipeV with 3 microbatches"):
        actions_of("DualPipeV", 4, 2, 3)
    # And the next question is answered all the same.
    answer = actions_of("1F1B", 2, 1, 8)
    assert (answer.stages, answer.in_flight) == (([0], [1]), ([[2]], [[1]]))
