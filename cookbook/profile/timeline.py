"""Divides a stretch of wall time among what ran in it: each moment is counted once.

A moment in which something computes belongs to that; one in which only communication runs is
exposed communication; in the rest the device is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cookbook.profile.kernels import CATEGORIES

_PRIORITY = {category.name: number for number, category in enumerate(CATEGORIES)}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran on the device: from, to, and its category. Microseconds."""

    start: float
    end: float
    category: str


@dataclass
class Division:
    """How a stretch of wall time was spent, in microseconds.

    Attributes:
        counted: by category, the moments that are counted for it; with `idle`, the whole stretch.
        busy: by category, the time in which it ran at all, also beside something else.
        idle: the moments in which nothing ran, from and to.
    """

    counted: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    idle: list[tuple[float, float]] = field(default_factory=list)


def divide(spans: Sequence[Span], start: float, end: float) -> Division:
    """Divide the time from `start` to `end` among `spans`, which may lie partly outside."""
    edges: list[tuple[float, int, int]] = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if last > first:
            number = _PRIORITY[span.category]
            edges += [(first, 1, number), (last, -1, number)]
    edges.sort()
    counted, busy = [0.0] * len(CATEGORIES), [0.0] * len(CATEGORIES)
    running = [0] * len(CATEGORIES)
    division = Division()
    now = start
    for time, change, number in [*edges, (end, 0, 0)]:
        if time > now:
            active = [index for index, count in enumerate(running) if count]
            for index in active:
                busy[index] += time - now
            if active:
                counted[active[0]] += time - now
            elif division.idle and division.idle[-1][1] == now:
                division.idle[-1] = (division.idle[-1][0], time)
            else:
                division.idle.append((now, time))
            now = time
        running[number] += change
    for index, category in enumerate(CATEGORIES):
        if busy[index]:
            division.busy[category.name] = busy[index]
            division.counted[category.name] = counted[index]
    return division
