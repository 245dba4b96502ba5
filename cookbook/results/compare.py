"""Two runs cell by cell, or one run's cells against the published numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from cookbook.base.files import json_text
from cookbook.results.columns import COMPARE, Row, rows_of, table_of
from cookbook.results.loss import judge_curves, losses_of
from cookbook.results.result import Result, RunResults, masks_differ
from cookbook.results.run_differences import between_runs
from cookbook.results.speed import SpeedUp, speed_up, speeds_of, unpaired_speed_up
from cookbook.run.status import FINISHED

PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The common cells, in the reference's order, each below the reference's own.

    Attributes:
        reference: a run's name, or `published`.
        tolerance: how many percent slower a cell may be.
        differences: the other differences between the runs.
    """

    reference: str
    tolerance: float
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    unit: str

    @property
    def slower(self) -> list[Row]:
        """The cells that end the command with status 1."""
        return [row for row in self.rows if row.is_slower]


def compare_runs(reference: RunResults, other: RunResults, tolerance: float) -> Comparison:
    """Compare a run with `reference`, cell by cell of the same name."""
    rows: list[Row] = []
    own = {row.cell.name: row for row in rows_of(other)}
    for base in rows_of(reference):
        cell = replace(base.cell, speed=None, loss=None, loss_last_tenth=None)
        rows.append(replace(base, cell=cell))
        if base.cell.name in own:
            rows.append(_beside(other, own[base.cell.name], reference, base, tolerance))
    differences = tuple(between_runs(reference, other))
    return Comparison(reference.run.run, tolerance, tuple(rows), differences, other.unit)


def compare_with_published(run: RunResults, tolerance: float) -> Comparison:
    """Compare every cell that is just what was published with the published number."""
    rows = []
    for row in rows_of(run):
        published, cell = row.cell.published_tokens_per_second_per_gpu, row.cell
        if published is None:
            continue
        reason = None if cell.status == FINISHED else f"is {cell.status or 'of unknown status'}"
        reason = "emulated numerics have no speed" if cell.emulated else reason
        speeds = speeds_of(run.curves[cell.name])
        speed = None if reason else speed_up(speeds, [published] * len(speeds))
        is_slower = cell.status != FINISHED if reason else _is_slower(speed, tolerance)
        cell = replace(cell, speed=speed, loss=None, loss_last_tenth=None)
        rows.append(Row(cell, row.setting, row.run, published, reason, is_slower))
    return Comparison(PUBLISHED, tolerance, tuple(rows), (), run.unit)


def _beside(run: RunResults, row: Row, reference: RunResults, base: Row, tolerance: float) -> Row:
    reason = _incomparable(row, base)
    tokens = base.cell.tokens_per_second_per_gpu
    speed, whole, last = None, None, None
    if reason is None:
        speed = _speed(run, row.cell, reference, base.cell)
        if row.setting.batch == base.setting.batch:
            curves = run.curves[row.cell.name], reference.curves[base.cell.name]
            whole, last = judge_curves(losses_of(curves[0]), losses_of(curves[1]))
        is_slower = tokens is not None and _is_slower(speed, tolerance)
    else:
        is_slower = base.cell.status == FINISHED != row.cell.status
    cell = replace(row.cell, speed=speed, loss=whole, loss_last_tenth=last)
    return Row(cell, row.setting, row.run, tokens, reason, is_slower)


def _incomparable(row: Row, base: Row) -> str | None:
    """Why the two speeds are not comparable; None where they are."""
    for result, where in ((row.cell, ""), (base.cell, f"in {base.run} it ")):
        if result.status != FINISHED:
            return f"{where}is {result.status or 'of unknown status'}"
    if row.cell.emulated or base.cell.emulated:
        return "emulated numerics have no speed"
    if row.cell.recipe != base.cell.recipe:
        return f"recipe {row.cell.recipe}, and {base.cell.recipe} in {base.run}"
    if row.setting.device != base.setting.device:
        return f"ran on {row.setting.device}, and on {base.setting.device} in {base.run}"
    if masks_differ(row.cell, base.cell):
        return (
            f"other texts: a token attends to {row.cell.mean_attended_length:,.0f} tokens, and to "
            f"{base.cell.mean_attended_length:,.0f} in {base.run}"
        )
    return None


def _speed(run: RunResults, cell: Result, reference: RunResults, base: Result) -> SpeedUp | None:
    own, other = (
        [
            one.tokens_per_second_per_gpu
            for one in results.runs_of(result)
            if one.status == FINISHED and one.tokens_per_second_per_gpu
        ]
        for results, result in ((run, cell), (reference, base))
    )
    if len(own) > 1 and len(other) > 1:
        return unpaired_speed_up(own, other)
    return speed_up(speeds_of(run.curves[cell.name]), speeds_of(reference.curves[base.name]))


def _is_slower(speed: SpeedUp | None, tolerance: float) -> bool:
    return speed is None or speed.ratio < 1 - tolerance / 100


def comparison_markdown(comparison: Comparison) -> str:
    """A row for each cell of each run; then what differs, and what is slower than allowed."""
    head = f"reference: {comparison.reference}; a cell may be {comparison.tolerance:.3g}% slower"
    table = table_of(comparison.rows, COMPARE, comparison.unit).markdown()
    notes = "\n".join(f"- {note}" for note in _notes(comparison))
    return "\n\n".join(part for part in (head, table, notes) if part) + "\n"


def _notes(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        if row.reason:
            yield f"{row.cell.name} in {row.run}: {row.reason}"
    for difference in comparison.differences:
        yield f"differs: {difference}"
    for row in comparison.slower:
        speed = row.cell.speed
        by = f", by {100 * (1 - speed.ratio):.1f}%" if speed else " has no speed to compare"
        yield f"slower than allowed: {row.cell.name} in {row.run}{by}"


def comparison_json(comparison: Comparison) -> str:
    """One object; an unknown value is null."""
    cells = [
        {
            "cell": row.cell.name,
            "run": row.run,
            "status": row.cell.status,
            "tokens_per_second_per_gpu": row.cell.tokens_per_second_per_gpu,
            "reference_tokens_per_second_per_gpu": row.reference_tokens,
            "speed": asdict(row.cell.speed) if row.cell.speed else None,
            "loss": asdict(row.cell.loss) if row.cell.loss else None,
            "loss_last_tenth": asdict(row.cell.loss_last_tenth)
            if row.cell.loss_last_tenth
            else None,
            "gpu_hours": row.cell.gpu_hours,
            "cost_per_billion_tokens": row.cell.cost_per_billion_tokens,
            "reason": row.reason,
            "is_slower": row.is_slower,
        }
        for row in comparison.rows
    ]
    return json_text(
        {
            "reference": comparison.reference,
            "tolerance": comparison.tolerance,
            "cells": cells,
            "differences": comparison.differences,
            "is_fast_enough": not comparison.slower,
        }
    )
