"""What became of the first experiment's verdict: other tests, seeds left out, and its power.

Its rule was that of `cookbook.results.loss`: one variance, pooled over all runs, unpaired.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.convergence_curves import FIRST_PRECISIONS, FIRST_SEEDS, measure, read_first
from bench.convergence_plan import END, MARGIN
from cookbook.base.tables import markdown_table
from cookbook.results.interval import Spread, t_below
from cookbook.results.loss import half_width, pooled_spread

JUDGED = FIRST_PRECISIONS[1:]
ERROR = 0.05
REPEATS = 10_000

Ends = Mapping[str, Sequence[float]]
"""By precision: of each seed, the mean loss of the last tenth."""


def ends() -> dict[str, list[float]]:
    """The first experiment's."""
    curves = read_first()
    return {
        precision: [measure(END, curves[precision, seed]) for seed in FIRST_SEEDS]
        for precision in FIRST_PRECISIONS
    }


def pooled(losses: Ends, name: str) -> float:
    """p of equivalence by the first rule: one variance of all runs."""
    spread = pooled_spread(losses.values())
    assert spread is not None
    own, base = losses[name], losses["bf16"]
    error = spread.error * math.sqrt(1 / len(own) + 1 / len(base))
    return _p(losses, name, error, lambda value: t_below(value, spread.freedom))


def paired(losses: Ends, name: str) -> float:
    """p of equivalence from the differences of runs with one seed."""
    gaps = [own - base for own, base in zip(losses[name], losses["bf16"], strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return _p(losses, name, error, lambda value: t_below(value, len(gaps) - 1))


def welch(losses: Ends, name: str) -> float:
    """p of equivalence from each precision's own variance."""
    parts = [statistics.variance(losses[one]) / len(losses[one]) for one in (name, "bf16")]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(losses[one]) - 1) for part, one in zip(parts, (name, "bf16"), strict=True)
    )
    return _p(losses, name, math.sqrt(sum(parts)), lambda value: _t_below_any(value, freedom))


TESTS: Mapping[str, Callable[[Ends, str], float]] = {
    "pooled (the rule)": pooled,
    "paired by seed": paired,
    "Welch": welch,
}


def _p(losses: Ends, name: str, error: float, below: Callable[[float], float]) -> float:
    """Two one-sided tests at the margin."""
    base = statistics.fmean(losses["bf16"])
    difference, limit = statistics.fmean(losses[name]) - base, MARGIN * base
    return max(below((difference - limit) / error), below((-difference - limit) / error))


def _t_below_any(value: float, freedom: float, slices: int = 2000) -> float:
    """Student's t for any degrees of freedom, by Simpson's rule over the angle."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    end = math.atan(value / math.sqrt(freedom))
    width = end / slices
    heights = [math.pow(math.cos(width * n), freedom - 1) for n in range(slices + 1)]
    odd, even = sum(heights[1:-1:2]), sum(heights[2:-1:2])
    area = width / 3 * (heights[0] + heights[-1] + 4 * odd + 2 * even)
    return 0.5 + scale / math.sqrt(math.pi) * area


def without_one(losses: Ends, name: str) -> list[bool]:
    """Whether the first rule says equivalent when a seed is left out, for each seed."""
    return [
        pooled(
            {one: [*found[:number], *found[number + 1 :]] for one, found in losses.items()}, name
        )
        <= ERROR
        for number in range(len(FIRST_SEEDS))
    ]


def power(num_seeds: int, losses: Ends, repeats: int = REPEATS) -> float:
    """How often the first rule says equivalent at a true difference of 0."""
    spread = pooled_spread(losses.values())
    assert spread is not None
    chance, found = random.Random(num_seeds), 0
    limit = MARGIN * statistics.fmean(losses["bf16"]) / spread.error
    # The half width for a pooled standard deviation of 1.
    unit = half_width(Spread(1.0, len(losses) * (num_seeds - 1)), num_seeds, num_seeds)
    for _ in range(repeats):
        runs = [[chance.gauss(0, 1) for _ in range(num_seeds)] for _ in losses]
        means = [sum(run) / num_seeds for run in runs]
        squares = [(one - mean) ** 2 for run, mean in zip(runs, means, strict=True) for one in run]
        seen = math.sqrt(sum(squares) / (len(losses) * (num_seeds - 1)))
        found += abs(means[1] - means[0]) + unit * seen <= limit
    return found / repeats


def render() -> str:
    """Markdown: the p values by test, the verdicts with a seed left out, and the rule's power."""
    losses = ends()
    rows = [
        [what, *(f"{test(losses, name):.3f}" for name in JUDGED)] for what, test in TESTS.items()
    ]
    values = markdown_table(["p of equivalence, end", *JUDGED], rows, "lrr")
    left = [
        [name, str(sum(not found for found in without_one(losses, name))), str(len(FIRST_SEEDS))]
        for name in JUDGED
    ]
    seeds = markdown_table(["one seed left out", "cannot tell", "of"], left, "lrr")
    odds = [[str(number), f"{power(number, losses):.0%}"] for number in range(5, 11)]
    chances = markdown_table(["seeds", "equivalent, at a true difference of 0"], odds, "rr")
    return "\n\n".join([values, seeds, chances]) + "\n"
