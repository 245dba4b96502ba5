"""The rule that judges the convergence experiment: two tests, Holm's correction, one verdict.

Every function takes relative differences: of each seed, the precision's loss over its reference's
with the same seed, minus 1. What a seed does to both cancels.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.convergence_plan import FAMILY_ERROR, MARGIN, SIGN_FLIPS, T_TEST
from cookbook.results.interval import t_below, t_quantile
from cookbook.results.loss import DIFFERENT, EQUIVALENT

UNDECIDED = "undecided"
LEAST = 2

Test = Callable[[Sequence[float], float], float]
"""The p value against "the true difference is `bound` or more"."""


def t_test(differences: Sequence[float], bound: float) -> float:
    """Student's paired t-test, one-sided."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    gap = statistics.fmean(differences) - bound
    if not error:
        return 0.0 if gap < 0 else 1.0
    return t_below(gap / error, len(differences) - 1)


def sign_flips(differences: Sequence[float], bound: float) -> float:
    """The exact test over all changes of sign: were the truth `bound`, each would be as likely.

    It takes no variance and no normal distribution, only that differences lie about their centre
    evenly on both sides.
    """
    gaps = [one - bound for one in differences]
    half = len(gaps) // 2
    first, second = _signed_sums(gaps[:half]), sorted(_signed_sums(gaps[half:]))
    # Sums of the same numbers in another order may differ in their last digit.
    most = math.fsum(gaps) + 1e-12 * math.fsum(map(abs, gaps))
    return sum(bisect_right(second, most - one) for one in first) / (1 << len(gaps))


def _signed_sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums = [one + signed for one in sums for signed in (value, -value)]
    return sums


TEST_OF: Mapping[str, Test] = {T_TEST: t_test, SIGN_FLIPS: sign_flips}


@dataclass(frozen=True)
class Evidence:
    """What one test says of one arm.

    Attributes:
        inside: p value against "the true difference is the margin or more", on either side.
        outside: p value against "the true difference is the margin or less", on both sides.
    """

    inside: float
    outside: float


def weigh(test: Test, differences: Sequence[float]) -> Evidence:
    """Two one-sided tests at the margin, and their opposites."""
    mirrored = [-one for one in differences]
    above, below = test(differences, MARGIN), test(mirrored, MARGIN)
    beyond = min(test(mirrored, -MARGIN), test(differences, -MARGIN))
    return Evidence(max(above, below), min(1.0, 2 * beyond))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values, to be held against the error of the whole family."""
    adjusted, least = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = least
    return adjusted


@dataclass(frozen=True)
class TestVerdict:
    """A test's word on an arm; p values are Holm's."""

    word: str
    inside: float
    outside: float


def verdicts_of(test: Test, arms: Mapping[str, Sequence[float]]) -> dict[str, TestVerdict]:
    """One test's verdicts on every arm of a family.

    An arm that was not run counts in the correction. An infinite difference, of a loss that is no
    number, makes an arm different; one that is no number tells nothing: the reference's was none.
    """
    evidence = {name: _evidence(test, found) for name, found in arms.items()}
    inside = holm({name: one.inside for name, one in evidence.items()})
    outside = holm({name: one.outside for name, one in evidence.items()})
    return {
        name: TestVerdict(_word(inside[name], outside[name]), inside[name], outside[name])
        for name in arms
    }


def _evidence(test: Test, differences: Sequence[float]) -> Evidence:
    if len(differences) < LEAST or any(map(math.isnan, differences)):
        return Evidence(1.0, 1.0)
    if any(map(math.isinf, differences)):
        return Evidence(1.0, 0.0)
    return weigh(test, differences)


def _word(inside: float, outside: float) -> str:
    if inside <= FAMILY_ERROR:
        return EQUIVALENT
    return DIFFERENT if outside <= FAMILY_ERROR else UNDECIDED


@dataclass(frozen=True)
class Verdict:
    """The verdict on an arm by one measure.

    Attributes:
        word: both tests', where they agree.
        tests: each test's.
    """

    word: str
    tests: Mapping[str, TestVerdict]


def judge(arms: Mapping[str, Sequence[float]]) -> dict[str, Verdict]:
    """The verdicts on all arms by one measure, from each arm's differences by seed."""
    by_test = {name: verdicts_of(test, arms) for name, test in TEST_OF.items()}
    found = {}
    for arm in arms:
        tests = {name: verdicts[arm] for name, verdicts in by_test.items()}
        words = {verdict.word for verdict in tests.values()}
        found[arm] = Verdict(words.pop() if len(words) == 1 else UNDECIDED, tests)
    return found


def interval(differences: Sequence[float], level: float = 0.90) -> tuple[float, float]:
    """Student's confidence interval of the mean difference, of one arm by itself."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = t_quantile((1 + level) / 2, len(differences) - 1) * error
    mean = statistics.fmean(differences)
    return mean - half, mean + half
