"""A pipeline's actions, played through."""

from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.predict.rank import Played, play, schedule_of

pytestmark = pytest.mark.titan


def played(schedule: str, ranks: int, per_rank: int, count: int, forward: float = 1.0) -> Played:
    """With a backward of twice the forward."""
    stages = ranks * per_rank
    factors = {"F": forward, "B": 2 * forward}
    times = {(stage, kind): factors[kind] for stage in range(stages) for kind in "FB"}
    actions = [one["actions"] for one in schedule_of(schedule, ranks, per_rank, count)]
    return play(actions, times, 0.0)


def bubble_ms(one: Played) -> float:
    return one.end_ms - max(one.busy_ms)


@pytest.mark.parametrize(("schedule", "ranks", "count"), [("1F1B", 4, 8), ("GPipe", 2, 6)])
def test_the_bubble_is_that_of_the_literature(schedule: str, ranks: int, count: int) -> None:
    one = played(schedule, ranks, 1, count)
    # (p - 1) forwards and backwards of 3: Narayanan et al., arXiv:2104.04473.
    assert bubble_ms(one) == pytest.approx(3 * (ranks - 1))
    assert one.end_ms == pytest.approx(3 * (count + ranks - 1))


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank() -> None:
    plain, twice = played("1F1B", 4, 1, 16, 2.0), played("Interleaved1F1B", 4, 2, 16)
    assert plain.busy_ms[0] == twice.busy_ms[0]
    assert bubble_ms(twice) == pytest.approx(bubble_ms(plain) / 2)


def test_numbers_that_torch_refuses_are_an_error_of_the_input() -> None:
    with pytest.raises(InputError, match="with 3 microbatches: ValueError: DualPipeV requires"):
        schedule_of("DualPipeV", 4, 2, 3)
    # And the next question is answered all the same.
    answer = schedule_of("1F1B", 2, 1, 8)
    assert [(one["stages"], one["in_flight"]) for one in answer] == [([0], [[2]]), ([1], [[1]])]


def test_microbatches_in_flight_end_with_the_gradients_of_the_weights() -> None:
    from cookbook.titan.common.schedules import in_flight

    first, second = schedule_of("Interleaved1F1B", 2, 2, 4)
    # The first rank begins F0 F0 F2 F2 F0 B2 F0, the second F1 F1 F3 B3 F3 B3 F1.
    assert (first["stages"], first["in_flight"]) == ([0, 2], [[3, 2], [4, 1]])
    assert (second["stages"], second["in_flight"]) == ([1, 3], [[2, 1], [3, 0]])
    # What the weights need is kept until then.
    halves = ("F", 0), ("I", 0), ("F", 1), ("W", 0), ("I", 1), ("W", 1)
    assert in_flight([[0, *half] for half in halves], [0]) == [[2]]


def played_by_hand(actions: Any, transfer_ms: float = 0.0, **times_ms: float) -> Played:
    times = {(int(name[1:]), name[0]): time for name, time in times_ms.items()}
    return play(actions, times, transfer_ms)


def test_a_transfer_takes_time_between_ranks_alone() -> None:
    two = [[[0, "F", 0], [0, "B", 0]], [[1, "F", 0], [1, "B", 0]]]
    times = {"F0": 1.0, "F1": 2.0, "B1": 4.0, "B0": 3.0}
    there_and_back = played_by_hand(two, 10.0, **times)
    assert there_and_back.end_ms == 1 + 10 + 2 + 4 + 10 + 3
    assert there_and_back.busy_ms == [4, 6]
    assert bubble_ms(there_and_back) == 24
    one = [[[0, "F", 0], [1, "F", 0], [1, "B", 0], [0, "B", 0]]]
    assert played_by_hand(one, 10.0, **times).end_ms == 10


def test_what_is_late_is_waited_for_and_what_is_early_is_not() -> None:
    actions = [[[0, "F", 0], [0, "F", 1]], [[1, "F", 0], [1, "F", 1]]]
    # The second rank is faster than the first, and then slower.
    assert played_by_hand(actions, F0=3.0, F1=1.0).end_ms == 3 + 3 + 1
    assert played_by_hand(actions, F0=1.0, F1=3.0).end_ms == 1 + 3 + 3
    assert bubble_ms(played_by_hand(actions, F0=3.0, F1=1.0)) == 1


def test_a_gradient_is_handed_on_before_that_of_the_weights_is_there() -> None:
    halves = [[[0, "F", 0], [0, "I", 0], [0, "W", 0]], [[1, "F", 0], [1, "I", 0], [1, "W", 0]]]
    found = played_by_hand(halves, F0=1.0, F1=1.0, I1=2.0, I0=2.0, W1=5.0, W0=1.0)
    # The second rank's W ends at 9; the first one's at 1 + 1 + 2 + 2 + 1.
    assert found.end_ms == 9
    assert found.busy_ms == [4, 8]
