"""Judge the loss curves of evidence/convergence by the rules registered before their first run.

    python -m bench.proofs.convergence        # the tables of docs/evidence/convergence.md
    python -m bench.proofs.convergence fp8    # that of FP8 in docs/evidence/low-precision.md

A difference is relative: an arm's mean loss over its reference's with the same seed, minus 1.
"""

import csv
import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scipy.stats import ttest_1samp

from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table

DATA = ROOT / "docs/evidence/convergence"
# Within this share of the reference's loss (DeepSeek-V3, arXiv:2412.19437, section 3.3).
MARGIN = 0.0025
# Of all arms by one measure and one test together, by Holm's step-down procedure.
FAMILY_ERROR = 0.05
REFERENCE = {
    "mxfp8": "bf16",
    "mxfp8_wgrad_hp": "bf16",
    "float8": "bf16",
    "mxfp8_a2a_ep2": "bf16_ep2",
}
# The share of the steps, from the end, whose losses are averaged.
MEASURES = {"end": 0.1, "whole": 1.0}

Test = Callable[[Sequence[float], float], float]


def t_test(differences: Sequence[float], bound: float) -> float:
    """Return the p value of Student's paired test against "the difference is `bound` or more"."""
    return float(ttest_1samp(differences, bound, alternative="less").pvalue)


def sign_flips(differences: Sequence[float], bound: float) -> float:
    """Return the p value of the exact test over all changes of sign, against the same."""
    gaps = [one - bound for one in differences]
    halves = []
    for part in (gaps[: len(gaps) // 2], gaps[len(gaps) // 2 :]):
        sums = [0.0]
        for gap in part:
            sums = [one + signed for one in sums for signed in (gap, -gap)]
        halves.append(sorted(sums))
    # The order of a sum may change its last digit.
    most = math.fsum(gaps) + 1e-12 * math.fsum(map(abs, gaps))
    return sum(bisect_right(halves[1], most - one) for one in halves[0]) / (1 << len(gaps))


TESTS: Mapping[str, Test] = {"paired t": t_test, "sign flips": sign_flips}


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p values."""
    adjusted, least = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = least
    return adjusted


def judge_by(test: Test, arms: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, str]]:
    """Return each arm's adjusted p value of equivalence and its verdict by one test."""
    mirrored = {arm: [-one for one in found] for arm, found in arms.items()}
    inside = {arm: max(test(arms[arm], MARGIN), test(mirrored[arm], MARGIN)) for arm in arms}
    outside = {arm: min(test(arms[arm], -MARGIN), test(mirrored[arm], -MARGIN)) for arm in arms}
    equivalent = holm(inside)
    different = holm({arm: min(1.0, 2 * p) for arm, p in outside.items()})
    words = {
        arm: "equivalent"
        if equivalent[arm] <= FAMILY_ERROR
        else "different"
        if different[arm] <= FAMILY_ERROR
        else "undecided"
        for arm in arms
    }
    return {arm: (equivalent[arm], words[arm]) for arm in arms}


def judge(arms: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return each arm's verdict: that of both tests, or undecided if they differ."""
    found = [judge_by(test, arms) for test in TESTS.values()]
    words = {arm: {verdicts[arm][1] for verdicts in found} for arm in arms}
    return {arm: one.pop() if len(one) == 1 else "undecided" for arm, one in words.items()}


def read_losses(share: float, folder: Path = DATA) -> dict[str, dict[str, float]]:
    """Return each arm's mean loss over the last `share` of the steps, by seed."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        last = rows[-round(share * len(rows)) :]
        seeds = [name for name in rows[0] if name != "step"]
        found[path.stem] = {s: statistics.fmean(float(row[s]) for row in last) for s in seeds}
    return found


def differences(losses: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """Return each compared arm's relative differences, by seed."""
    return {
        arm: [own / losses[reference][seed] - 1 for seed, own in losses[arm].items()]
        for arm, reference in REFERENCE.items()
        if arm in losses
    }


def mean_and_half_interval(found: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 90% interval."""
    low, high = ttest_1samp(found, 0.0).confidence_interval(0.9)
    return statistics.fmean(found), float(high - low) / 2


def verdict_table(name: str, folder: Path = DATA) -> str:
    """Return the verdicts by one measure, as Markdown."""
    arms = differences(read_losses(MEASURES[name], folder))
    by_test = {test: judge_by(TESTS[test], arms) for test in TESTS}
    words, rows = judge(arms), []
    # How many verdicts change when one seed is left out.
    seeds = range(len(next(iter(arms.values()))))
    without = [judge({a: [*f[:n], *f[n + 1 :]] for a, f in arms.items()}) for n in seeds]
    for arm, found in arms.items():
        mean, half = mean_and_half_interval(found)
        p_values = [
            f"{f'{p:.4f}' if p >= 1e-4 else '<0.0001'} {word}"
            for p, word in (by_test[test][arm] for test in TESTS)
        ]
        others = sum(one[arm] != words[arm] for one in without)
        rows.append([arm, f"{mean:+.3%}", f"{mean - half:+.3%} to {mean + half:+.3%}", *p_values])
        rows[-1] += [words[arm], f"{others} of {len(found)}"]
    head = [f"{name}: arm", "minus its reference", "90% interval", *TESTS, "verdict", "other word"]
    return markdown_table(head, rows, "lrrrrlr")


def render(folder: Path = DATA) -> str:
    """Return the verdicts by each measure and every run's mean loss at the end, as Markdown."""
    ends = read_losses(MEASURES["end"], folder)
    order = ["bf16", "mxfp8", "mxfp8_wgrad_hp", "float8", "bf16_ep2", "mxfp8_a2a_ep2"]
    arms = [arm for arm in order if arm in ends]
    rows = [[seed, *(f"{ends[arm][seed]:.4f}" for arm in arms)] for seed in ends[arms[0]]]
    losses = markdown_table(["seed", *arms], rows, "r" * (1 + len(arms)))
    return "\n\n".join([*(verdict_table(name, folder) for name in MEASURES), losses])


if __name__ == "__main__":
    print(render(DATA.joinpath(*sys.argv[1:2])))
