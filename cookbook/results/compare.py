"""Compare cells with the baseline of their run, with another run, or with published numbers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.files import json_text
from cookbook.observe.history import History
from cookbook.results.columns import COMPARE, table_of
from cookbook.results.result import Result, RunResults, masks_differ, unlike
from cookbook.results.run_differences import between_runs, have_same_texts, repeated_facts
from cookbook.results.verdicts import (
    LossVerdict,
    SpeedUp,
    judge_curves,
    judge_repeats,
    losses_of,
    measure,
    median_of,
    paired_speed_up,
    speed_up,
    speeds_of,
    unpaired_speed_up,
)
from cookbook.run.status import FINISHED


def against_baseline(folders: Iterable[Result]) -> list[Result]:
    """Merge each cell's repeats into one Result; add speed-up and loss verdict where comparable."""
    runs = defaultdict[Any, list[Result]](list)
    for result in folders:
        # A repeat that was resumed with other options is a cell of its own.
        options = frozenset(repeated_facts(result.asked).items())
        runs[result.repeat_of or result.name, options].append(result)
    groups = [merge_repeats(own) for own in runs.values()]
    merged = {cell.name: _with_baseline(cell, groups) for cell in groups}
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
        whole, last = losses.get(name, (None, None))
        cells.append(replace(cell, loss=whole, loss_last_tenth=last))
    return cells


def _with_baseline(cell: Result, groups: Sequence[Result]) -> Result:
    # If the baseline's repeats form several cells, compare with the one that shares most rounds.
    rounds = {run.repeat for run in cell.runs}
    own = [one for one in groups if cell.baseline and cell.baseline in (one.name, one.repeat_of)]
    shared = [len(rounds & {run.repeat for run in one.runs}) for one in own]
    return replace(cell, baseline=own[shared.index(max(shared))].name) if own else cell


def merge_repeats(runs: Sequence[Result]) -> Result:
    """Merge the results of a cell's repeats, in order, into one result.

    Throughput is measured over the steps of all repeats. TFLOPs and MFU are medians over all
    repeats, and memory is the maximum. Final and validation loss are medians over the repeats that
    reached the highest step. The status is `finished` only if every repeat has finished. Most other
    fields, such as the loss curve, come from the repeat that reached the highest step, because
    another may have failed before its first step. If several reached it, use the first of them.
    """
    first = max(runs, key=lambda run: run.steps or 0)
    if len(runs) == 1:
        return first
    throughput = measure(*(run.timed for run in runs))
    furthest = [run for run in runs if run.steps == first.steps]
    reasons = [f"repeat {run.repeat}: {run.reason}" for run in runs if run.reason]
    attempts = tuple(attempt for run in runs for attempt in run.history.attempts)
    lost = sum(run.history.steps_lost for run in runs)
    effective = elapsed = 0.0
    for history in (run.history for run in runs):
        if history.effective:
            seconds = sum(attempt.effective_seconds for attempt in history.attempts)
            effective, elapsed = effective + seconds, elapsed + seconds / history.effective
    return replace(
        first,
        name=runs[0].name,
        status=next((run.status for run in runs if run.status != FINISHED), FINISHED),
        reason=first.reason if len({run.reason for run in runs}) == 1 else "; ".join(reasons),
        steps=min((run.steps for run in runs if run.steps is not None), default=None),
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=median_of(run.tflops_per_gpu for run in runs),
        mfu=median_of(run.mfu for run in runs),
        memory_gib=max((run.memory_gib for run in runs if run.memory_gib), default=None),
        final_loss=median_of(run.final_loss for run in furthest) or first.final_loss,
        validation_loss=median_of(run.validation_loss for run in furthest) or first.validation_loss,
        profiled=any(run.profiled for run in runs),
        emulated=any(run.emulated for run in runs),
        active=next((run.active for run in runs if run.active), None),
        resumptions=tuple(one for run in runs for one in run.resumptions),
        history=History(attempts, lost, effective / elapsed if elapsed else None),
        throughput=throughput,
        gpu_hours=sum(run.gpu_hours or 0.0 for run in runs) or None,
        cost_per_billion_tokens=median_of(run.cost_per_billion_tokens for run in runs),
        repeats=tuple(runs),
    )


def _speed_up(cell: Result, base: Result) -> SpeedUp | None:
    if unlike(cell, base, ""):
        return None
    # Compare finished runs only: a failed cell's few steps may be slow or broken.
    of_base = {run.repeat: run for run in base.runs}
    pairs = [(run, of_base[run.repeat]) for run in cell.runs if run.repeat in of_base]
    pairs = [pair for pair in pairs if {run.status for run in pair} == {FINISHED}]
    speeds = [[run.tokens_per_second_per_gpu for run in pair] for pair in pairs]
    paired = paired_speed_up([(one, other) for one, other in speeds if one and other])
    return paired or (_speed_up_of_steps(*pairs[0]) if pairs else None)


def _speed_up_of_steps(cell: Result, base: Result) -> SpeedUp | None:
    own, of_base = ([*speeds_of(one.timed).values()] for one in (cell, base))
    return speed_up(own, of_base)


def _loss_verdicts(cells: dict[str, Result]) -> dict[str, list[LossVerdict]]:
    curves = defaultdict[str, dict[str, list[dict[int, float]]]](dict)
    for name, cell in cells.items():
        base = cells.get(base_name := cell.baseline or "")
        if base is None or masks_differ(cell, base):
            continue
        finished = (run for run in cell.runs if run.status == FINISHED)
        if alike := [losses_of(run.curve) for run in finished if have_same_texts(run, base)]:
            curves[base_name][name] = alike
    found: dict[str, list[LossVerdict]] = {}
    for base_name, group in curves.items():
        if base_name in group and max(map(len, group.values())) > 1:
            found |= judge_repeats(group, base_name)
        elif base_name in group:
            (reference,) = group.pop(base_name)
            found |= {name: judge_curves(losses, reference) for name, (losses,) in group.items()}
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a run with a reference run, or with published numbers."""

    reference: str  # name of the reference run, or `published`
    tolerance: float  # allowed slowdown, in percent
    # Each cell of the reference run, followed by the cell that is compared with it, if there is
    # one. If the reference is `published`, only the compared cells.
    rows: tuple[Result, ...]
    differences: tuple[str, ...]  # differences in configuration and environment
    unit: str

    @property
    def slower(self) -> list[Result]:
        return [row for row in self.rows if row.is_slower]


def compare_runs(reference: RunResults, other: RunResults, tolerance: float) -> Comparison:
    """Compare the cells of `other` with the cells of the same name in `reference`."""
    rows: list[Result] = []
    own = {cell.name: cell for cell in _rows_of(other)}
    for base in _rows_of(reference):
        rows.append(base)
        if base.name in own:
            rows.append(_compare(own[base.name], base, tolerance))
    differences = tuple(between_runs(reference, other))
    return Comparison(reference.run.run, tolerance, tuple(rows), differences, other.unit)


def compare_with_published(run: RunResults, tolerance: float) -> Comparison:
    """Compare each cell's throughput with its published throughput, if there is one."""
    rows = []
    for cell in _rows_of(run):
        published = cell.published_tokens_per_second_per_gpu
        if published is None:
            continue
        cell = replace(cell, reference_tokens=published, incomparable=_incomparable(cell, cell))
        if cell.incomparable:
            rows.append(replace(cell, is_slower=cell.status != FINISHED))
        else:
            speed = paired_speed_up([(own, published) for own in _speeds_of_runs(cell)])
            if speed is None:
                steps = [*speeds_of(cell.timed).values()]
                speed = speed_up(steps, [published] * len(steps))
            rows.append(replace(cell, speed=speed, is_slower=_is_slower(speed, tolerance)))
    return Comparison("published", tolerance, tuple(rows), (), run.unit)


def _rows_of(run: RunResults) -> list[Result]:
    name = run.run.run
    return [
        replace(cell, run=name, speed=None, loss=None, loss_last_tenth=None) for cell in run.cells
    ]


def _compare(cell: Result, base: Result, tolerance: float) -> Result:
    tokens = base.tokens_per_second_per_gpu
    pair = {"cell": replace(cell, baseline="base"), "base": replace(base, baseline="base")}
    whole, last = _loss_verdicts(pair).get("cell", (None, None))
    cell = replace(cell, reference_tokens=tokens, loss=whole, loss_last_tenth=last)
    cell = replace(cell, incomparable=_incomparable(cell, base))
    if cell.incomparable:
        return replace(cell, is_slower=base.status == FINISHED and cell.status != FINISHED)
    own, of_base = _speeds_of_runs(cell), _speeds_of_runs(base)
    if own and of_base and len(own) + len(of_base) > 2:
        speed: SpeedUp | None = unpaired_speed_up(own, of_base)
    else:
        speed = _speed_up_of_steps(cell, base)
    is_slower = tokens is not None and _is_slower(speed, tolerance)
    return replace(cell, speed=speed, is_slower=is_slower)


def _speeds_of_runs(cell: Result) -> list[float]:
    speeds = [run.tokens_per_second_per_gpu for run in cell.runs if run.status == FINISHED]
    return [speed for speed in speeds if speed]


def _incomparable(cell: Result, base: Result) -> str | None:
    for one, place in ((cell, ""), (base, f"in {base.run} it ")):
        if one.status != FINISHED:
            return f"{place}is {one.status or 'of unknown status'}"
    return unlike(cell, base, f"in {base.run}")


def _is_slower(speed: SpeedUp | None, tolerance: float) -> bool:
    return speed is None or speed.ratio < 1 - tolerance / 100


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: cells, differences, and cells that are too slow."""
    head = f"reference: {comparison.reference}; a cell may be {comparison.tolerance:.3g}% slower"
    table = table_of(comparison.rows, COMPARE, comparison.unit).markdown()
    rows = comparison.rows
    notes = [f"{row.name} in {row.run}: {row.incomparable}" for row in rows if row.incomparable]
    notes += [f"differs: {difference}" for difference in comparison.differences]
    for row in comparison.slower:
        by = f", by {100 * (1 - row.speed.ratio):.1f}%" if row.speed else " has no speed to compare"
        notes.append(f"slower than allowed: {row.name} in {row.run}{by}")
    below = "\n".join(f"- {note}" for note in notes)
    return "\n\n".join(part for part in (head, table, below) if part) + "\n"


_JSON = "cell run status tokens_per_second_per_gpu reference_tokens_per_second_per_gpu speed loss "
_JSON += "loss_last_tenth gpu_hours cost_per_billion_tokens reason is_slower"
_KEYS = {"cell": "name", "reason": "incomparable"}
_KEYS["reference_tokens_per_second_per_gpu"] = "reference_tokens"


def comparison_json(comparison: Comparison) -> str:
    """Return the comparison as a JSON object; unknown values are null."""
    rows = [row.as_mapping() for row in comparison.rows]
    return json_text(
        {
            "reference": comparison.reference,
            "tolerance": comparison.tolerance,
            "cells": [{key: row[_KEYS.get(key, key)] for key in _JSON.split()} for row in rows],
            "differences": comparison.differences,
            "is_fast_enough": not comparison.slower,
        }
    )
