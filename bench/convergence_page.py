"""Judges the convergence experiment's curves by the registered rule, and writes what it found."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.convergence_curves import Curves, differences, measure, read_arms
from bench.convergence_plan import ARMS, COMPARED, END, MARGIN, MEASURES, REFERENCE, TESTS, Plan
from bench.convergence_rule import Verdict, interval, judge
from bench.convergence_runs import read_records
from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.tables import markdown_table

PARTS = 10


def write(data: Path, plan: Plan, closed: str) -> None:
    """Write verdict.md and effect.svg beside the curves in `data`.

    Args:
        closed: why no more runs will be made; without it every registered run must be there.

    Raises:
        InputError: there are runs to be made, since nobody shall look before the end.
    """
    curves = read_arms(data)
    complete = complete_seeds(curves, plan)
    if len(complete) < len(plan.seeds) and not closed:
        raise InputError(
            str(data),
            f"{len(complete)} of {len(plan.seeds)} seeds have all runs",
            "make the others; give --closed REASON where no more will be made",
        )
    counts = Counter(one["result"] for one in read_records(data))
    text = render(curves, complete, plan, counts, closed)
    write_whole(data / "verdict.md", text)
    draw(curves, complete, data / "effect.svg")
    print(text, end="")


def complete_seeds(curves: Curves, plan: Plan) -> list[int]:
    """The seeds that every arm has a whole curve of; arms without any curve are left aside."""
    arms = {arm for arm, _ in curves}
    return [
        seed
        for seed in plan.seeds
        if arms and all(len(curves.get((arm, seed), ())) == plan.steps for arm in arms)
    ]


def render(
    curves: Curves, seeds: Sequence[int], plan: Plan, starts: Mapping[str, int], closed: str
) -> str:
    """Markdown: the verdicts by each measure, how the runs went, and every run's last tenth."""
    lost = ", ".join(f"{number} {what}" for what, number in sorted(starts.items()))
    parts = [
        f"{plan.steps:,} steps, {len(seeds)} of {len(plan.seeds)} registered seeds. "
        f"Starts of runs: {lost or 'none'}."
    ]
    if closed:
        parts.append(f"Judged before all runs were there: {closed}.")
    parts += [_verdict_table(curves, seeds, name) for name in MEASURES]
    arms = [arm.name for arm in ARMS if any(found == arm.name for found, _ in curves)]
    rows = [
        [str(seed), *(f"{measure(END, curves[arm, seed]):.4f}" for arm in arms)] for seed in seeds
    ]
    parts.append(markdown_table(["seed", *arms], rows, "r" * (1 + len(arms))))
    return "\n\n".join(parts) + "\n"


def arms_of(curves: Curves, seeds: Sequence[int], name: str) -> dict[str, list[float]]:
    """Every compared arm's differences; none of an arm that was not run."""
    there = {arm for arm, _ in curves}
    return {
        arm: differences(curves, seeds, name, arm) if {arm, REFERENCE[arm]} <= there else []
        for arm in COMPARED
    }


def _verdict_table(curves: Curves, seeds: Sequence[int], name: str) -> str:
    arms = arms_of(curves, seeds, name)
    verdicts = judge(arms)
    rows = [_row(arm, arms, verdicts[arm]) for arm in COMPARED]
    head = [f"{name}: arm", "minus its reference", "90% interval", *TESTS, "verdict", "other word"]
    return markdown_table(head, rows, "lrrrrlr")


def _row(arm: str, arms: Mapping[str, Sequence[float]], verdict: Verdict) -> list[str]:
    found = arms[arm]
    if len(found) < 2:
        return [arm, "not run", "", "", "", verdict.word, ""]
    tests = [f"{_p(verdict.tests[test].inside)} {verdict.tests[test].word}" for test in TESTS]
    if not all(map(math.isfinite, found)):
        return [arm, "no number", "", *tests, verdict.word, ""]
    low, high = interval(found)
    others = [judge(_without(arms, seed))[arm].word != verdict.word for seed in range(len(found))]
    return [
        arm,
        f"{statistics.fmean(found):+.3%}",
        f"{low:+.3%} to {high:+.3%}",
        *tests,
        verdict.word,
        f"{sum(others)} of {len(found)}",
    ]


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 else "<0.0001"


def _without(arms: Mapping[str, Sequence[float]], number: int) -> dict[str, list[float]]:
    return {arm: [*found[:number], *found[number + 1 :]] for arm, found in arms.items()}


def by_part(curves: Curves, seeds: Sequence[int], arm: str) -> list[list[float]]:
    """Of each tenth of the steps, every seed's relative difference from the reference."""
    found = []
    for part in range(PARTS):
        row = []
        for seed in seeds:
            own, base = curves[arm, seed], curves[REFERENCE[arm], seed]
            start, end = (len(own) * (part + more) // PARTS for more in (0, 1))
            row.append(statistics.fmean(own[start:end]) / statistics.fmean(base[start:end]) - 1)
        found.append(row)
    return found


def draw(curves: Curves, seeds: Sequence[int], target: Path) -> None:
    """The differences with their 90% intervals: of both measures, and of each tenth of the run."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise InputError("matplotlib", "is not here", "run: ./setup.sh --local --dev") from None

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "effect"  # the same bytes for the same data
    from matplotlib import pyplot

    figure, (effect, course) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 3))
    for axes in (effect, course):
        axes.axhspan(-100 * MARGIN, 100 * MARGIN, color="0.9")
        axes.axhline(0, color="black", linewidth=0.8)
    run = [arm for arm in COMPARED if len(arms_of(curves, seeds, END)[arm]) > 1]
    for number, arm in enumerate(run):
        shift, colour = (number - (len(run) - 1) / 2) / (len(run) + 2), f"C{number}"
        effects = [arms_of(curves, seeds, name)[arm] for name in MEASURES]
        _bars(effect, shift, effects, colour, arm)
        _bars(course, shift, by_part(curves, seeds, arm), colour, arm)
    effect.set_xticks(range(len(MEASURES)), ["last tenth", "whole curve"])
    course.set_xticks(range(PARTS), [str(part + 1) for part in range(PARTS)])
    course.set_xlabel("tenth of the run")
    effect.set_ylabel("loss minus its BF16's, %")
    figure.legend(*effect.get_legend_handles_labels(), loc="upper center", ncols=4, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


def _bars(
    axes: object, shift: float, groups: Sequence[Sequence[float]], colour: str, label: str
) -> None:
    means = [100 * statistics.fmean(group) for group in groups]
    halves = [100 * (interval(group)[1] - interval(group)[0]) / 2 for group in groups]
    places = [place + shift for place in range(len(groups))]
    axes.errorbar(  # type: ignore[attr-defined]
        places, means, halves, fmt="o", markersize=3, color=colour, label=label, capsize=2
    )
