"""Compute throughput, and speed-ups and loss verdicts with their confidence intervals.

Successive steps are correlated, so a run's steps are split into five batches of consecutive steps.
The standard error of a statistic comes from its values in the five batches (sectioning: Asmussen
and Glynn, Stochastic Simulation, 2007, III.5). docs/reference/statistics.md has the details.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cookbook.observe.metrics import StepMetrics

NUM_BATCHES = 5
# Each fifth of a run needs three steps, so that a single stall does not move the fifth's median.
LEAST_VALUES = 3 * NUM_BATCHES
# Upper limit for an estimated autocorrelation: a higher one comes from a drift, not from noise.
_MOST_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """A standard error and its degrees of freedom."""

    error: float
    freedom: int

    def half_width(self, level: float) -> float:
        """Return half the width of the two-sided confidence interval at `level`, such as 0.95."""
        # Imported lazily: the command `status` imports this module and must not wait for SciPy.
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + level) / 2)) * self.error


def batches(values: Sequence[float]) -> list[Sequence[float]]:
    """Split the values into five consecutive batches whose lengths differ by at most one."""
    cuts = [len(values) * number // NUM_BATCHES for number in range(NUM_BATCHES + 1)]
    return [values[start:end] for start, end in pairwise(cuts)]


def batch_spread(figure: float, parts: Sequence[float], alike: float, num: int) -> Spread:
    """Estimate the standard error of a statistic of `num` correlated values.

    `figure`: the statistic of all values.
    `parts`: the same statistic for each of five batches of the values.
    `alike`: the lag-1 autocorrelation of the values.
    """

    def variance_of_mean(num: float) -> float:
        """Return the variance of the mean of `num` AR(1) values of variance 1."""
        ends = alike * (1 - math.pow(alike, num)) / (num * (1 - alike) ** 2)
        return (1 + 2 * (alike / (1 - alike) - ends)) / num

    found = spread_about(figure, parts)
    # The batches are not independent. Correct for their correlation as in an AR(1) series.
    of_all, of_batch = variance_of_mean(num), variance_of_mean(num / NUM_BATCHES)
    factor = max(1.0, of_all * (NUM_BATCHES - 1) / (of_batch - of_all))
    return Spread(found.error * math.sqrt(factor), found.freedom)


def spread_about(figure: float, parts: Sequence[float]) -> Spread:
    """Return the standard error of `figure`; `parts` are two or more independent estimates."""
    variance = statistics.variance(parts, xbar=figure)
    return Spread(math.sqrt(variance / len(parts)), len(parts) - 1)


def correlation(deviations: Sequence[float]) -> float:
    """Return the lag-1 autocorrelation of deviations from the mean, or 0 if it is negative.

    The estimate is corrected for its bias in short series (Kendall 1954).
    """
    squares = sum(one * one for one in deviations)
    products = sum(one * other for one, other in pairwise(deviations))
    if not squares or products <= 0:
        return 0.0
    found = products / squares
    return min(_MOST_ALIKE, found + (1 + 3 * found) / len(deviations))


LEVEL = 0.95
STALL = 1.5

FASTER, SLOWER, NOISE = "faster", "slower", "inside the noise"
STEPS, REPEATS = "steps", "repeats"


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens/s/GPU over the logged steps after each attempt's warm-up."""

    median: float
    lower_quartile: float
    upper_quartile: float
    mean: float  # all tokens over all seconds, so that stalls count
    num_steps: int  # number of measured steps
    warm_up_steps: int  # number of warm-up steps, which are not measured
    stalls: tuple[int, ...]  # steps that took at least 1.5 times their run's median step time
    stall_share: float  # share (0 to 1) of the measured time that was lost to stalls


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Throughput over a reference cell's throughput, with its 95% confidence interval."""

    ratio: float
    low: float | None  # `low`, `high` and `verdict` are None if there are too few steps
    high: float | None
    verdict: str | None  # `faster`, `slower`, or `inside the noise` if the interval contains 1
    basis: str  # the values compared: `steps`, or `repeats` if a cell has several
    num: int  # number of steps or repeats in the cell that has fewer


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the finite values; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def measured_steps(curve: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Return the steps after each attempt's warm-up, in which it compiles and allocates.

    Warm-up is the first quarter of an attempt's steps, but at least 1 and at most 10 steps.
    """
    kept, attempts = list[StepMetrics](), defaultdict[int, list[StepMetrics]](list)
    for step in curve:
        attempts[step.attempt].append(step)
    for steps in attempts.values():
        kept += steps[min(10, max(1, len(steps) // 4)) :]
    return kept


def speeds_of(curve: Sequence[StepMetrics]) -> dict[int, float]:
    """Map each measured step that logged a valid speed to that speed, in tokens/s/GPU."""
    speeds = ((one.step, one.tokens_per_second) for one in measured_steps(curve))
    return {step: speed for step, speed in speeds if speed and 0 < speed < math.inf}


def measure(*curves: Sequence[StepMetrics]) -> Throughput | None:
    """Return a cell's throughput over `curves`, one per repeat; None if no step was measured."""
    runs = [speeds for speeds in map(speeds_of, curves) if speeds]
    if not runs:
        return None
    speeds = [speed for run in runs for speed in run.values()]
    several = speeds if len(speeds) > 1 else speeds * 2
    lower, _, upper = statistics.quantiles(several, n=4, method="inclusive")
    stalls, lost = list[int](), 0.0
    for run in runs:
        # Compare with the median of the same run: on a slow node, every step of a run is slow.
        usual = statistics.median(run.values())
        stalled = {step: speed for step, speed in run.items() if speed * STALL <= usual}
        stalls += stalled
        lost += sum(1 / speed - 1 / usual for speed in stalled.values())
    return Throughput(
        median=statistics.median(speeds),
        lower_quartile=lower,
        upper_quartile=upper,
        mean=statistics.harmonic_mean(speeds),
        num_steps=len(speeds),
        warm_up_steps=sum(len(curve) - len(measured_steps(curve)) for curve in curves),
        stalls=tuple(stalls),
        stall_share=lost / sum(1 / speed for speed in speeds),
    )


def speed_up(own: Sequence[float], reference: Sequence[float]) -> SpeedUp | None:
    """Return the ratio of two runs' median speeds, with its confidence interval."""
    if not own or not reference:
        return None
    medians = statistics.median(own), statistics.median(reference)
    ratio = math.log(medians[0] / medians[1])
    spread, num = None, min(len(own), len(reference))
    if num >= LEAST_VALUES:
        parts = [
            math.log(statistics.median(one) / statistics.median(other))
            for one, other in zip(batches(own), batches(reference), strict=True)
        ]
        # Correlate only the signs of deviations from the median, so that stalls do not dominate.
        usual = [[one / medians[0] for one in own], [one / medians[1] for one in reference]]
        if len(own) == len(reference):
            usual = [[one / other for one, other in zip(*usual, strict=True)]]
        alike = max(correlation([math.copysign(1, one - 1) for one in run]) for run in usual)
        spread = batch_spread(ratio, parts, alike, num)
    return _speed_up(ratio, spread, STEPS, num)


def paired_speed_up(pairs: Iterable[tuple[float, float]]) -> SpeedUp | None:
    """Return the geometric mean of own / reference speed over `pairs`; None for fewer than two."""
    ratios = [math.log(own / reference) for own, reference in pairs]
    if len(ratios) < 2:
        return None
    mean = statistics.fmean(ratios)
    return _speed_up(mean, spread_about(mean, ratios), REPEATS, len(ratios))


def _speed_up(ratio: float, spread: Spread | None, basis: str, num: int) -> SpeedUp:
    if spread is None:
        return SpeedUp(math.exp(ratio), None, None, None, basis, num)
    half = spread.half_width(LEVEL)
    low, high = math.exp(ratio - half), math.exp(ratio + half)
    verdict = FASTER if low > 1 else SLOWER if high < 1 else NOISE
    return SpeedUp(math.exp(ratio), low, high, verdict, basis, num)


# The relative loss error of FP8 training that DeepSeek-V3 accepts (arXiv:2412.19437, section 3.3).
MARGIN = 0.0025
LOSS_LEVEL = 0.90
LAST = 0.1

EQUIVALENT, DIFFERENT, CANNOT_TELL = "equivalent", "different", "cannot tell"
WHOLE, LAST_TENTH = "whole", "last tenth"

Losses = Mapping[int, float]  # losses by step


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """A comparison of two cells' mean losses over a window of steps."""

    window: str  # which steps: `whole` or `last tenth`
    verdict: str
    difference: float | None  # mean loss minus the reference's mean loss
    low: float | None  # lower end of the difference's 90% interval
    high: float | None  # upper end of the interval
    limit: float | None  # the margin on both sides of 0: 0.25% of the reference's loss
    num_steps: int  # number of steps in the window that both runs logged
    reason: str | None = None  # why difference, interval and limit are None


def losses_of(steps: Iterable[StepMetrics]) -> dict[int, float]:
    return {step.step: step.loss for step in steps if step.loss is not None}


def judge_curves(own: Losses, reference: Losses) -> list[LossVerdict]:
    """Return two verdicts on the steps that both runs logged: one on all, one on the last tenth."""
    common = sorted(own.keys() & reference)
    start = (1 - LAST) * common[-1] if common else 0.0
    windows = {WHOLE: common, LAST_TENTH: [step for step in common if step > start]}
    return [
        _judge(window, [own[step] for step in steps], [reference[step] for step in steps])
        for window, steps in windows.items()
    ]


def _judge(window: str, own: Sequence[float], reference: Sequence[float]) -> LossVerdict:
    verdict, num = CANNOT_TELL, len(own)
    if not all(map(math.isfinite, reference)):
        reason = "the reference's loss is not finite"
    elif not all(map(math.isfinite, own)):
        verdict, reason = DIFFERENT, "the loss is not finite"
    elif num < LEAST_VALUES:
        logged = "1 step" if num == 1 else f"{num} steps"
        reason = f"both logged only {logged}, {LEAST_VALUES} are needed"
    else:
        gaps = [one - other for one, other in zip(own, reference, strict=True)]
        mean, limit = statistics.fmean(gaps), MARGIN * statistics.fmean(reference)
        parts = [statistics.fmean(batch) for batch in batches(gaps)]
        alike = correlation([gap - mean for gap in gaps])
        half = batch_spread(mean, parts, alike, num).half_width(LOSS_LEVEL)
        if abs(mean) + half <= limit:
            verdict = EQUIVALENT
        elif abs(mean) - half > limit:
            verdict = DIFFERENT
        return LossVerdict(window, verdict, mean, mean - half, mean + half, limit, num)
    return LossVerdict(window, verdict, None, None, None, None, num, reason)
