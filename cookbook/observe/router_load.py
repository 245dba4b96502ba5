"""The router's load over all attempts of a cell, as the training process wrote it.

A line of `router_load.jsonl` is one logged step: of each MoE layer the tokens of its busiest expert
over the mean of its experts, and how many of these are starved, since the logged step before. Some
lines hold each expert's tokens as well (cookbook/titan/tt_0_2_2/router_load.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.run.folder import CellFolder

_MAX_LINE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LoadStep:
    """The load from `first_step` to `step`, layer by layer.

    Attributes:
        busiest_over_mean: 1 where all experts get the same; MaxVio is this minus 1.
        starved_experts: those with less than a tenth of the mean.
        counts_from, counts: each expert's tokens since that step; None where they were not written.
    """

    first_step: int
    step: int
    is_forced: bool
    layers: tuple[int, ...]
    busiest_over_mean: tuple[float, ...]
    starved_experts: tuple[int, ...]
    counts_from: int | None = None
    counts: tuple[tuple[int, ...], ...] | None = None


def collect_router_load(cell: CellFolder) -> list[LoadStep]:
    """The logged steps over all attempts, rising; empty where none logged its load."""
    steps: list[LoadStep] = []
    for attempt in cell.attempts():
        for found in _read(attempt.router_load):
            # A resumed attempt makes steps again: what counts them twice goes.
            while steps and steps[-1].step >= found.first_step:
                steps.pop()
            # Of another model; only the last one's steps can be shown.
            if steps and steps[-1].layers != found.layers:
                steps.clear()
            steps.append(found)
    return steps


def _read(path: Path) -> Iterator[LoadStep]:
    """The lines of a file that can be read; the last may still be written."""
    try:
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                step = _parse(line) if line.endswith(b"\n") else None
                if step is not None:
                    yield step
    except OSError:
        return


def _parse(line: bytes) -> LoadStep | None:
    try:
        content: dict[str, Any] = json.loads(line)
        layers = tuple(map(int, content["layers"]))
        busiest = tuple(map(float, content["busiest_over_mean"]))
        starved = tuple(map(int, content["starved_experts"]))
        counts = content.get("counts")
        found = LoadStep(
            int(content["first_step"]),
            int(content["step"]),
            content["forced"] is True,
            layers,
            busiest,
            starved,
            None if counts is None else int(content["counts_from"]),
            None if counts is None else tuple(tuple(map(int, row)) for row in counts),
        )
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    rows = [busiest, starved, *([] if found.counts is None else [found.counts])]
    is_whole = bool(layers) and all(len(row) == len(layers) for row in rows)
    return found if is_whole and all(map(math.isfinite, busiest)) else None
