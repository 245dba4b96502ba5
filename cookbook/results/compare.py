"""Compare two runs cell by cell, or one run's cells with the published numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from cookbook.base.files import json_text
from cookbook.results.columns import COMPARE, table_of
from cookbook.results.loss import judge_curves, losses_of
from cookbook.results.result import Result, RunResults, unlike
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
    rows: tuple[Result, ...]
    differences: tuple[str, ...]
    unit: str

    @property
    def slower(self) -> list[Result]:
        """The cells that end the command with status 1."""
        return [row for row in self.rows if row.is_slower]


def compare_runs(reference: RunResults, other: RunResults, tolerance: float) -> Comparison:
    """Compare a run with `reference`, cell by cell of the same name."""
    rows: list[Result] = []
    own = {cell.name: _of_run(other, cell) for cell in other.cells}
    for base in (_of_run(reference, cell) for cell in reference.cells):
        rows.append(base)
        if base.name in own:
            rows.append(_compare(own[base.name], base, tolerance))
    differences = tuple(between_runs(reference, other))
    return Comparison(reference.run.run, tolerance, tuple(rows), differences, other.unit)


def compare_with_published(run: RunResults, tolerance: float) -> Comparison:
    """Compare every cell that has a published number with it."""
    rows = []
    for cell in (_of_run(run, cell) for cell in run.cells):
        published, speeds = cell.published_tokens_per_second_per_gpu, speeds_of(cell.curve)
        if published is not None:
            reason = _incomparable(cell, cell)
            speed = None if reason else speed_up(speeds, [published] * len(speeds))
            is_slower = cell.status != FINISHED if reason else _is_slower(speed, tolerance)
            rows.append(_compared(cell, published, speed, reason, is_slower))
    return Comparison(PUBLISHED, tolerance, tuple(rows), (), run.unit)


def _of_run(results: RunResults, cell: Result) -> Result:
    return replace(cell, run=results.run.run, speed=None, loss=None, loss_last_tenth=None)


def _compared(
    cell: Result, tokens: float | None, speed: SpeedUp | None, reason: str | None, is_slower: bool
) -> Result:
    return replace(
        cell, reference_tokens=tokens, speed=speed, incomparable=reason, is_slower=is_slower
    )


def _compare(cell: Result, base: Result, tolerance: float) -> Result:
    tokens = base.tokens_per_second_per_gpu
    if reason := _incomparable(cell, base):
        is_slower = base.status == FINISHED != cell.status
        return _compared(cell, tokens, None, reason, is_slower)
    own, other = (
        [run.tokens_per_second_per_gpu for run in one.runs if run.status == FINISHED]
        for one in (cell, base)
    )
    known, of_base = [speed for speed in own if speed], [speed for speed in other if speed]
    if len(known) > 1 and len(of_base) > 1:
        speed: SpeedUp | None = unpaired_speed_up(known, of_base)
    else:
        speed = speed_up(speeds_of(cell.runs[0].curve), speeds_of(base.runs[0].curve))
    if cell.batch == base.batch:
        whole, last = judge_curves(losses_of(cell.curve), losses_of(base.curve))
        cell = replace(cell, loss=whole, loss_last_tenth=last)
    is_slower = tokens is not None and _is_slower(speed, tolerance)
    return _compared(cell, tokens, speed, None, is_slower)


def _incomparable(cell: Result, base: Result) -> str | None:
    where = f"in {base.run}"
    for one, place in ((cell, ""), (base, f"{where} it ")):
        if one.status != FINISHED:
            return f"{place}is {one.status or 'of unknown status'}"
    return unlike(cell, base, where)


def _is_slower(speed: SpeedUp | None, tolerance: float) -> bool:
    return speed is None or speed.ratio < 1 - tolerance / 100


def comparison_markdown(comparison: Comparison) -> str:
    """Return a row for each cell of each run, the differences, and the cells that are too slow."""
    head = f"reference: {comparison.reference}; a cell may be {comparison.tolerance:.3g}% slower"
    table = table_of(comparison.rows, COMPARE, comparison.unit).markdown()
    notes = "\n".join(f"- {note}" for note in _notes(comparison))
    return "\n\n".join(part for part in (head, table, notes) if part) + "\n"


def _notes(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        if row.incomparable:
            yield f"{row.name} in {row.run}: {row.incomparable}"
    for difference in comparison.differences:
        yield f"differs: {difference}"
    for row in comparison.slower:
        by = f", by {100 * (1 - row.speed.ratio):.1f}%" if row.speed else " has no speed to compare"
        yield f"slower than allowed: {row.name} in {row.run}{by}"


def comparison_json(comparison: Comparison) -> str:
    """Return one JSON object; an unknown value is null."""
    cells = [
        {
            "cell": row.name,
            "run": row.run,
            "status": row.status,
            "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu,
            "reference_tokens_per_second_per_gpu": row.reference_tokens,
            "speed": asdict(row.speed) if row.speed else None,
            "loss": asdict(row.loss) if row.loss else None,
            "loss_last_tenth": asdict(row.loss_last_tenth) if row.loss_last_tenth else None,
            "gpu_hours": row.gpu_hours,
            "cost_per_billion_tokens": row.cost_per_billion_tokens,
            "reason": row.incomparable,
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
