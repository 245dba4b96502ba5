"""The report of a run: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from cookbook.base.tables import markdown_table
from cookbook.results.collect import CellSetting, Result, RunResults

_UNKNOWN = "-"
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
    "attention",
    "attended tokens",
)
# Where all cells agree, the facts above the table say it.
_WHERE_CELLS_DIFFER = ("attention", "attended tokens")
_NUM_TEXT_COLUMNS = 2
# Batches of one corpus differ by less; beyond this factor, masks are not the same.
_SAME_MASK = 1.25
_DONE_STATES = {"finished", "refused"}


def render_markdown(results: RunResults) -> str:
    """The report as Markdown whose table also reads well in a terminal."""
    rows = [_row(cell, results.settings[cell.name]) for cell in results.cells]
    parts = [f"# {results.run.run}", "\n".join(_facts(results)), _table(rows)]
    notes = [
        f"- {cell.name} ({cell.status or 'status unknown'}): {_one_line(cell.reason)}"
        for cell in results.cells
        if cell.reason
    ]
    notes += [
        f"- {cell.name}: {line}"
        for cell in results.cells
        for resumption in cell.resumptions
        for line in resumption.lines
    ]
    notes += [f"- {cell.name}: {line}" for cell in results.cells for line in cell.history.lines]
    if notes:
        parts.append("\n".join(notes))
    parts.append(
        "tokens/s/GPU, TFLOPs and MFU: median of the logged steps after warm-up (their first\n"
        "quarter, 1 to 10 steps). Memory: peak over all ranks and steps. A dash, or no column:\n"
        "not known."
    )
    return "\n\n".join(parts) + "\n"


def render_json(results: RunResults) -> str:
    """The report as one JSON object; unknown, NaN and infinite values are null."""
    report = {
        "run": results.run.run,
        "sweep": results.run.sweep,
        "cells": [asdict(cell) for cell in results.cells],
        "baseline": results.run.baseline,
    }
    return json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"


def _facts(results: RunResults) -> list[str]:
    """The list above the table: what ran where, and what a reader must not take for more."""
    started = f", started {results.run.created}" if results.run.created else ""
    by = f" by {results.run.user}" if results.run.user else ""
    lines = [
        f"- sweep: {results.run.sweep or _UNKNOWN}{started}{by}",
        f"- cluster: {results.run.cluster or _UNKNOWN}, stack: {results.run.stack or _UNKNOWN}, "
        f"commit: {results.run.commit or _UNKNOWN}",
    ]
    if results.run.baseline:
        lines.append(f"- baseline: {results.run.baseline}")
    stand_ins = {
        (cell.recipe or _UNKNOWN, setting.stand_in_for): None
        for cell in results.cells
        if (setting := results.settings[cell.name]).stand_in_for
    }
    for recipe, asked in stand_ins:
        lines.append(
            f"- stand-in: {recipe} ran instead of {asked}, which does not fit here; "
            f"the published numbers are {asked}'s"
        )
    devices = {results.settings[cell.name].device for cell in results.cells}
    if "cpu" in devices:
        lines.append(
            "- device: cpu; throughput is a CPU figure, says nothing about GPUs and has no MFU"
        )
    if any(cell.emulated for cell in results.cells):
        lines.append(
            "- emulated: software computed what a kernel would; loss counts, speed doesn't"
        )
    return [*lines, *_attention(results.cells)]


def _attention(cells: Sequence[Result]) -> Iterator[str]:
    """What all cells share of their attention, and a warning where their masks differ."""
    lengths = {cell.name: cell.mean_attended_length for cell in cells if cell.mean_attended_length}
    kinds = {cell.attention for cell in cells if cell.attention}
    shown = {_length(length) for length in lengths.values()}
    shared = [*kinds] if len(kinds) == 1 else []
    if len(shown) == 1:
        shared.append(f"a token attends to {shown.pop()} tokens on average")
    if shared:
        yield f"- attention: {'; '.join(shared)}"
    if not lengths:
        return
    least, most = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    if lengths[most] > _SAME_MASK * lengths[least]:
        yield (
            f"- WARNING: cells were trained on different masks: a token attends to "
            f"{_length(lengths[most])} tokens in {most} and to {_length(lengths[least])} in "
            f"{least}; do not compare their speed"
        )


def _row(cell: Result, setting: CellSetting) -> list[str]:
    status = cell.status or "unknown"
    speedup = _number(cell.speedup, "{:.2f}x")
    if cell.speedup is not None and cell.name == setting.baseline:
        speedup = "baseline"
    published = _tokens(cell.published_tokens_per_second_per_gpu)
    if setting.published_speedup is not None and cell.name != setting.baseline:
        published += f" ({setting.published_speedup:.2f}x)"
    mfu = _number(cell.mfu, "{:.1f}%")
    return [
        cell.name,
        f"{status}, emulated" if cell.emulated and status != "refused" else status,
        _steps(cell, setting),
        _tokens(cell.tokens_per_second_per_gpu),
        speedup,
        _tflops(cell.tflops_per_gpu),
        mfu,
        _number(cell.memory_gib, "{:.2f}"),
        _loss(cell.final_loss, setting.raw_final_loss),
        published,
        cell.attention or _UNKNOWN,
        _length(cell.mean_attended_length),
    ]


def _steps(cell: Result, setting: CellSetting) -> str:
    """`20` where all is done, else how far it came: `7/20`."""
    if cell.status in _DONE_STATES or setting.total_steps is None:
        return _UNKNOWN if cell.steps is None else f"{cell.steps:,}"
    return f"{_UNKNOWN if cell.steps is None else f'{cell.steps:,}'}/{setting.total_steps:,}"


def _tokens(value: float | None) -> str:
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
    return _UNKNOWN if value is None else template.format(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    # A column that says nothing of any cell (MFU on a CPU) is left out; a terminal is narrow.
    known = [{row[position] for row in rows} - {_UNKNOWN} for position in range(len(_HEADER))]
    kept = [
        position
        for position, title in enumerate(_HEADER)
        if position < _NUM_TEXT_COLUMNS
        or len(known[position]) > (1 if title in _WHERE_CELLS_DIFFER else 0)
    ]
    align = "".join("l" if position < _NUM_TEXT_COLUMNS else "r" for position in kept)
    head = [_HEADER[position] for position in kept]
    return markdown_table(head, [[row[position] for position in kept] for row in rows], align)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
