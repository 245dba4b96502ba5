"""Confidence intervals for statistics of correlated steps.

Neighbouring steps share a slow network or a long document, and an interval that assumes
independence is too narrow. So the steps are cut into five batches of consecutive ones, and the
spread of the batches' statistics about that of all steps gives the standard error (sectioning:
Asmussen and Glynn, Stochastic Simulation, 2007, III.5). Short batches, which are correlated
themselves, are corrected by the steps' autocorrelation. The method fails where steps stay
correlated over more than a tenth of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BATCHES = 5
# A stall in a batch of three does not move its median.
LEAST_VALUES = 3 * NUM_BATCHES

# A higher correlation is a drift, which no factor corrects.
_MOST_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """A standard error and its degrees of freedom."""

    error: float
    freedom: int

    def half_width(self, level: float) -> float:
        """Return half the two-sided confidence interval at `level`, such as 0.95."""
        return t_quantile((1 + level) / 2, self.freedom) * self.error


def batches(values: Sequence[float]) -> list[Sequence[float]]:
    """Split the values into five consecutive batches whose lengths differ by one at most."""
    cuts = [len(values) * number // NUM_BATCHES for number in range(NUM_BATCHES + 1)]
    return [values[start:end] for start, end in itertools.pairwise(cuts)]


def batch_spread(figure: float, parts: Sequence[float], alike: float, num: int) -> Spread:
    """Return the spread of a statistic of `num` values from those of their `batches`.

    Args:
        alike: the values' lag-1 autocorrelation, as `correlation` estimates it.
    """
    found = spread_about(figure, parts)
    return Spread(found.error * math.sqrt(_of_short_batches(alike, num)), found.freedom)


def spread_about(figure: float, parts: Sequence[float]) -> Spread:
    """Return the spread of a mean from at least two independent values."""
    variance = sum((part - figure) ** 2 for part in parts) / (len(parts) - 1)
    return Spread(math.sqrt(variance / len(parts)), len(parts) - 1)


def correlation(deviations: Sequence[float]) -> float:
    """Return the lag-1 autocorrelation of deviations from the mean, at least 0.

    The bias of short series, (1 + 3 r) / n, is added back (Kendall 1954).
    """
    squares = sum(one * one for one in deviations)
    products = sum(one * other for one, other in itertools.pairwise(deviations))
    if not squares or products <= 0:
        return 0.0
    found = products / squares
    return min(_MOST_ALIKE, found + (1 + 3 * found) / len(deviations))


def _of_short_batches(alike: float, num: int) -> float:
    """Return the factor by which batches underestimate the variance of an AR(1) series."""
    length = num / NUM_BATCHES
    of_all, of_batch = _variance_of_mean(alike, num), _variance_of_mean(alike, length)
    return max(1.0, of_all * (NUM_BATCHES - 1) / (of_batch - of_all))


def _variance_of_mean(alike: float, num: float) -> float:
    """Return the variance of the mean of `num` AR(1) values of variance 1."""
    ends = alike * (1 - math.pow(alike, num)) / (num * (1 - alike) ** 2)
    return (1 + 2 * (alike / (1 - alike) - ends)) / num


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for a `probability` from 0.5 up."""
    low, high = 0.0, 1.0
    while t_below(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if t_below(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def t_below(value: float, freedom: int) -> float:
    """Return Student's distribution function by its finite sums.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    within = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + within / 2
