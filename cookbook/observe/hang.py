"""Which rank of an attempt hung: the silent one, and not one that reports a time-out."""

from __future__ import annotations

import re
from pathlib import Path

from cookbook.observe.text import blocks

TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting [0-9]+ ?ms for"
)
# What every rank prints that waited: its own time-out, or the end of a rank that it waited for.
_SPOKE = (b"Watchdog caught", b"Traceback (most recent call last)")
_RANK = re.compile(rb"\[rank([0-9]{1,7})\]|\bRank ([0-9]{1,7})\]")
_MOST_SILENT = 8


def silent_ranks(attempt: Path) -> list[int]:
    """The ranks that said nothing while the others timed out; empty where that is not clear.

    Args:
        attempt: an attempt's folder, with torchrun's logs of all ranks of all nodes below `ranks/`.
    """
    folders = [
        rank
        for node in (attempt / "ranks").glob("*")
        # torchrun numbers its restarts.
        for start in sorted(node.glob("attempt_*"), key=lambda path: path.stat().st_mtime)[-1:]
        for rank in start.glob("[0-9]*")
    ]
    spoke = set()
    for folder in folders:
        is_silent, rank = _words_of(folder)
        if is_silent:
            continue
        if rank is None:
            return []
        spoke.add(rank)
    silent = sorted(set(range(len(folders))) - spoke)
    # More are rather ranks that were ended before they came to speak.
    return silent if len(silent) <= min(_MOST_SILENT, len(spoke)) else []


def _words_of(folder: Path) -> tuple[bool, int | None]:
    """Whether the rank with this folder reported no error, and its number where it did."""
    for log in sorted(folder.glob("std*.log")):
        for block in blocks(log, with_last=True):
            places = [place for word in _SPOKE if (place := block.find(word)) >= 0]
            if not places:
                continue
            # torch puts the number before each line of a traceback, and NCCL into its own.
            line = block.rfind(b"\n", 0, min(places)) + 1
            found = _RANK.search(block, line)
            return False, int(found[1] or found[2]) if found else None
    return True, None
