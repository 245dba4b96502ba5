"""What each cell of a run is against its baseline: how much faster, and whether it trains alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cookbook.results.loss import Losses, LossVerdict, judge_curves, judge_repeats, losses_of
from cookbook.results.repeats import merged
from cookbook.results.result import CellSetting, Result, RunResults, masks_differ
from cookbook.results.speed import SpeedUp, paired_speed_up, speed_up, speeds_of
from cookbook.run.status import FINISHED

Runs = Mapping[str, Sequence[Result]]
"""The repeats of each cell, by the cell's name."""


def against_baseline(results: RunResults) -> RunResults:
    """The results with the repeats of a cell as one, and speed-ups and loss verdicts where a cell
    can be compared.

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
            setting = replace(setting, published_speedup=_published(own[0], baseline[0]))
            found = _speed_up(results, own, baseline)
            cell = replace(cell, speedup=found.ratio if found else None)
            if name != setting.baseline:
                cell = replace(cell, speed=found)
        if name in losses:
            whole, last = losses[name]
            cell = replace(cell, loss=whole, loss_last_tenth=last)
        cells.append(cell)
        settings[name] = setting
    return replace(results, cells=tuple(cells), settings=settings)


def _published(cell: Result, baseline: Result) -> float | None:
    own = cell.published_tokens_per_second_per_gpu
    base = baseline.published_tokens_per_second_per_gpu
    return own / base if own is not None and base else None


def _speed_up(
    results: RunResults, own: Sequence[Result], baseline: Sequence[Result]
) -> SpeedUp | None:
    if not _comparable(own[0], baseline[0]) or not _same_device(results, own[0], baseline[0]):
        return None
    # One repeat that is emulated makes the cell one that is.
    if any(one.emulated for one in (*own, *baseline)):
        return None
    pairs = [
        (one, other)
        for one, other in zip(own, baseline, strict=False)
        # The median of a few steps is no result: a cell that failed may have been slow, or broken.
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
    """Whether two cells train one model on texts of one kind, for all that their logs say."""
    return one.recipe == other.recipe and not masks_differ(one, other)


def _same_device(results: RunResults, one: Result, other: Result) -> bool:
    return results.settings[one.name].device == results.settings[other.name].device


def _loss_verdicts(results: RunResults, runs: Runs) -> dict[str, tuple[LossVerdict, LossVerdict]]:
    """The verdicts on every cell that has finished beside its baseline, by name."""
    curves: dict[str, dict[str, list[Losses]]] = {}
    for name, own in runs.items():
        setting = results.settings[own[0].name]
        baseline = runs.get(setting.baseline or "")
        if baseline is None or not _comparable(own[0], baseline[0]):
            continue
        # Of unequal batches the same step is at another place in the texts.
        if setting.batch != results.settings[baseline[0].name].batch:
            continue
        finished: list[Losses] = [
            losses_of(results.curves[one.name]) for one in own if one.status == FINISHED
        ]
        if finished:
            curves.setdefault(setting.baseline or "", {})[name] = finished
    found: dict[str, tuple[LossVerdict, LossVerdict]] = {}
    for baseline_name, cells in curves.items():
        if baseline_name not in cells:
            continue
        if max(map(len, cells.values())) > 1:
            found |= judge_repeats(cells, baseline_name)
            continue
        (reference,) = cells[baseline_name]
        for name, (own_losses,) in cells.items():
            if name != baseline_name:
                found[name] = judge_curves(own_losses, reference)
    return found
