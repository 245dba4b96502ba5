"""Confidence intervals of figures whose steps are not independent, without NumPy.

A step is slow, or its loss high, for reasons that last: a neighbour on the network, a warm card, a
long document. So steps next to one another are alike, and an interval that takes them for
independent is too narrow. Here the steps are cut into five batches of consecutive ones, and how far
the batches' figures lie from the figure of all says what chance does (sectioning: Asmussen and
Glynn, Stochastic Simulation, 2007, III.5). Few long batches cost a somewhat wider interval, and
hold where steps are alike for long. Batches so short that they are alike themselves are corrected
for by the steps' own correlation. All of this fails where steps stay alike over more than about
a tenth of what was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BATCHES = 5
# A stall in a batch of three does not move its median.
LEAST_VALUES = 3 * NUM_BATCHES

# Beyond this a correlation tells of a drift, which no factor corrects.
_MOST_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """What chance does to a figure.

    Attributes:
        error: its standard error.
        freedom: degrees of freedom that this is known with.
    """

    error: float
    freedom: int

    def half_width(self, level: float) -> float:
        """Of the two-sided confidence interval at `level`, such as 0.95."""
        return t_quantile((1 + level) / 2, self.freedom) * self.error


def batches(values: Sequence[float]) -> list[Sequence[float]]:
    """The values in five runs of consecutive ones whose lengths differ by one at most."""
    cuts = [len(values) * number // NUM_BATCHES for number in range(NUM_BATCHES + 1)]
    return [values[start:end] for start, end in itertools.pairwise(cuts)]


def batch_spread(figure: float, parts: Sequence[float], alike: float, num: int) -> Spread:
    """The spread of a figure over `num` values from those of their `batches`.

    Args:
        alike: the correlation of values that follow one another, as `correlation` estimates it.
    """
    found = spread_about(figure, parts)
    return Spread(found.error * math.sqrt(_of_short_batches(alike, num)), found.freedom)


def spread_about(figure: float, parts: Sequence[float]) -> Spread:
    """The spread of a figure from independent ones, at least two, whose mean or like it is."""
    variance = sum((part - figure) ** 2 for part in parts) / (len(parts) - 1)
    return Spread(math.sqrt(variance / len(parts)), len(parts) - 1)


def correlation(deviations: Sequence[float]) -> float:
    """That of deviations from the figure with the next one, 0 where it is negative.

    The estimate is low for few values, by (1 + 3 r) / n, which is added (Kendall 1954).
    """
    squares = sum(one * one for one in deviations)
    products = sum(one * other for one, other in itertools.pairwise(deviations))
    if not squares or products <= 0:
        return 0.0
    found = products / squares
    return min(_MOST_ALIKE, found + (1 + 3 * found) / len(deviations))


def _of_short_batches(alike: float, num: int) -> float:
    """By what the variance from batches is too small, where the correlation falls from step to
    step by the same factor."""
    length = num / NUM_BATCHES
    of_all, of_batch = _variance_of_mean(alike, num), _variance_of_mean(alike, length)
    return max(1.0, of_all * (NUM_BATCHES - 1) / (of_batch - of_all))


def _variance_of_mean(alike: float, num: float) -> float:
    """Of `num` values whose own variance is 1."""
    ends = alike * (1 - math.pow(alike, num)) / (num * (1 - alike) ** 2)
    return (1 + 2 * (alike / (1 - alike) - ends)) / num


def t_quantile(probability: float, freedom: int) -> float:
    """Student's t: what a value stays below with `probability`, from 0.5 up."""
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
    """The distribution function, by its finite sums (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
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
