"""Compare a run with another run: cells of the same name, and what differs between the runs."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cookbook.base.files import json_text
from cookbook.config.facts import Facts
from cookbook.results.collect import loss_verdict, speed_up_over
from cookbook.results.columns import COMPARE, fields_of, table_of
from cookbook.results.recorded import UNKNOWN, asked_facts, asked_value, seen_facts
from cookbook.results.result import Judged, Result, RunResults, unlike
from cookbook.run.status import FINISHED

# Facts not to compare: they vary from run to run, or the comparison shows them elsewhere.
_NOISE = re.compile(r"nodes$|gpu$|self check |mean attended length$")
# Options that name texts or a tokenizer, with the words that introduce them.
_KINDS = {
    **dict.fromkeys((Facts.dataset, Facts.dataset_path), "the texts: "),
    Facts.assets: "the tokenizer: ",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a run with a reference run."""

    reference: str  # name of the reference run
    tolerance: float  # allowed slowdown, in percent
    # Each cell of the reference run, followed by the cell compared with it, if there is one.
    rows: tuple[Result, ...]
    differences: tuple[str, ...]  # differences in configuration and environment
    unit: str

    @property
    def slower(self) -> list[Result]:
        return [row for row in self.rows if row.judged.is_slower]


def compare_runs(reference: RunResults, other: RunResults, tolerance: float) -> Comparison:
    """Compare the cells of `other` with the cells of the same name in `reference`."""
    rows: list[Result] = []
    own = {cell.name: cell for cell in other.cells}
    for base in reference.cells:
        rows.append(replace(base, judged=Judged(run=reference.run.run)))
        if base.name in own:
            judged = _compare(own[base.name], base, tolerance, other.run.run, reference.run.run)
            rows.append(replace(own[base.name], judged=judged))
    differences = tuple(between_runs(reference, other))
    return Comparison(reference.run.run, tolerance, tuple(rows), differences, other.unit)


def _compare(cell: Result, base: Result, tolerance: float, run: str, base_run: str) -> Judged:
    tokens = base.measured.tokens_per_second_per_gpu
    whole, last = loss_verdict(cell, base)
    why = _incomparable(cell, base, base_run)
    found = Judged(
        run=run, reference_tokens=tokens, loss=whole, loss_last_tenth=last, incomparable=why
    )
    if why:
        statuses = base.measured.status, cell.measured.status
        return replace(found, is_slower=statuses[0] == FINISHED and statuses[1] != FINISHED)
    speed = speed_up_over(cell, base)
    is_slower = speed is None or speed.ratio < 1 - tolerance / 100
    return replace(found, speed=speed, is_slower=tokens is not None and is_slower)


def _incomparable(cell: Result, base: Result, base_run: str) -> str | None:
    for one, place in ((cell, ""), (base, f"in {base_run} it ")):
        if one.measured.status != FINISHED:
            return f"{place}is {one.measured.status or 'of unknown status'}"
    return unlike(cell, base, f"in {base_run}")


def between_runs(one: RunResults, other: RunResults) -> Iterator[str]:
    """Yield one line per difference between two runs, over the cells that both have."""
    by_name = {cell.name: cell for cell in other.cells}
    common = [(cell, by_name[cell.name]) for cell in one.cells if cell.name in by_name]
    differing = defaultdict[tuple[str, str, str], list[str]](list)
    for name in ("cluster", "stack", "commit"):
        first, second = (getattr(run.run, name) or UNKNOWN for run in (one, other))
        differing[name, first, second] = []
    differing["devices", _devices(one), _devices(other)] = []
    for base, own in common:
        asked = [asked_facts(cell.record) for cell in (base, own)]
        for name in {**asked[0], **asked[1]}:
            if name not in ("cluster", "stack"):
                first, second = (asked_value(facts, name) for facts in asked)
                differing[_KINDS.get(name, "") + name, first, second].append(base.name)
        before, after = (seen_facts(cell.measured.environment) for cell in (base, own))
        for name, value in before.items():
            if name in after and not _NOISE.match(name):
                differing[name, value, after[name]].append(base.name)
    for (name, first, second), cells in differing.items():
        if first != second:
            where = f" (of {', '.join(cells)})" if cells and len(cells) < len(common) else ""
            yield f"{name}{where}: {first} in {one.run.run}, {second} in {other.run.run}"


def _devices(run: RunResults) -> str:
    active = [(one.record.world, one.measured.active) for one in run.cells]
    found = dict.fromkeys(
        f"{world} x {one.get('gpu') or 'CPU rank'}" for world, one in active if one
    )
    return " and ".join(found) or UNKNOWN


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: cells, differences, and cells that are too slow."""
    head = f"reference: {comparison.reference}; a cell may be {comparison.tolerance:.3g}% slower"
    table = table_of(comparison.rows, COMPARE, comparison.unit).markdown()
    found = [(f"{row.name} in {row.judged.run}", row.judged) for row in comparison.rows]
    notes = [f"{name}: {one.incomparable}" for name, one in found if one.incomparable]
    notes += [f"differs: {difference}" for difference in comparison.differences]
    for name, one in found:
        if one.is_slower:
            by = f", by {100 * (1 - one.speed.ratio):.1f}%" if one.speed else ""
            notes.append(f"slower than allowed: {name}{by or ' has no speed to compare'}")
    below = "\n".join(f"- {note}" for note in notes)
    return "\n\n".join(part for part in (head, table, below) if part) + "\n"


_OF_BOTH = (
    *("status", "tokens_per_second_per_gpu", "speed", "loss", "loss_last_tenth"),
    *("gpu_hours", "cost_per_billion_tokens"),
)


def comparison_json(comparison: Comparison) -> str:
    """Return the comparison as a JSON object; unknown values are null."""
    cells = [
        {
            "cell": row.name,
            "run": row.judged.run,
            **fields_of(row, _OF_BOTH),
            "reference_tokens_per_second_per_gpu": row.judged.reference_tokens,
            "reason": row.judged.incomparable,
            "is_slower": row.judged.is_slower,
        }
        for row in comparison.rows
    ]
    same = {key: getattr(comparison, key) for key in ("reference", "tolerance", "differences")}
    return json_text({**same, "cells": cells, "is_fast_enough": not comparison.slower})
