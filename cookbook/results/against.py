"""What each cell of a run is against its baseline: how much faster, and whether it trains alike."""

from __future__ import annotations

from dataclasses import replace

from cookbook.results.loss import judge_curves, losses_of
from cookbook.results.result import CellSetting, Result, RunResults
from cookbook.results.speed import speed_up, speeds_of
from cookbook.run.status import FINISHED


def against_baseline(results: RunResults) -> RunResults:
    """The results with speed-ups and loss verdicts, where a cell can be compared."""
    by_name = {cell.name: cell for cell in results.cells}
    cells: list[Result] = []
    settings: dict[str, CellSetting] = {}
    for cell in results.cells:
        setting = results.settings[cell.name]
        baseline = by_name.get(setting.baseline or "")
        settings[cell.name] = setting
        if baseline is None:
            cells.append(cell)
            continue
        published = cell.published_tokens_per_second_per_gpu
        base_published = baseline.published_tokens_per_second_per_gpu
        if published is not None and base_published:
            settings[cell.name] = replace(setting, published_speedup=published / base_published)
        cells.append(_compared(results, cell, baseline))
    return replace(results, cells=tuple(cells), settings=settings)


def _compared(results: RunResults, cell: Result, baseline: Result) -> Result:
    # The median of a few steps is no result: a cell that failed may have been slow, or broken.
    if cell.recipe != baseline.recipe or not cell.status == FINISHED == baseline.status:
        return cell
    own, base = results.settings[cell.name], results.settings[baseline.name]
    curve, reference = results.curves[cell.name], results.curves[baseline.name]
    if own.device == base.device and not cell.emulated and not baseline.emulated:
        found = speed_up(speeds_of(curve), speeds_of(reference))
        cell = replace(cell, speedup=found.ratio if found else None)
        if cell.name != baseline.name:
            cell = replace(cell, speed=found)
    if cell.name != baseline.name and own.batch == base.batch:
        whole, last = judge_curves(losses_of(curve), losses_of(reference))
        cell = replace(cell, loss=whole, loss_last_tenth=last)
    return cell
