"""Each cell of a run against its baseline: repeats as one cell, speed-ups, loss verdicts.

A speed-up needs a baseline cell of the same recipe and device with a throughput. Both must have
finished, without emulated numerics.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cookbook.observe.console import StepMetrics
from cookbook.observe.history import History
from cookbook.results.loss import Losses, LossVerdict, judge_curves, judge_repeats, losses_of
from cookbook.results.result import CellSetting, Result, RunResults, masks_differ
from cookbook.results.speed import SpeedUp, measure, paired_speed_up, speed_up, speeds_of
from cookbook.run.status import FINISHED

Runs = Mapping[str, Sequence[Result]]
"""The repeats of each cell, by the cell's name."""


def against_baseline(results: RunResults) -> RunResults:
    """Merge the repeats of each cell; add speed-ups and loss verdicts where cells are comparable.

    Args:
        results: with a cell for each folder, so that each repeat is one.
    """
    runs: dict[str, list[Result]] = {}
    for result in results.cells:
        repeated = results.settings[result.name].repeat_of
        runs.setdefault(repeated or result.name, []).append(result)
    losses = _loss_verdicts(results, runs)
    cells: list[Result] = []
    settings: dict[str, CellSetting] = {}
    for name, own in runs.items():
        setting = results.settings[own[0].name]
        baseline = runs.get(setting.baseline or "")
        cell = merged(name, own, results.curves)
        if baseline is not None:
            published = own[0].published_tokens_per_second_per_gpu
            base_published = baseline[0].published_tokens_per_second_per_gpu
            if published and base_published:
                setting = replace(setting, published_speedup=published / base_published)
            found = _speed_up(results, own, baseline)
            cell = replace(cell, speedup=found.ratio if found else None)
            if name != setting.baseline:
                cell = replace(cell, speed=found)
        if name in losses:
            whole, last = losses[name]
            cell = replace(cell, loss=whole, loss_last_tenth=last)
        cells.append(cell)
        settings[name] = setting
    repeats = {name: own for name, own in runs.items() if len(own) > 1}
    return replace(results, cells=tuple(cells), settings=settings, repeats=repeats)


def merged(
    name: str, runs: Sequence[Result], curves: Mapping[str, Sequence[StepMetrics]]
) -> Result:
    """Return one result for all `runs` of a cell, in the order of their repeats.

    Throughput is over the steps of all, TFLOPs, MFU and final loss are medians, memory is the peak,
    and the state is the first that is not `finished`. Stalls, attempts and lost steps are summed.
    """
    first = runs[0]
    if len(runs) == 1:
        return replace(first, name=name)
    throughput = measure(*(curves[run.name] for run in runs))
    reasons = [f"repeat {number}: {run.reason}" for number, run in enumerate(runs, 1) if run.reason]
    return replace(
        first,
        name=name,
        status=next((run.status for run in runs if run.status != FINISHED), FINISHED),
        reason=first.reason if len({run.reason for run in runs}) == 1 else "; ".join(reasons),
        steps=min((run.steps for run in runs if run.steps is not None), default=None),
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=_median(run.tflops_per_gpu for run in runs),
        mfu=_median(run.mfu for run in runs),
        memory_gib=max((run.memory_gib for run in runs if run.memory_gib), default=None),
        final_loss=_median(run.final_loss for run in runs),
        profiled=any(run.profiled for run in runs),
        emulated=any(run.emulated for run in runs),
        active=next((run.active for run in runs if run.active), None),
        resumptions=tuple(one for run in runs for one in run.resumptions),
        history=merged_history([run.history for run in runs]),
        throughput=throughput,
        gpu_hours=sum(run.gpu_hours or 0.0 for run in runs) or None,
        cost_per_billion_tokens=_median(run.cost_per_billion_tokens for run in runs),
    )


def merged_history(runs: Sequence[History]) -> History:
    """All attempts; their effective time is relative to the time that all took."""
    known = [
        (sum(attempt.effective_seconds for attempt in run.attempts), run.effective)
        for run in runs
        if run.effective
    ]
    elapsed = sum(seconds / share for seconds, share in known)
    return History(
        attempts=tuple(attempt for run in runs for attempt in run.attempts),
        steps_lost=sum(run.steps_lost for run in runs),
        effective=sum(seconds for seconds, _ in known) / elapsed if elapsed else None,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _speed_up(
    results: RunResults, own: Sequence[Result], baseline: Sequence[Result]
) -> SpeedUp | None:
    devices = {results.settings[runs[0].name].device for runs in (own, baseline)}
    if not _comparable(own[0], baseline[0]) or len(devices) > 1:
        return None
    if any(one.emulated for one in (*own, *baseline)):
        return None
    # The median of a few steps is no result: a cell that failed may have been slow, or broken.
    pairs = [
        (one, other)
        for one, other in zip(own, baseline, strict=False)
        if one.status == FINISHED == other.status
    ]
    speeds = [
        (one.tokens_per_second_per_gpu, other.tokens_per_second_per_gpu) for one, other in pairs
    ]
    known = [(one, other) for one, other in speeds if one and other]
    if len(known) > 1:
        return paired_speed_up(known)
    for one, other in pairs:
        return speed_up(speeds_of(results.curves[one.name]), speeds_of(results.curves[other.name]))
    return None


def _comparable(one: Result, other: Result) -> bool:
    """Whether two cells train one model on texts of one kind, as far as their logs say."""
    return one.recipe == other.recipe and not masks_differ(one, other)


def _loss_verdicts(results: RunResults, runs: Runs) -> dict[str, tuple[LossVerdict, LossVerdict]]:
    """The verdicts on every finished cell with a finished baseline, by name."""
    curves: dict[str, dict[str, list[Losses]]] = {}
    for name, own in runs.items():
        setting = results.settings[own[0].name]
        baseline = runs.get(setting.baseline or "")
        if baseline is None or not _comparable(own[0], baseline[0]):
            continue
        # With unequal batches the same step is at another place in the texts.
        if setting.batch != results.settings[baseline[0].name].batch:
            continue
        finished: list[Losses] = [
            losses_of(results.curves[one.name]) for one in own if one.status == FINISHED
        ]
        if finished:
            curves.setdefault(setting.baseline or "", {})[name] = finished
    found: dict[str, tuple[LossVerdict, LossVerdict]] = {}
    for base, cells in curves.items():
        if base not in cells:
            continue
        if max(map(len, cells.values())) > 1:
            found |= judge_repeats(cells, base)
        else:
            (reference,) = cells[base]
            own_losses = {name: losses for name, (losses,) in cells.items() if name != base}
            found |= {name: judge_curves(one, reference) for name, one in own_losses.items()}
    return found
