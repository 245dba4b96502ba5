"""The spread of a figure is what chance does to it, also where following steps are alike."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from cookbook.results.interval import batch_spread, batches, correlation

SERIES = 3000


def alike(random_: random.Random, num: int, by: float) -> list[float]:
    """Values of variance 1 about 0, each correlated `by` with the one before."""
    values = [random_.gauss(0, 1)]
    while len(values) < num:
        values.append(by * values[-1] + math.sqrt(1 - by * by) * random_.gauss(0, 1))
    return values


@pytest.mark.parametrize(
    ("num", "by"),
    [(15, 0.0), (90, 0.0), (15, 0.5), (15, 0.8), (40, 0.8), (90, 0.9)],
)
def test_the_variance_of_a_mean_is_found_also_from_short_batches(num: int, by: float) -> None:
    """Without a correction, batches of three that are alike would hide up to half of it."""
    random_ = random.Random(num)
    means, found = [], []
    for _ in range(SERIES):
        values = alike(random_, num, by)
        means.append(statistics.fmean(values))
        parts = [statistics.fmean(batch) for batch in batches(values)]
        spread = batch_spread(means[-1], parts, by, num)
        assert spread.freedom == 4
        found.append(spread.error**2)
    assert statistics.fmean(found) == pytest.approx(statistics.pvariance(means, 0.0), rel=0.1)


def test_how_alike_values_are_is_estimated_from_few_of_them() -> None:
    random_ = random.Random(1)
    for num, by in ((15, 0.3), (40, 0.3), (40, 0.6), (300, 0.9)):
        found = []
        for _ in range(SERIES // 3):
            values = alike(random_, num, by)
            centre = statistics.fmean(values)
            found.append(correlation([value - centre for value in values]))
        # The plain estimate of 15 values is low by 0.13, and never negative here.
        assert statistics.fmean(found) == pytest.approx(by, abs=0.07), (num, by)


def test_a_drift_is_no_correlation_of_1() -> None:
    assert correlation([-2.0, -1.0, 0.0, 1.0, 2.0] * 1) < 0.96
    assert correlation([float(step) for step in range(-50, 51)]) == 0.95
    # Values that turn from one to the next cancel; nothing is gained from that.
    assert correlation([1.0, -1.0] * 20) == 0.0
    assert correlation([]) == 0.0
