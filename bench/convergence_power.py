"""How many seeds the convergence experiment takes, and how often its rule errs: by simulation.

What chance does to a run is taken from the first experiment's curves, before any new run.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.convergence_curves import FIRST_PRECISIONS, FIRST_SEEDS, Curves, measure, read_first
from bench.convergence_plan import (
    ARMS,
    COMPARED,
    END,
    FAMILY_ERROR,
    LAST,
    MARGIN,
    MEASURES,
    REFERENCE,
    REGISTERED,
    SEEDS,
    WHOLE,
)
from bench.convergence_rule import judge
from cookbook.base.tables import markdown_table
from cookbook.results.loss import EQUIVALENT

WANTED = 0.90
REPEATS = 2000
_SEED = 2026
_WARM_UP = 100
NUMBERS = (9, 10, 11, 12, 13, 14, 15, 16)

# Minutes of one H200, alone, for 1,500 steps on one GPU, less 20 s for the start: measured for the
# first two in the first experiment, and guesses for the others. With two GPUs, minutes of both.
ALONE = {
    "bf16": 1.7,
    "mxfp8": 3.2,
    "mxfp8_wgrad_hp": 3.2,
    "float8": 2.8,
    "bf16_ep2": 2.0,
    "mxfp8_a2a_ep2": 4.0,
}
START = 1 / 3

Draw = Callable[[random.Random], float]
"""What chance does to one run: mean 0, variance 1."""


def normal(chance: random.Random) -> float:
    return chance.gauss(0, 1)


def heavy(chance: random.Random) -> float:
    """Student's t with 5 degrees of freedom: some runs fall far away."""
    squares = sum(chance.gauss(0, 1) ** 2 for _ in range(5))
    return chance.gauss(0, 1) / math.sqrt(squares / 5) / math.sqrt(5 / 3)


def skewed(chance: random.Random) -> float:
    """Exponential: some runs end higher, none much lower."""
    return chance.expovariate(1) - 1


@dataclass(frozen=True)
class Spread:
    """What chance does, relative to the loss.

    Attributes:
        run: standard deviation of a run about its precision's mean.
        within_seed: the same when what its seed does to every precision is taken out.
    """

    run: float
    within_seed: float

    @property
    def pair(self) -> float:
        """Of the difference of two runs with one seed."""
        return math.sqrt(2) * self.within_seed

    @property
    def strangers(self) -> float:
        """Of the difference of two runs with different seeds."""
        return math.sqrt(2) * self.run


def spread_of(curves: Curves, name: str, steps: int | None = None) -> Spread:
    """The first experiment's, by one- and two-way analysis of variance, after `steps` steps."""
    losses = {
        precision: [measure(name, curves[precision, seed][:steps]) for seed in FIRST_SEEDS]
        for precision in FIRST_PRECISIONS
    }
    level = statistics.fmean(statistics.fmean(row) for row in losses.values())
    about = [
        [one / level - statistics.fmean(row) / level for one in row] for row in losses.values()
    ]
    of_seed = [statistics.fmean(column) for column in zip(*about, strict=True)]
    left = [one - mean for row in about for one, mean in zip(row, of_seed, strict=True)]
    rows, columns = len(about), len(of_seed)
    squares = sum(one * one for row in about for one in row)
    return Spread(
        math.sqrt(squares / (rows * (columns - 1))),
        math.sqrt(sum(one * one for one in left) / ((rows - 1) * (columns - 1))),
    )


@dataclass(frozen=True)
class Odds:
    """How often, of many made-up experiments, the verdict was `equivalent`.

    Attributes:
        each: the mean over the arms that truly are.
        every: all of those at once.
        any_false: any of those that truly are not.
    """

    each: float
    every: float
    any_false: float


def simulate(
    num_seeds: int,
    pair: float,
    truth: Mapping[str, float],
    draw: Draw = normal,
    repeats: int = REPEATS,
    seed: int = _SEED,
) -> Odds:
    """Made-up experiments of known truth, judged by the rule.

    Args:
        pair: the standard deviation of the difference of two runs with one seed.
        truth: each arm's true relative difference from its reference; 0 where none is named.
    """
    chance = random.Random(seed)
    false = {arm for arm, shift in truth.items() if abs(shift) >= MARGIN}
    true = [arm for arm in COMPARED if arm not in false]
    each, every, any_false = 0, 0, 0
    for _ in range(repeats):
        runs = {
            arm.name: [draw(chance) * pair / math.sqrt(2) for _ in range(num_seeds)] for arm in ARMS
        }
        arms = {
            arm: [
                truth.get(arm, 0.0) + own - base
                for own, base in zip(runs[arm], runs[reference], strict=True)
            ]
            for arm, reference in REFERENCE.items()
        }
        found = {arm for arm, verdict in judge(arms).items() if verdict.word == EQUIVALENT}
        each += len(found.intersection(true))
        every += bool(true) and found.issuperset(true)
        any_false += bool(found & false)
    return Odds(each / max(1, len(true)) / repeats, every / repeats, any_false / repeats)


def seeds_needed(pair: float, numbers: Sequence[int] = NUMBERS) -> int:
    """The fewest seeds with which each arm is found equivalent in 90% of cases."""
    return next(number for number in numbers if simulate(number, pair, {}).each >= WANTED)


def render() -> str:
    """Markdown: what chance does, the seeds that follow, the errors, and the price of steps."""
    curves = read_first()
    spreads = {name: spread_of(curves, name) for name in MEASURES}
    parts = [
        "What chance does to a loss: standard deviations in the first experiment's 15 curves.",
        _spread_table(spreads),
        f"How often one arm, and how often all four, are called equivalent at a true difference of "
        f"0, by the measure `end`; {REPEATS:,} made-up experiments a number.",
        _power_table(spreads[END]),
        f"How often an arm whose true difference is the margin is called equivalent, with "
        f"{len(SEEDS)} seeds; allowed are {FAMILY_ERROR:.0%}.",
        _size_table(spreads[END].strangers),
        "Steps and their price. How far pairs of one seed were apart in the first experiment: in "
        "the tenth that ends there, with the dips of its text, and in the median tenth as long.",
        _steps_table(curves),
    ]
    return "\n\n".join(parts) + "\n"


def _percent(value: float, digits: int = 3) -> str:
    return f"{100 * value:.{digits}f}%"


def _spread_table(spreads: Mapping[str, Spread]) -> str:
    rows = [
        [name, *map(_percent, (one.run, one.within_seed, one.strangers, one.pair))]
        for name, one in spreads.items()
    ]
    head = ["measure", "a run", "less its seed's part", "difference of two seeds", "of one seed"]
    return markdown_table(head, rows, "lrrrr")


def _power_table(spread: Spread) -> str:
    rows = []
    for number in NUMBERS:
        odds = [simulate(number, pair, {}) for pair in (spread.pair, spread.strangers)]
        words = [_percent(value, 1) for one in odds for value in (one.each, one.every)]
        rows.append([str(number), *words])
    head = ["seeds"]
    for pair in (spread.pair, spread.strangers):
        head += [f"one arm, pairs {_percent(pair)} apart", "all four"]
    return markdown_table(head, rows, "rrrrr")


def _size_table(pair: float) -> str:
    all_four = dict.fromkeys(COMPARED, MARGIN)
    above_and_below = {arm: MARGIN * (-1) ** n for n, arm in enumerate(COMPARED)}
    cases: list[tuple[str, Mapping[str, float], Draw]] = [
        ("all four", all_four, normal),
        ("two above, two below", above_and_below, normal),
        ("one of four, the others 0", {COMPARED[0]: MARGIN}, normal),
        ("the same, heavy tails", {COMPARED[0]: MARGIN}, heavy),
        ("the same, skewed", {COMPARED[0]: MARGIN}, skewed),
    ]
    rows = [
        [what, _percent(simulate(len(SEEDS), pair, truth, draw).any_false, 1)]
        for what, truth, draw in cases
    ]
    return markdown_table(["at the margin", "falsely equivalent"], rows, "lr")


def gpu_minutes(steps: int, gain: float) -> float:
    """Of all runs, if GPUs that several runs share do `gain` times the work of one run alone."""
    each = [arm.gpus * (ALONE[arm.name] * steps / 1500 + START) for arm in ARMS]
    return len(SEEDS) * sum(each) / gain


def typical_pair(curves: Curves, steps: int) -> float:
    """How far pairs of one seed are apart over a tenth of `steps`: the median of such windows.

    The first 100 steps, of the warm-up, are left out.
    """
    width = steps // LAST
    starts = range(_WARM_UP, len(curves["bf16", FIRST_SEEDS[0]]) - width + 1, width)
    return statistics.median(
        spread_of({key: curve[at : at + width] for key, curve in curves.items()}, WHOLE).pair
        for at in starts
    )


def _steps_table(curves: Curves) -> str:
    rows = []
    for steps in REGISTERED.steps:
        pairs = [spread_of(curves, END, steps).pair, typical_pair(curves, steps)]
        power = [_percent(simulate(len(SEEDS), pair, {}).each, 1) for pair in pairs]
        minutes = [f"{gpu_minutes(steps, gain):.0f}" for gain in (1, 2, 3, 4)]
        rows.append([f"{steps:,}", *map(_percent, pairs), *power, *minutes])
    head = ["steps", "pairs apart there", "in the median tenth", "power, there", "power, median"]
    head += ["GPU minutes, one run a GPU", "gain 2", "gain 3", "gain 4"]
    return markdown_table(head, rows, "r" * len(head))
