"""All that a report wants of a log in one pass: a log may have a gigabyte."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cookbook.observe.lines import StepMetrics, active_in, parse_bytes
from cookbook.observe.memory import note_memory
from cookbook.observe.text import blocks, lines_with

_TIMED = re.compile(rb"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) - ")
# A colour ends with an `m`, right before the word.
_STEP = re.compile(rb"(?<!validate )(?:\b|(?<=[0-9]m))step:(?:\x1b\[[0-9;]*m|\s)*([0-9]{1,12})\b")
_START = b"Training starts at step "


@dataclass(slots=True)
class LogScan:
    """What a log says of one rank, and of all.

    Attributes:
        steps: the rank's metrics lines, in order.
        times: the steps that it printed, and when, in seconds; step 0 is the training's start.
        active: what the training process said was active, newest line.
        memory_gib: the most that a metrics line of any rank shows; 0 where none does.
    """

    steps: list[StepMetrics] = field(default_factory=list)
    times: list[tuple[int, float]] = field(default_factory=list)
    active: dict[str, Any] | None = None
    memory_gib: float = 0.0


def scan_log(path: Path, rank: int) -> LogScan:
    """Read a log once; one that is not there says nothing."""
    scan = LogScan()
    if not path.is_file():
        return scan
    mark = b"[rank%d]:" % rank
    memory: dict[bytes, float] = {}
    for block in blocks(path):
        for line in lines_with(block, mark):
            metrics, found = parse_bytes(line, rank), step_time(line)
            if metrics is not None:
                scan.steps.append(metrics)
            if found is not None:
                scan.times.append(found)
        scan.active = active_in(block) or scan.active
        note_memory(block, memory)
    scan.memory_gib = max(memory.values(), default=0.0)
    return scan


def step_time(line: bytes) -> tuple[int, float] | None:
    """The step that a line prints, 0 for the training's start, and when, in seconds."""
    if b"loss:" not in line and _START not in line:
        return None
    timed, found = _TIMED.search(line), _STEP.search(line)
    if timed is None or (found is None and _START not in line):
        return None
    try:
        # The zone does not matter: all lines of an attempt have the same.
        whole = datetime.fromisoformat(timed[1].decode()).timestamp()
    except (ValueError, OverflowError):
        return None
    return int(found[1]) if found else 0, whole + int(timed[2]) / 1000
