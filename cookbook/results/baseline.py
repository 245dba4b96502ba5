"""Compare each cell of a run with its baseline: repeats as one cell, speed-ups, loss verdicts.

A speed-up needs a baseline cell of the same recipe and device with a throughput. Both must have
finished, without emulated numerics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cookbook.observe.history import History
from cookbook.results.loss import LossVerdict, judge_curves, judge_repeats, losses_of
from cookbook.results.result import Result, masks_differ, unlike
from cookbook.results.speed import SpeedUp, measure, median_of, paired_speed_up, speed_up, speeds_of
from cookbook.run.status import FINISHED


def against_baseline(folders: Iterable[Result]) -> list[Result]:
    """Merge the repeats of each cell; add speed-ups and loss verdicts where cells are comparable.

    Args:
        folders: a Result for each folder of the run, so that each repeat is one.
    """
    runs: dict[str, list[Result]] = {}
    for result in folders:
        runs.setdefault(result.repeat_of or result.name, []).append(result)
    merged = {name: merge_repeats(own) for name, own in runs.items()}
    losses = _loss_verdicts(merged)
    cells = []
    for name, cell in merged.items():
        if base := merged.get(cell.baseline or ""):
            found = _speed_up(cell, base)
            published = cell.published_tokens_per_second_per_gpu
            of_base = base.published_tokens_per_second_per_gpu
            cell = replace(
                cell,
                speedup=found.ratio if found else None,
                speed=None if cell.is_baseline else found,
                published_speedup=published / of_base if published and of_base else None,
            )
        if name in losses:
            whole, last = losses[name]
            cell = replace(cell, loss=whole, loss_last_tenth=last)
        cells.append(cell)
    return cells


def merge_repeats(runs: Sequence[Result]) -> Result:
    """Return one result for all `runs` of a cell, in the order of their repeats.

    Throughput is over the steps of all, TFLOPs, MFU and final loss are medians, memory is the peak,
    and the state is the first that is not `finished`. Stalls, attempts and lost steps are summed.
    """
    first = runs[0]
    if len(runs) == 1:
        return replace(first, name=first.repeat_of or first.name)
    throughput = measure(*(run.curve for run in runs))
    reasons = [f"repeat {number}: {run.reason}" for number, run in enumerate(runs, 1) if run.reason]
    return replace(
        first,
        name=first.repeat_of or first.name,
        status=next((run.status for run in runs if run.status != FINISHED), FINISHED),
        reason=first.reason if len({run.reason for run in runs}) == 1 else "; ".join(reasons),
        steps=min((run.steps for run in runs if run.steps is not None), default=None),
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=median_of(run.tflops_per_gpu for run in runs),
        mfu=median_of(run.mfu for run in runs),
        memory_gib=max((run.memory_gib for run in runs if run.memory_gib), default=None),
        final_loss=median_of(run.final_loss for run in runs),
        profiled=any(run.profiled for run in runs),
        emulated=any(run.emulated for run in runs),
        active=next((run.active for run in runs if run.active), None),
        resumptions=tuple(one for run in runs for one in run.resumptions),
        history=merge_histories([run.history for run in runs]),
        throughput=throughput,
        gpu_hours=sum(run.gpu_hours or 0.0 for run in runs) or None,
        cost_per_billion_tokens=median_of(run.cost_per_billion_tokens for run in runs),
        repeats=tuple(runs),
    )


def merge_histories(runs: Sequence[History]) -> History:
    """Return all attempts; their effective time is relative to the time that all took."""
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


def _speed_up(cell: Result, base: Result) -> SpeedUp | None:
    if unlike(cell, base, ""):
        return None
    # The median of a few steps is no result: a cell that failed may have been slow, or broken.
    pairs = [
        (one, other)
        for one, other in zip(cell.runs, base.runs, strict=False)
        if one.status == FINISHED == other.status
    ]
    speeds = [
        (one.tokens_per_second_per_gpu, other.tokens_per_second_per_gpu) for one, other in pairs
    ]
    known = [(one, other) for one, other in speeds if one and other]
    if len(known) > 1:
        return paired_speed_up(known)
    for one, other in pairs:
        return speed_up(speeds_of(one.curve), speeds_of(other.curve))
    return None


def _loss_verdicts(cells: dict[str, Result]) -> dict[str, tuple[LossVerdict, LossVerdict]]:
    """Return the verdicts on every finished cell with a finished baseline, by name."""
    curves: dict[str, dict[str, list[dict[int, float]]]] = {}
    for name, cell in cells.items():
        base = cells.get(cell.baseline or "")
        if base is None or cell.recipe != base.recipe or masks_differ(cell, base):
            continue
        # With unequal batches the same step is at another place in the texts.
        if cell.batch != base.batch:
            continue
        if finished := [losses_of(run.curve) for run in cell.runs if run.status == FINISHED]:
            curves.setdefault(base.name, {})[name] = finished
    found: dict[str, tuple[LossVerdict, LossVerdict]] = {}
    for base_name, group in curves.items():
        if base_name not in group:
            continue
        if max(map(len, group.values())) > 1:
            found |= judge_repeats(group, base_name)
        else:
            (reference,) = group.pop(base_name)
            found |= {name: judge_curves(losses, reference) for name, (losses,) in group.items()}
    return found
