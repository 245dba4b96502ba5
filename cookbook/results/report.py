"""The report of a run: Markdown for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from cookbook.base.jsontext import json_text
from cookbook.results.expected import MARGIN, shortfall
from cookbook.results.headlines import partly_finished
from cookbook.results.result import SAME_MASK, CellSetting, Result, RunResults
from cookbook.results.table import UNKNOWN, Table

_HEADER = (
    "cell",
    "status",
    "steps",
    "tokens/s/GPU",
    "speed-up",
    "TFLOPs/GPU",
    "MFU",
    "memory GiB",
    "final loss",
    "published",
    "predicted",
    "attention",
    "attended tokens",
)
# Where all cells agree, the facts above the table say it.
_WHERE_CELLS_DIFFER = ("attention", "attended tokens")
_NUM_TEXT_COLUMNS = 2
_DONE_STATES = {"finished", "refused"}
LEGEND = (
    "tokens/s/GPU, TFLOPs and MFU: median of the logged steps after warm-up (their first\n"
    "quarter, 1 to 10 steps). Memory: peak over all ranks and steps. A dash, or no column:\n"
    "not known."
)


def render_markdown(results: RunResults) -> str:
    """The report as Markdown whose table also reads well in a terminal."""
    parts = [
        f"# {results.run.run}",
        "\n".join(f"- {fact}" for fact in facts(results)),
        summary_table(results).markdown(),
    ]
    if said := notes(results):
        parts.append("\n".join(f"- {note}" for note in said))
    parts.append(LEGEND)
    return "\n\n".join(parts) + "\n"


def notes(results: RunResults) -> list[str]:
    """What the table has no room for: why a cell ended as it did, and where it continued."""
    runs = [run for cell in results.cells for run in cell.repeats or (cell,)]
    return [
        *(
            f"{cell.name} ({cell.status or 'status unknown'}): {_one_line(cell.reason)}"
            for cell in results.cells
            if cell.reason
        ),
        *(
            f"{run.name}: {line}"
            for run in runs
            for resumption in run.resumptions
            for line in resumption.lines
        ),
        *(f"{run.name}: {line}" for run in runs for line in run.history.lines),
        *(
            f"{cell.name}: profiled, which slows the host down; take its speed from a run without "
            "profiling.enable_profiling"
            for cell in results.cells
            if cell.profiled
        ),
        *_slower_than_predicted(results.cells),
    ]


def _slower_than_predicted(cells: Sequence[Result]) -> Iterator[str]:
    for cell in cells:
        predicted = cell.predicted_tokens_per_second_per_gpu
        missing = shortfall(cell.tokens_per_second_per_gpu, predicted)
        if missing is not None:
            yield (
                f"{cell.name}: {missing:.0%} slower than predicted ({tokens_text(predicted)} "
                f"tokens/s/GPU; within {MARGIN:.0%} is usual); look first at "
                f"{cell.predicted_largest}: submit.py profile"
            )


def render_json(results: RunResults) -> str:
    """The report as one JSON object; unknown, NaN and infinite values are null."""
    report = {
        "run": results.run.run,
        "sweep": results.run.sweep,
        "cells": [asdict(cell) for cell in results.cells],
        "baseline": results.run.baseline,
    }
    return json_text(report)


def facts(results: RunResults) -> list[str]:
    """The list above the table: what ran where, and what a reader must not take for more."""
    started = f", started {results.run.created}" if results.run.created else ""
    by = f" by {results.run.user}" if results.run.user else ""
    lines = [
        f"sweep: {results.run.sweep or UNKNOWN}{started}{by}",
        f"cluster: {results.run.cluster or UNKNOWN}, stack: {results.run.stack or UNKNOWN}, "
        f"commit: {results.run.commit or UNKNOWN}",
    ]
    if results.run.baseline:
        lines.append(f"baseline: {results.run.baseline}")
    if unfinished := partly_finished(results):
        lines.append(unfinished)
    stand_ins = {
        (cell.recipe or UNKNOWN, setting.stand_in_for): None
        for cell in results.cells
        if (setting := results.settings[cell.name]).stand_in_for
    }
    for recipe, asked in stand_ins:
        lines.append(
            f"stand-in: {recipe} ran instead of {asked}, which does not fit here; "
            f"the published numbers are {asked}'s"
        )
    devices = {results.settings[cell.name].device for cell in results.cells}
    if "cpu" in devices:
        lines.append(
            "device: cpu; throughput is a CPU figure, says nothing about GPUs and has no MFU"
        )
    if any(cell.emulated for cell in results.cells):
        lines.append("emulated: software computed what a kernel would; loss counts, speed doesn't")
    return [*lines, *_attention(results.cells), *_self_check(results.cells)]


def _self_check(cells: Sequence[Result]) -> Iterator[str]:
    """How far kernels were from their reference, and which cells trained without a look."""
    shares: dict[str, tuple[float, str]] = {}
    unchecked = []
    for cell in cells:
        found = (cell.active or {}).get("self_check")
        if isinstance(found, dict) and isinstance(found.get("worst"), int | float):
            shares[cell.name] = found["worst"], f"{found.get('worst_kernel')} in {cell.name}"
        elif cell.active and "self_check" in cell.active:
            unchecked.append(cell.name)
    if shares:
        worst, where = max(shares.values())
        yield (
            f"self-check: every kernel was compared with a reference before the first step; "
            f"the largest error is {worst:.0%} of what its format allows ({where})"
        )
    if unchecked:
        yield f"self-check: switched off in {', '.join(unchecked)}"


def _attention(cells: Sequence[Result]) -> Iterator[str]:
    """What all cells share of their attention, and a warning where their masks differ."""
    lengths = {cell.name: cell.mean_attended_length for cell in cells if cell.mean_attended_length}
    kinds = {cell.attention for cell in cells if cell.attention}
    shown = {_length(length) for length in lengths.values()}
    shared = [*kinds] if len(kinds) == 1 else []
    if len(shown) == 1:
        shared.append(f"a token attends to {shown.pop()} tokens on average")
    if shared:
        yield f"attention: {'; '.join(shared)}"
    if not lengths:
        return
    least, most = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    if lengths[most] > SAME_MASK * lengths[least]:
        yield (
            f"WARNING: cells were trained on different masks: a token attends to "
            f"{_length(lengths[most])} tokens in {most} and to {_length(lengths[least])} in "
            f"{least}; do not compare their speed"
        )


def _row(cell: Result, setting: CellSetting) -> list[str]:
    status = cell.status or "unknown"
    speedup = _number(cell.speedup, "{:.2f}x")
    if cell.speedup is not None and cell.name == setting.baseline:
        speedup = "baseline"
    published = tokens_text(cell.published_tokens_per_second_per_gpu)
    if setting.published_speedup is not None and cell.name != setting.baseline:
        published += f" ({setting.published_speedup:.2f}x)"
    mfu = _number(cell.mfu, "{:.1f}%")
    return [
        cell.name,
        f"{status}, emulated" if cell.emulated and status != "refused" else status,
        _steps(cell, setting),
        tokens_text(cell.tokens_per_second_per_gpu),
        speedup,
        _tflops(cell.tflops_per_gpu),
        mfu,
        _number(cell.memory_gib, "{:.2f}"),
        _loss(cell.final_loss, setting.raw_final_loss),
        published,
        tokens_text(cell.predicted_tokens_per_second_per_gpu),
        cell.attention or UNKNOWN,
        _length(cell.mean_attended_length),
    ]


def _steps(cell: Result, setting: CellSetting) -> str:
    """`20` where all is done, else how far it came: `7/20`."""
    if cell.status in _DONE_STATES or setting.total_steps is None:
        return UNKNOWN if cell.steps is None else f"{cell.steps:,}"
    return f"{UNKNOWN if cell.steps is None else f'{cell.steps:,}'}/{setting.total_steps:,}"


def tokens_text(value: float | None) -> str:
    """Tokens/s, or a dash."""
    # A CPU's or a debug model's few tokens need their decimals.
    return _number(value, "{:,.0f}" if value is None or value >= 100 else "{:.3g}")


def _length(value: float | None) -> str:
    return _number(value, "{:,.0f}")


def _tflops(value: float | None) -> str:
    return _number(value, "{:,.1f}" if value is None or value >= 10 else "{:.2g}")


def _loss(value: float | None, raw: float | None) -> str:
    if value is None and raw is not None:
        return str(raw)
    return _number(value, "{:.4f}")


def _number(value: float | None, template: str) -> str:
    return UNKNOWN if value is None else template.format(value)


def summary_table(results: RunResults) -> Table:
    """A row for each cell; a column that says nothing of any of them (MFU on a CPU) is left out."""
    rows = [_row(cell, results.settings[cell.name]) for cell in results.cells]
    known = [{row[position] for row in rows} - {UNKNOWN} for position in range(len(_HEADER))]
    kept = [
        position
        for position, title in enumerate(_HEADER)
        if position < _NUM_TEXT_COLUMNS
        or len(known[position]) > (1 if title in _WHERE_CELLS_DIFFER else 0)
    ]
    return Table(
        head=tuple(_HEADER[position] for position in kept),
        rows=tuple(tuple(row[position] for position in kept) for row in rows),
        align="".join("l" if position < _NUM_TEXT_COLUMNS else "r" for position in kept),
    )


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
