"""The most memory that any rank's metrics lines show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cookbook.observe.lines import read_number
from cookbook.observe.text import blocks

# Starts with literal text, which makes the search five times faster than a word boundary would;
# besides, a colour's `m` stands right before the key.
_PEAK_MEMORY = re.compile(rb"memory:\s*(?:\x1b\[[0-9;]*m)?([0-9][0-9.,]*)GiB")
_MOST_KNOWN = 10_000


def read_peak_memory(paths: Iterable[Path]) -> float | None:
    """The most GiB that any metrics line of these logs shows, over all ranks and steps."""
    known: dict[bytes, float] = {}
    for path in paths:
        for block in blocks(path):
            note_memory(block, known)
    # TorchTitan prints -0.00GiB where the device has no memory statistics.
    return max(known.values(), default=0.0) or None


def note_memory(block: bytes, known: dict[bytes, float]) -> None:
    """Add the GiB that the metrics lines of a block show to those that are `known`, by their text.

    Peaks repeat from step to step, so few of them are left to convert.
    """
    for text in set(_PEAK_MEMORY.findall(block)).difference(known):
        known[text] = read_number(text.decode()) or 0.0
    if len(known) > _MOST_KNOWN:
        most = max(known.items(), key=lambda item: item[1])
        known.clear()
        known.update([most])
