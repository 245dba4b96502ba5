"""What a layer waits for its exchanges: by hand, and what must hold for any times."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cookbook.predict.overlap import RoutedLayer

# Times in ms: an exchange, the experts, the halves of the shared experts.
TIMES = st.floats(0, 50)
LAYERS = st.builds(RoutedLayer, TIMES, TIMES, TIMES, TIMES, st.integers(1, 5))


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        # One chunk: each exchange has one half of the shared experts beside it.
        (RoutedLayer(5, 10, 2, 1, 1), 3 + 4, 4 + 3),
        (RoutedLayer(5, 10, 6, 7, 1), 0, 0),
        # Two: the first arrives after 5, the second after 10 as the first one's experts end; the
        # first is back at 15, when the second can leave, which comes at 20.
        (RoutedLayer(5, 10, 0, 0, 2), 5 + 5, 5 + 5),
        (RoutedLayer(5, 10, 5, 5, 2), 0, 0),
        # Links that are slower than the experts: all four exchanges, one behind another.
        (RoutedLayer(5, 4, 0, 0, 2), 20 - 4, 20 - 4),
    ],
)
def test_by_hand(layer: RoutedLayer, forward: float, backward: float) -> None:
    assert layer.forward_wait_ms() == pytest.approx(forward)
    assert layer.backward_wait_ms() == pytest.approx(backward)


def test_what_is_computed_again_hides_the_first_gradients() -> None:
    layer = RoutedLayer(5, 10, 2, 1, 1)
    assert layer.backward_wait_ms(before_ms=3) == pytest.approx(1 + 3)
    assert layer.backward_wait_ms(before_ms=30) == pytest.approx(3)


@given(LAYERS, TIMES)
def test_waits_are_a_part_of_what_is_sent(layer: RoutedLayer, before: float) -> None:
    sent = 2 * layer.chunks * layer.exchange_ms
    for wait in (layer.forward_wait_ms(), layer.backward_wait_ms(before)):
        assert -1e-9 <= wait <= sent + 1e-9


@given(LAYERS, st.sampled_from(["exchange_ms", "experts_ms", "first_ms", "second_ms"]), TIMES)
def test_more_work_never_ends_sooner(layer: RoutedLayer, name: str, more: float) -> None:
    def ends(one: RoutedLayer) -> list[float]:
        computed = one.first_ms + one.experts_ms + one.second_ms
        return [computed + one.forward_wait_ms(), computed + one.backward_wait_ms()]

    changed = dataclasses.replace(layer, **{name: getattr(layer, name) + more})
    assert all(after >= end - 1e-9 for end, after in zip(ends(layer), ends(changed), strict=True))
