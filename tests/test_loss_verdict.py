"""How loss curves are judged, and how often the verdict is wrong on curves whose truth is known."""

from __future__ import annotations

import csv
import math
import random
from itertools import combinations

import pytest

from cookbook.base.paths import ROOT
from cookbook.results.verdicts import (
    CANNOT_TELL,
    DIFFERENT,
    EQUIVALENT,
    LAST_TENTH,
    MARGIN,
    WHOLE,
    judge_curves,
    judge_repeats,
)

DRAWS = 1000
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
    assert (whole.verdict, whole.runs, whole.reason) == (EQUIVALENT, 1, None)


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
    assert last.reason == "10 steps that both logged, 15 are needed"
    assert judge_curves({}, falling(100))[0].verdict == CANNOT_TELL


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_different(bad: float) -> None:
    base = falling(200)
    broken = base | dict.fromkeys(range(190, 201), bad)
    assert [found.verdict for found in judge_curves(broken, base)] == [DIFFERENT, DIFFERENT]
    assert judge_curves(broken, base)[0].reason == "the loss is no number"
    assert [found.verdict for found in judge_curves(base, broken)] == [CANNOT_TELL] * 2


def test_several_runs_are_judged_by_their_means() -> None:
    base = dict.fromkeys(range(1, 101), 4.0)
    up, down = ({step: loss + by for step, loss in base.items()} for by in (0.001, -0.001))
    far = {step: loss + 0.02 for step, loss in base.items()}
    found = judge_repeats({"base": [up, down], "own": [base], "far": [far, far]}, "base")
    assert list(found) == ["own", "far"]
    own, far_one = found["own"][0], found["far"][1]
    assert (own.verdict, own.runs) == (EQUIVALENT, 1)
    assert own.difference == pytest.approx(0.0)
    # Variance 2e-6 of the base and 0 of the far cell: 1e-6 over two degrees, t(2) is 2.920.
    assert own.high == pytest.approx(2.920 * (1e-6 * (1 + 1 / 2)) ** 0.5, rel=1e-3)
    assert (far_one.verdict, far_one.runs) == (DIFFERENT, 2)
    alone = judge_repeats({"base": [base], "own": [base]}, "base")["own"][0]
    assert (alone.verdict, alone.reason) == (CANNOT_TELL, "no cell has two runs")


def test_repeats_at_the_limit_are_called_wrongly_5_times_in_100_at_most() -> None:
    random_, words = random.Random(3), []

    def runs(shift: float) -> list[Curve]:
        means = [4 * (1 + shift) + random_.gauss(0, 0.003) for _ in range(4)]
        return [dict.fromkeys(range(1, 11), mean) for mean in means]

    for _ in range(DRAWS):
        found = judge_repeats({"base": runs(0.0), "own": runs(MARGIN)}, "base")
        words.append(found["own"][0].verdict)
    assert words.count(EQUIVALENT) / DRAWS <= 0.064
    assert words.count(DIFFERENT) / DRAWS <= 0.064
    assert words.count(CANNOT_TELL) > 0.8 * DRAWS


def test_of_the_same_training_with_other_seeds_none_is_called_different() -> None:
    """Real curves: five seeds of BF16, and of MXFP8, which are equivalent by all of them."""
    curves = {}
    for path in sorted((ROOT / "docs/evidence/convergence/first").glob("*.csv")):
        with path.open(newline="") as file:
            curves[path.stem] = {
                int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)
            }
    seeds = [curve for name, curve in curves.items() if name.startswith("bf16-")]
    pairs = [*combinations(seeds, 2)]
    pairs += [(curves[f"mxfp8-seed{s}"], curves[f"bf16-seed{s}"]) for s in range(42, 47)]
    assert len(pairs) == 15
    for own, base in pairs:
        assert DIFFERENT not in [found.verdict for found in judge_curves(own, base)]
