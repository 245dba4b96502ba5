"""Wait for a condition."""

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], seconds: float = 60, log: Callable[[], object] = str
) -> None:
    """Wait until `condition` holds, at most `seconds`; `log` says what was seen instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {log()}"
        time.sleep(0.1)
