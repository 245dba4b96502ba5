"""How long an attempt took, by the times that its log's lines carry."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

_TIME = re.compile(rb"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ")
# The first line comes after torchrun's own words; the last may have a long traceback behind it.
_ENDS_BYTES = 1 << 20


def logged_seconds(path: Path) -> float | None:
    """Seconds from the first to the last line of TorchTitan; None where there are not two."""
    try:
        with path.open("rb") as file:
            head = file.read(_ENDS_BYTES)
            end = file.seek(0, 2)
            file.seek(max(0, end - _ENDS_BYTES))
            tail = file.read(_ENDS_BYTES)
    except OSError:
        return None
    first, *_ = _TIME.findall(head) or [None]
    *_, last = _TIME.findall(tail) or [None]
    if first is None or last is None:
        return None
    seconds = (read_time(last.decode()) - read_time(first.decode())).total_seconds()
    # Ranks' lines cross by milliseconds, and a clock may have been set back.
    return seconds if seconds > 0 else None


def read_time(time: str) -> datetime:
    """The time as TorchTitan's lines carry it, on the clock of the node that wrote it."""
    return datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f")
