"""The registered rule of the convergence experiment, on made-up data of known truth."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from bench.convergence_plan import (
    ARMS,
    COMPARED,
    END,
    FAMILY_ERROR,
    MARGIN,
    REFERENCE,
    REGISTERED,
    SEEDS,
    T_TEST,
    WHOLE,
    order,
)
from bench.convergence_power import Draw, heavy, normal, simulate, skewed, spread_of
from bench.convergence_rule import (
    UNDECIDED,
    holm,
    interval,
    judge,
    sign_flips,
    t_test,
    verdicts_of,
)
from cookbook.results.loss import DIFFERENT, EQUIVALENT

pytestmark = pytest.mark.bench

# Student's sleep data, the gain of ten patients: t is 4.0621, p of 9 degrees 0.001416 (one-sided).
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
# What chance did to pairs in the first experiment, if seeds had nothing in common.
PAIRS = 0.00244


def around(mean: float, spread: float = 0.0005, number: int = len(SEEDS)) -> list[float]:
    """Evenly spaced about `mean`, so that it is the mean of all."""
    return [mean + spread * (2 * n / (number - 1) - 1) for n in range(number)]


def test_the_t_test_is_students() -> None:
    assert t_test([-one for one in SLEEP], 0.0) == pytest.approx(0.001416, abs=1e-6)
    assert t_test(SLEEP, 0.0) == pytest.approx(1 - 0.001416, abs=1e-6)
    shifted = [one + 5 for one in SLEEP]
    assert t_test(shifted, 5.0) == pytest.approx(t_test(SLEEP, 0.0))


def test_the_sign_flips_are_counted_one_by_one() -> None:
    chance = random.Random(3)
    values = [chance.gauss(0.1, 1) for _ in range(9)]
    for bound in (-0.5, 0.0, 0.3):
        gaps = [one - bound for one in values]
        sums = [
            sum(sign * abs(one) for sign, one in zip(signs, gaps, strict=True))
            for signs in itertools.product((1, -1), repeat=len(gaps))
        ]
        wanted = sum(one <= sum(gaps) + 1e-9 for one in sums) / len(sums)
        assert sign_flips(values, bound) == pytest.approx(wanted)
    # All far below: of all changes of sign only the one that was seen is as low.
    assert sign_flips([-1.0] * 10, 0.0) == 2**-10
    assert sign_flips([1.0] * 10, 0.0) == 1.0


def test_holm_holds_the_smallest_against_all_and_the_largest_against_one() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.012, "d": 0.9})
    assert found == pytest.approx({"a": 0.04, "b": 0.08, "c": 0.04, "d": 0.9})
    # A later one is never more certain than an earlier one.
    assert holm({"a": 0.02, "b": 0.021}) == pytest.approx({"a": 0.04, "b": 0.04})


@pytest.mark.parametrize(
    ("mean", "spread", "word"),
    [
        (0.0, 0.0005, EQUIVALENT),
        (0.0015, 0.0005, EQUIVALENT),
        (-0.0015, 0.0005, EQUIVALENT),
        (0.0, 0.02, UNDECIDED),
        (MARGIN, 0.0005, UNDECIDED),
        (0.004, 0.0005, DIFFERENT),
        (-0.004, 0.0005, DIFFERENT),
    ],
)
def test_the_verdict_follows_the_margin(mean: float, spread: float, word: str) -> None:
    found = judge(dict.fromkeys(COMPARED, around(mean, spread)))
    assert {one.word for one in found.values()} == {word}


def test_one_arm_alone_is_corrected_for_all_four() -> None:
    """p just under 5% is enough where it is the last, and not where it is the first."""
    one = around(0.0016, 0.0026)
    p_value = t_test(one, MARGIN)
    assert FAMILY_ERROR / 4 < p_value < FAMILY_ERROR
    others = {arm: around(0.0, 0.0002) for arm in COMPARED[1:]}
    last = verdicts_of(t_test, {COMPARED[0]: one, **others})
    assert last[COMPARED[0]].word == EQUIVALENT
    first = verdicts_of(t_test, {arm: one if arm == COMPARED[0] else [] for arm in COMPARED})
    assert first[COMPARED[0]].word == UNDECIDED
    assert first[COMPARED[0]].inside == pytest.approx(4 * p_value)


def test_where_the_tests_part_it_is_undecided() -> None:
    # Of six pairs the sign flips cannot have a p below 1/64, which four comparisons take to 1/16.
    found = judge(dict.fromkeys(COMPARED, around(0.0, 0.0002, 6)))[COMPARED[0]]
    assert found.tests[T_TEST].word == EQUIVALENT
    assert found.word == UNDECIDED


def test_a_loss_that_is_no_number_makes_an_arm_different_and_a_reference_none() -> None:
    arms = {arm: around(0.0) for arm in COMPARED}
    arms["mxfp8"][3] = math.inf
    arms["float8"][3] = math.nan
    words = {arm: one.word for arm, one in judge(arms).items()}
    assert words["mxfp8"] == DIFFERENT
    assert words["float8"] == UNDECIDED
    assert words["mxfp8_a2a_ep2"] == EQUIVALENT


def test_the_interval_covers_the_truth_in_nine_of_ten_cases() -> None:
    chance, held, repeats = random.Random(5), 0, 2000
    for _ in range(repeats):
        low, high = interval([chance.gauss(0.001, PAIRS) for _ in SEEDS])
        held += low <= 0.001 <= high
    # Three standard errors of a share of 0.9 are 0.02.
    assert held / repeats == pytest.approx(0.90, abs=0.02)


def test_with_the_registered_seeds_nine_of_ten_equal_arms_are_found() -> None:
    odds = simulate(len(SEEDS), PAIRS, {}, repeats=500)
    # Of 2,000 arms, alike in threes: three standard errors are 0.03.
    assert odds.each >= 0.90 - 0.03
    assert simulate(len(SEEDS) - 5, PAIRS, {}, repeats=300).each < 0.60


@pytest.mark.parametrize("draw", [normal, heavy, skewed])
def test_at_the_margin_at_most_one_experiment_in_twenty_errs(draw: Draw) -> None:
    repeats = 500
    allowed = FAMILY_ERROR + 3 * math.sqrt(FAMILY_ERROR * (1 - FAMILY_ERROR) / repeats)
    for truth in ({COMPARED[0]: MARGIN}, dict.fromkeys(COMPARED, -MARGIN)):
        found = simulate(len(SEEDS), PAIRS / 2, truth, draw, repeats)
        assert found.any_false <= allowed, truth


def test_at_the_margin_the_rule_does_err_sometimes() -> None:
    """Else it would be stricter than it says, and the simulation blind."""
    odds = simulate(len(SEEDS), PAIRS / 2, {COMPARED[0]: MARGIN}, repeats=500)
    assert odds.any_false > 0.01
    assert odds.each > 0.95


def test_chance_made_up_has_the_variance_that_is_asked_for() -> None:
    for draw in (normal, heavy, skewed):
        chance = random.Random(1)
        values = [draw(chance) for _ in range(20_000)]
        assert sum(values) / len(values) == pytest.approx(0, abs=0.03)
        assert sum(one * one for one in values) / len(values) == pytest.approx(1, abs=0.15)


def test_the_seeds_part_of_the_spread_is_taken_out() -> None:
    """Runs that differ by their seeds alone: pairs of one seed are not apart at all."""
    seeds, names = (42, 43, 44, 45, 46), ("bf16", "mxfp8", "mxfp8_wgrad_hp")
    level = {"bf16": 4.0, "mxfp8": 4.2, "mxfp8_wgrad_hp": 3.8}
    curves = {
        (name, seed): [level[name] + 0.01 * (seed - 44)] * 100 for name in names for seed in seeds
    }
    found = spread_of(curves, END)
    assert found.pair == pytest.approx(0, abs=1e-12)
    # -2, -1, 0, 1, 2 hundredths of a loss of 4: variance 2.5.
    assert found.run == pytest.approx(0.01 * math.sqrt(2.5) / 4)
    assert found.strangers == pytest.approx(math.sqrt(2) * found.run)


def test_what_is_registered() -> None:
    """These numbers were committed before the first run; a change would be another experiment."""
    assert (MARGIN, FAMILY_ERROR) == (0.0025, 0.05)
    assert set(SEEDS).isdisjoint({*range(42, 47), *REGISTERED.rehearsal_seeds})
    assert REFERENCE == {
        "mxfp8": "bf16",
        "mxfp8_wgrad_hp": "bf16",
        "float8": "bf16",
        "mxfp8_a2a_ep2": "bf16_ep2",
    }
    layouts = {arm.name: (arm.precision, arm.ep_backend, arm.gpus) for arm in ARMS}
    assert layouts["mxfp8_a2a_ep2"] == ("mxfp8", "mxfp8_a2a", 2)
    assert layouts["bf16_ep2"] == ("bf16", "standard", 2)
    for arm, reference in REFERENCE.items():
        assert layouts[arm][2] == layouts[reference][2]
    assert (END, WHOLE) == ("end", "whole")


def test_the_order_is_fixed_mixed_and_balanced_at_any_time() -> None:
    runs = order(SEEDS)
    assert runs == order(SEEDS)
    assert len(set(runs)) == len(runs) == len(ARMS) * len(SEEDS)
    for start in range(0, len(runs), len(ARMS)):
        block = runs[start : start + len(ARMS)]
        assert {arm for arm, _ in block} == set(ARMS)
        assert len({seed for _, seed in block}) == 1
    firsts = {runs[start][0].name for start in range(0, len(runs), len(ARMS))}
    assert len(firsts) >= 4
    # As it was when the experiment was registered.
    wanted = "mxfp8_wgrad_hp mxfp8_a2a_ep2 bf16_ep2 bf16 float8 mxfp8"
    assert " ".join(arm.name for arm, _ in runs[:6]) == wanted
