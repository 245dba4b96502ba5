"""A comparison as Markdown for people, and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict

from cookbook.base.jsontext import json_text
from cookbook.base.tables import markdown_table
from cookbook.results.compare import Compared, Comparison

_UNKNOWN = "-"
_HEAD = (
    "cell",
    "run",
    "tokens/s/GPU",
    "over reference",
    "95% interval",
    "speed",
    "loss",
    "loss, last tenth",
    "GPU hours",
    "per 10^9 tokens",
)
_ALIGN = "llrrrlllrr"


def comparison_markdown(comparison: Comparison) -> str:
    """A row for each cell of each run; then what differs, and what is slower than allowed."""
    rows = [_row(cell) for cell in comparison.cells]
    # A column that says nothing of any cell is left out; a terminal is narrow.
    kept = [
        position
        for position in range(len(_HEAD))
        if position < 4 or any(row[position] != _UNKNOWN for row in rows)
    ]
    table = markdown_table(
        [_HEAD[position] for position in kept],
        [[row[position] for position in kept] for row in rows],
        "".join(_ALIGN[position] for position in kept),
    )
    notes = [
        f"{cell.cell} in {cell.run}: {cell.reason}" for cell in comparison.cells if cell.reason
    ]
    notes += [f"differs: {difference}" for difference in comparison.differences]
    notes += [f"slower than allowed: {_described(cell)}" for cell in comparison.slower]
    head = f"reference: {comparison.reference}; a cell may be {comparison.tolerance:.3g}% slower"
    parts = [head, table, "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_json(comparison: Comparison) -> str:
    """One object: what `Comparison` holds, and whether all cells are fast enough."""
    return json_text({**asdict(comparison), "is_fast_enough": not comparison.slower})


def _row(cell: Compared) -> list[str]:
    speed = cell.speed
    interval = _UNKNOWN
    if speed is not None and speed.low is not None and speed.high is not None:
        interval = f"{speed.low:.3f} to {speed.high:.3f}"
    return [
        cell.cell,
        cell.run,
        _number(cell.tokens_per_second_per_gpu, "{:,.4g}" if _is_small(cell) else "{:,.0f}"),
        _number(speed.ratio if speed else None, "{:.3f}x"),
        interval,
        (speed.verdict if speed else None) or _UNKNOWN,
        cell.loss.verdict if cell.loss else _UNKNOWN,
        cell.loss_last_tenth.verdict if cell.loss_last_tenth else _UNKNOWN,
        _number(cell.gpu_hours, "{:,.1f}"),
        _number(cell.cost_per_billion_tokens, "{:,.0f}"),
    ]


def _is_small(cell: Compared) -> bool:
    return (cell.tokens_per_second_per_gpu or 0.0) < 100


def _described(cell: Compared) -> str:
    if cell.speed is None:
        return f"{cell.cell} in {cell.run} has no speed to compare"
    return f"{cell.cell} in {cell.run}, by {100 * (1 - cell.speed.ratio):.1f}%"


def _number(value: float | None, template: str) -> str:
    return _UNKNOWN if value is None else template.format(value)
