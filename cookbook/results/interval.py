"""Confidence intervals of figures whose steps are not independent, without NumPy.

A step is slow or its loss high for reasons that last: a neighbour on the network, a warm card, one
long document. So steps next to one another are alike, and an interval that takes them for
independent is too narrow. Here the steps are cut into five batches of consecutive steps, and
the spread of the batches' figures says what chance does (sectioning: Asmussen and Glynn, Stochastic
Simulation, 2007, III.5). Few long batches are used, since they hold also where
the steps are alike for long; what this costs is a somewhat wider interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_BATCHES = 5
# A stall in a batch of three does not move its median.
LEAST_VALUES = 3 * NUM_BATCHES

Statistic = Callable[[Sequence[float]], float]


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


def batch_spread(values: Sequence[float], statistic: Statistic) -> Spread | None:
    """The spread of `statistic` over consecutive values; None where these are too few."""
    if len(values) < LEAST_VALUES:
        return None
    return spread_about(statistic(values), [statistic(batch) for batch in batches(values)])


def spread_about(figure: float, parts: Sequence[float]) -> Spread:
    """The spread of a figure over all from those of its parts, at least two."""
    variance = sum((part - figure) ** 2 for part in parts) / (len(parts) - 1)
    return Spread(math.sqrt(variance / len(parts)), len(parts) - 1)


def t_quantile(probability: float, freedom: int) -> float:
    """Student's t: what a value stays below with `probability`, from 0.5 up."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_below(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _t_below(value: float, freedom: int) -> float:
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
