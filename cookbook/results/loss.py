"""Whether two loss curves are the same: a test of equivalence with a margin.

`equivalent`: the 90% confidence interval of the difference of the mean losses lies within plus or
minus 0.25% of the reference's (two one-sided t-tests at 5% each). `different`: it lies outside.
Else `cannot tell`. Either verdict is wrong in at most 5% of cases.

With several runs of each cell the variance is that between runs, and the verdict is on the cells.
With one run of each it comes from the difference step by step, and the verdict is on these two
curves alone: another seed may fall elsewhere (docs/evidence/convergence.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cookbook.observe.metrics import StepMetrics
from cookbook.results.speed import LEAST_VALUES, Spread, batch_spread, batches, correlation

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
    """Return the loss by step; steps without one are left out."""
    return {step.step: step.loss for step in steps if step.loss is not None}


def judge_curves(own: Losses, reference: Losses) -> tuple[LossVerdict, LossVerdict]:
    """Return the verdicts on one run of each, over the whole curve and over its last tenth.

    Only steps that both logged count, so they may log at different intervals.
    """
    verdicts = []
    for window, steps in _windows([own, reference]):
        pair = [own[step] for step in steps], [reference[step] for step in steps]
        half, num = None, len(steps)
        gaps = [one - other for one, other in zip(*pair, strict=True)]
        if num >= LEAST_VALUES and all(map(math.isfinite, gaps)):
            mean = statistics.fmean(gaps)
            parts = [statistics.fmean(batch) for batch in batches(gaps)]
            alike = correlation([gap - mean for gap in gaps])
            half = batch_spread(mean, parts, alike, num).half_width(LEVEL)
        logged = "1 step" if num == 1 else f"{num} steps"
        reason = f"{logged} that both logged, {LEAST_VALUES} are needed"
        verdicts.append(_judge(window, *pair, half, reason, num, 1))
    return verdicts[0], verdicts[1]


def judge_repeats(
    cells: Mapping[str, Sequence[Losses]], reference: str
) -> dict[str, tuple[LossVerdict, LossVerdict]]:
    """Return the verdicts on every cell but `reference`, from several runs of each, or of some.

    The variance is pooled over the runs of every cell.
    """
    found: dict[str, list[LossVerdict]] = {name: [] for name in cells if name != reference}
    for window, steps in _windows([run for runs in cells.values() for run in runs]):
        means = {
            name: [statistics.fmean(run[step] for step in steps) for run in runs] if steps else []
            for name, runs in cells.items()
        }
        spread = pooled_spread(means.values())
        reason = "no cell has two runs" if steps else "no step that every run logged"
        for name, verdicts in found.items():
            own, base = means[name], means[reference]
            half = half_width(spread, len(own), len(base)) if spread else None
            num = len(steps)
            verdicts.append(_judge(window, own, base, half, reason, num, len(cells[name])))
    return {name: (whole, last) for name, (whole, last) in found.items()}


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


def _judge(
    window: str,
    own: Sequence[float],
    reference: Sequence[float],
    half: float | None,
    reason: str,
    num_steps: int,
    runs: int,
) -> LossVerdict:
    """Return the verdict on the difference of two means, known to plus or minus `half`.

    Args:
        reason: why `half` is None, where it is.
    """
    verdict = CANNOT_TELL
    if not all(map(math.isfinite, reference)):
        reason = "the reference's loss is no number"
    elif not all(map(math.isfinite, own)):
        verdict, reason = DIFFERENT, "the loss is no number"
    elif half is not None:
        difference = statistics.fmean(own) - statistics.fmean(reference)
        limit = MARGIN * statistics.fmean(reference)
        verdict = word_of(difference, half, limit)
        low, high = difference - half, difference + half
        return LossVerdict(window, verdict, difference, low, high, limit, num_steps, runs)
    return LossVerdict(window, verdict, None, None, None, None, num_steps, runs, reason)


def _windows(runs: Sequence[Losses]) -> list[tuple[str, list[int]]]:
    """Return the steps that all runs logged, and those of them in the last tenth of training."""
    common = sorted(set[int].intersection(*map(set, runs)))
    end = common[-1] if common else 0
    return [(WHOLE, common), (LAST_TENTH, [step for step in common if step > end - LAST * end])]
