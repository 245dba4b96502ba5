"""The measured part of a curve, and how often intervals of correlated steps hold the truth."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from cookbook.observe.metrics import StepMetrics
from cookbook.results.verdicts import (
    FASTER,
    NOISE,
    SLOWER,
    SpeedUp,
    batch_spread,
    batches,
    correlation,
    measure,
    measured_steps,
    paired_speed_up,
    speed_up,
    speeds_of,
    t_quantile,
)

DRAWS = 1000


def curve(*speeds: float | None, attempt: int = 0, first: int = 1) -> list[StepMetrics]:
    return [
        StepMetrics(0, step, 3.0, tokens_per_second=speed, attempt=attempt)
        for step, speed in enumerate(speeds, first)
    ]


def test_each_attempt_warms_up() -> None:
    steps = curve(*[10.0] * 5, *[100.0] * 15)
    steps += curve(*[20.0] * 2, *[200.0] * 6, attempt=3, first=21)
    assert [step.tokens_per_second for step in measured_steps(steps)] == [100.0] * 15 + [200.0] * 6
    found = measure(steps)
    assert found is not None
    assert (found.median, found.num_steps, found.warm_up_steps) == (100.0, 21, 7)


def test_stalls_are_named_and_what_they_took() -> None:
    # After 5 steps of warm-up: 13 of 1 s, one of 1.5 s, one of 4 s, at 300 tokens a step.
    found = measure(curve(*[300.0] * 7, 200.0, *[300.0] * 6, 75.0, *[300.0] * 5))
    assert found is not None
    assert found.stalls == (8, 15)
    assert found.stall_share == pytest.approx(3.5 / 18.5)
    assert found.median == 300.0
    assert found.mean == pytest.approx(15 * 300 / 18.5)
    assert (found.lower_quartile, found.upper_quartile) == (300.0, 300.0)
    # A little less than half as long again is no stall.
    near = measure(curve(*[300.0] * 19, 201.0))
    assert near is not None and near.stalls == ()


def test_what_has_no_speed_is_not_measured() -> None:
    assert measure([]) is None
    assert measure(curve(5.0)) is None
    assert measure(curve(5.0, None, math.nan, math.inf, 0.0)) is None
    assert speeds_of(curve(5.0, None, 4.0, 0.0, 3.0)) == [4.0, 3.0]


# Of a printed table: 95% and 90% two-sided.
@pytest.mark.parametrize(
    ("freedom", "of_95", "of_90"),
    [
        *[(1, 12.706, 6.314), (2, 4.303, 2.920), (3, 3.182, 2.353), (4, 2.776, 2.132)],
        *[(5, 2.571, 2.015), (9, 2.262, 1.833), (12, 2.179, 1.782), (120, 1.980, 1.658)],
    ],
)
def test_students_t_is_that_of_the_tables(freedom: int, of_95: float, of_90: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(of_95, abs=6e-4)
    assert t_quantile(0.95, freedom) == pytest.approx(of_90, abs=6e-4)


def test_too_few_steps_have_no_interval() -> None:
    found = speed_up([110.0] * 14, [100.0] * 300)
    assert found is not None
    assert found.ratio == pytest.approx(1.1)
    assert (found.low, found.high, found.verdict) == (None, None, None)
    assert speed_up([], [1.0]) is None and speed_up([1.0], []) is None


@pytest.mark.parametrize(("gain", "word"), [(1.02, FASTER), (1.0005, NOISE), (0.98, SLOWER)])
def test_the_verdict_is_where_the_interval_lies(gain: float, word: str) -> None:
    random_ = random.Random(1)
    base = [100 * random_.gauss(1, 0.01) for _ in range(200)]
    own = [100 * gain * random_.gauss(1, 0.01) for _ in range(200)]
    found = speed_up(own, base)
    low, high = bounds(found)
    assert found is not None and low < found.ratio < high
    assert found.verdict == word
    assert (low <= 1 <= high) == (word == NOISE)


def test_texts_that_both_cells_read_do_not_widen_the_interval() -> None:
    random_ = random.Random(1)
    # Long documents every now and then, for a while, in both.
    texts = [1 + 0.2 * math.sin(step / 16) for step in range(200)]
    base = [100 * text * random_.gauss(1, 0.002) for text in texts]
    own = [110 * text * random_.gauss(1, 0.002) for text in texts]
    assert width(own, base) < 0.01 < width(own, base[25:] + base[:25])


def bounds(found: SpeedUp | None) -> tuple[float, float]:
    assert found is not None and found.low is not None and found.high is not None
    return found.low, found.high


def width(own: Sequence[float], reference: Sequence[float]) -> float:
    low, high = bounds(speed_up(own, reference))
    return high - low


def drawn(
    random_: random.Random, num: int, correlation: float, stalls: float, sigma: float
) -> list[float]:
    """Speeds about 1 whose logarithms are normal, alike by `correlation` from step to step."""
    speeds, state = [], random_.gauss(0, 1)
    for _ in range(num):
        stall = random_.uniform(2, 20) if random_.random() < stalls else 1.0
        speeds.append(math.exp(sigma * state) / stall)
        state = correlation * state + math.sqrt(1 - correlation**2) * random_.gauss(0, 1)
    return speeds


def true_median(stalls: float, sigma: float) -> float:
    """A stalled step is always below the median, so the others' quantile takes its place."""
    return math.exp(-sigma * statistics.NormalDist().inv_cdf(0.5 / (1 - stalls)))


def share_covered(random_: random.Random, num: int, correlation: float, stalls: float) -> float:
    truth = 1.1 * true_median(stalls, 0.02) / true_median(stalls / 2, 0.03)
    covered = 0
    for _ in range(DRAWS):
        own = [1.1 * speed for speed in drawn(random_, num, correlation, stalls, 0.02)]
        low, high = bounds(speed_up(own, drawn(random_, num, correlation, stalls / 2, 0.03)))
        covered += low <= truth <= high
    return covered / DRAWS


@pytest.mark.parametrize(
    ("num", "correlation", "stalls"),
    [
        # The 671B's 20 steps.
        (15, 0.0, 0.0),
        (15, 0.2, 0.03),
        (90, 0.5, 0.05),
        (300, 0.8, 0.03),
        # The 16B's 1,500.
        (1490, 0.9, 0.03),
    ],
)
def test_95_of_100_intervals_hold_the_truth(num: int, correlation: float, stalls: float) -> None:
    assert abs(share_covered(random.Random(num), num, correlation, stalls) - 0.95) <= 0.02


@pytest.mark.parametrize("num_repeats", [2, 3, 6])
def test_the_interval_over_repeats_holds_the_truth_95_times_in_100(num_repeats: int) -> None:
    random_ = random.Random(num_repeats)
    covered = 0
    for _ in range(DRAWS):
        pairs = [
            (1.1 * math.exp(random_.gauss(0, 0.01)), math.exp(random_.gauss(0, 0.01)))
            for _ in range(num_repeats)
        ]
        low, high = bounds(paired_speed_up(pairs))
        covered += low <= 1.1 <= high
    assert abs(covered / DRAWS - 0.95) <= 0.02


def test_a_drift_of_the_machine_is_in_no_speed_up_of_turned_pairs() -> None:
    """A B B A on a machine that gets 1% slower from run to run."""
    a1, b1, b2, a2 = (speed * 0.99**position for position, speed in enumerate([1, 1.2, 1.2, 1]))
    found = paired_speed_up([(b1, a1), (b2, a2)])
    assert found is not None
    assert found.ratio == pytest.approx(1.2)
    assert (found.basis, found.num) == ("repeats", 2)
    assert paired_speed_up([(1.0, 1.0)]) is None


@pytest.mark.parametrize(("num", "by"), [(15, 0.0), (15, 0.3), (15, 0.8), (90, 0.9)])
def test_variance_and_correlation_are_found_from_short_batches(num: int, by: float) -> None:
    """Without a correction, batches of three that are alike would hide up to half of it."""
    random_ = random.Random(num)
    means, found, alike = [], [], []
    for _ in range(3 * DRAWS):
        values = [math.log(speed) for speed in drawn(random_, num, by, 0.0, 1.0)]
        means.append(statistics.fmean(values))
        parts = [statistics.fmean(batch) for batch in batches(values)]
        found.append(batch_spread(means[-1], parts, by, num).error ** 2)
        alike.append(correlation([value - means[-1] for value in values]))
    assert statistics.fmean(found) == pytest.approx(statistics.pvariance(means, 0.0), rel=0.1)
    # The plain estimate of few values is low, and never negative here.
    assert by != 0.3 or statistics.fmean(alike) == pytest.approx(by, abs=0.07)
