"""Whether two loss curves are the same: a test of equivalence with a margin.

`equivalent`: the 90% confidence interval of the difference of the mean losses lies within plus or
minus 0.25% of the reference's (two one-sided t-tests at 5% each). `different`: it lies outside.
Else `cannot tell`. Either verdict is wrong in at most 5% of cases.

With several runs of each cell the variance is that between runs, and the verdict is on the cells.
With one run of each it comes from the difference step by step, and the verdict is on these two
curves alone: another seed may fall elsewhere (docs/convergence.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cookbook.observe.console import StepMetrics
from cookbook.results.interval import LEAST_VALUES, Spread, batch_spread, batches, correlation

# DeepSeek-V3 (arXiv:2412.19437, section 3.3) holds FP8 training to BF16 by this relative distance.
MARGIN = 0.0025
LEVEL = 0.90
LAST = 0.1

EQUIVALENT, DIFFERENT, CANNOT_TELL = "equivalent", "different", "cannot tell"
WHOLE, LAST_TENTH = "whole", "last tenth"

Losses = Mapping[int, float]
"""The loss by step."""


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """The difference of a cell's mean loss from its reference's, over a window of the steps."""

    window: str
    """`whole`, or `last tenth`."""
    verdict: str
    """equivalent, different or cannot tell."""
    difference: float | None
    """Mean loss minus the reference's; None, as `low` and `high`, where it is not known."""
    low: float | None
    """Of the 90% confidence interval of the difference."""
    high: float | None
    limit: float | None
    """The margin on both sides of 0: 0.25% of the reference's loss."""
    num_steps: int
    """Steps in the window that every run logged."""
    runs: int
    """Runs of the cell; with one, the verdict is on this curve alone."""
    reason: str | None = None
    """Why there is no interval."""


def losses_of(steps: Iterable[StepMetrics]) -> dict[int, float]:
    """The loss by step; steps without one are left out."""
    return {step.step: step.loss for step in steps if step.loss is not None}


def judge_curves(own: Losses, reference: Losses) -> tuple[LossVerdict, LossVerdict]:
    """Return the verdicts on one run of each, over the whole curve and over its last tenth.

    Only steps that both logged count, so they may log at different intervals.
    """
    whole, last = _windows([own, reference])
    return _judge_one(WHOLE, own, reference, whole), _judge_one(LAST_TENTH, own, reference, last)


def judge_repeats(
    cells: Mapping[str, Sequence[Losses]], reference: str
) -> dict[str, tuple[LossVerdict, LossVerdict]]:
    """Return the verdicts on every cell but `reference`, from several runs of each, or of some.

    The variance is pooled over the runs of every cell.
    """
    names = [name for name in cells if name != reference]
    windows = _windows([run for runs in cells.values() for run in runs])
    found = []
    for window, steps in zip((WHOLE, LAST_TENTH), windows, strict=True):
        means = {name: [_mean(run, steps) for run in runs] for name, runs in cells.items()}
        spread = pooled_spread(means.values()) if steps else None
        found.append(
            {name: _of_runs(window, means, name, reference, spread, len(steps)) for name in names}
        )
    whole, last = found
    return {name: (whole[name], last[name]) for name in names}


def word_of(difference: float, half_width: float, limit: float) -> str:
    """Return the verdict on an interval."""
    if not math.isfinite(difference):
        return DIFFERENT
    if abs(difference) + half_width <= limit:
        return EQUIVALENT
    return DIFFERENT if abs(difference) - half_width > limit else CANNOT_TELL


def pooled_spread(groups: Iterable[Sequence[float]]) -> Spread | None:
    """Return one standard deviation for runs of all cells, each about its cell's mean.

    None where no cell has two runs. Cells with a loss that is no number are left out.
    """
    known = [group for group in groups if len(group) > 1 and all(map(math.isfinite, group))]
    freedom = sum(len(group) - 1 for group in known)
    if not freedom:
        return None
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in known)
    return Spread(math.sqrt(squares / freedom), freedom)


def half_width(spread: Spread, num_own: int, num_reference: int) -> float:
    """Return half the interval of the difference of two cells' means."""
    error = spread.error * math.sqrt(1 / num_own + 1 / num_reference)
    return Spread(error, spread.freedom).half_width(LEVEL)


def _judge_one(window: str, own: Losses, reference: Losses, steps: Sequence[int]) -> LossVerdict:
    num = len(steps)
    if not all(math.isfinite(reference[step]) for step in steps):
        reason = "the reference's loss is no number"
        return LossVerdict(window, CANNOT_TELL, None, None, None, None, num, 1, reason)
    if steps and not all(math.isfinite(own[step]) for step in steps):
        reason = "the loss is no number"
        return LossVerdict(window, DIFFERENT, None, None, None, None, num, 1, reason)
    gaps = [own[step] - reference[step] for step in steps]
    if num < LEAST_VALUES:
        logged = "1 step" if num == 1 else f"{num} steps"
        reason = f"{logged} that both logged, {LEAST_VALUES} are needed"
        return LossVerdict(window, CANNOT_TELL, None, None, None, None, num, 1, reason)
    limit = MARGIN * statistics.fmean(reference[step] for step in steps)
    difference = statistics.fmean(gaps)
    parts = [statistics.fmean(batch) for batch in batches(gaps)]
    alike = correlation([gap - difference for gap in gaps])
    half = batch_spread(difference, parts, alike, num).half_width(LEVEL)
    verdict = word_of(difference, half, limit)
    low, high = difference - half, difference + half
    return LossVerdict(window, verdict, difference, low, high, limit, num, 1)


def _of_runs(
    window: str,
    means: Mapping[str, Sequence[float]],
    name: str,
    reference: str,
    spread: Spread | None,
    num_steps: int,
) -> LossVerdict:
    own, base = means[name], means[reference]
    if not all(map(math.isfinite, base)):
        reason = "the reference's loss is no number"
        return LossVerdict(window, CANNOT_TELL, None, None, None, None, num_steps, len(own), reason)
    if not all(map(math.isfinite, own)):
        reason = "the loss is no number"
        return LossVerdict(window, DIFFERENT, None, None, None, None, num_steps, len(own), reason)
    if spread is None:
        reason = "no step that every run logged" if not num_steps else "no cell has two runs"
        return LossVerdict(window, CANNOT_TELL, None, None, None, None, num_steps, len(own), reason)
    difference = statistics.fmean(own) - statistics.fmean(base)
    limit = MARGIN * statistics.fmean(base)
    half = half_width(spread, len(own), len(base))
    verdict = word_of(difference, half, limit)
    low, high = difference - half, difference + half
    return LossVerdict(window, verdict, difference, low, high, limit, num_steps, len(own))


def _mean(run: Losses, steps: Sequence[int]) -> float:
    return statistics.fmean(run[step] for step in steps) if steps else math.nan


def _windows(runs: Sequence[Losses]) -> tuple[list[int], list[int]]:
    """The steps that all runs logged, and those of them in the last tenth of the training."""
    common = sorted(set[int].intersection(*map(set, runs)))
    end = common[-1] if common else 0
    return common, [step for step in common if step > end - LAST * end]
