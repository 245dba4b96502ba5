"""Speeds and losses of curves: the measured part, intervals and how often they hold the truth."""

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from cookbook.observe.metrics import StepMetrics
from cookbook.results.verdicts import (
    CANNOT_TELL,
    DIFFERENT,
    EQUIVALENT,
    FASTER,
    LAST_TENTH,
    MARGIN,
    NOISE,
    SLOWER,
    WHOLE,
    SpeedUp,
    batch_spread,
    batches,
    correlation,
    judge_curves,
    measure,
    measured_steps,
    paired_speed_up,
    speed_up,
)

DRAWS = 1000


def curve(*speeds: float | None, attempt: int = 0, first: int = 1) -> list[StepMetrics]:
    return [
        StepMetrics(step, 3.0, tokens_per_second=speed, attempt=attempt)
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


Curve = dict[int, float]


def falling(num: int) -> Curve:
    """A loss that falls from 11 to about 3."""
    return {step: 2.5 + 8.5 / math.sqrt(step) for step in range(1, num + 1)}


def moved(random_: random.Random, curve: Curve, shift: float, sigma: float, alike: float) -> Curve:
    """The curve times 1 + `shift`, with noise that is alike from one logged step to the next."""
    state, found = random_.gauss(0, 1), {}
    for step, loss in curve.items():
        found[step] = loss * (1 + shift) + sigma * state
        state = alike * state + math.sqrt(1 - alike**2) * random_.gauss(0, 1)
    return found


@pytest.mark.parametrize(
    ("num", "window", "sigma", "alike"), [(300, 0, 0.01, 0.6), (900, 1, 0.01, 0.3)]
)
def test_5_of_100_at_the_limit_are_wrong(num: int, window: int, sigma: float, alike: float) -> None:
    random_, base, words = random.Random(7), falling(num), []
    for _ in range(DRAWS):
        own = moved(random_, base, random_.choice((1, -1)) * MARGIN, sigma, alike)
        words.append(judge_curves(own, base)[window].verdict)
    # 5%, and two standard errors of 1,000 draws.
    assert words.count(EQUIVALENT) <= 64
    assert words.count(DIFFERENT) <= 64


def test_the_figures_of_a_verdict() -> None:
    base = dict.fromkeys(range(1, 301), 4.0)
    random_ = random.Random(1)
    own = {step: 4.002 + random_.gauss(0, 0.001) for step in base}
    whole, last = judge_curves(own, base)
    assert (whole.window, last.window) == (WHOLE, LAST_TENTH)
    assert (whole.num_steps, last.num_steps) == (300, 30)
    assert whole.limit == pytest.approx(0.01)
    assert whole.difference == pytest.approx(0.002, rel=0.1)
    assert whole.low is not None and whole.high is not None
    assert whole.low < (whole.difference or 0.0) < whole.high
    assert (whole.verdict, whole.reason) == (EQUIVALENT, None)


def test_a_difference_at_the_end_is_seen_there() -> None:
    base = falling(1500)
    own = {step: loss * (1.01 if step > 1350 else 1.0) for step, loss in base.items()}
    whole, last = judge_curves(own, base)
    assert (whole.verdict, last.verdict) == (CANNOT_TELL, DIFFERENT)


def test_differences_that_cancel_are_no_equivalence() -> None:
    base = falling(1000)
    own = {step: loss * (1.01 if step < 400 else 0.99) for step, loss in base.items()}
    assert judge_curves(own, base)[0].verdict != EQUIVALENT


def test_too_few_common_steps_tell_nothing() -> None:
    whole, last = judge_curves(falling(100), falling(100))
    assert whole.verdict == EQUIVALENT
    assert (last.verdict, last.difference, last.low, last.limit) == (CANNOT_TELL, None, None, None)
    assert last.reason == "both logged only 10 steps, 15 are needed"
    assert judge_curves({}, falling(100))[0].verdict == CANNOT_TELL


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_different(bad: float) -> None:
    base = falling(200)
    broken = base | dict.fromkeys(range(190, 201), bad)
    assert [found.verdict for found in judge_curves(broken, base)] == [DIFFERENT, DIFFERENT]
    assert judge_curves(broken, base)[0].reason == "the loss is not finite"
    assert [found.verdict for found in judge_curves(base, broken)] == [CANNOT_TELL] * 2
