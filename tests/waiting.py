"""Wait for a condition, and the limit of all that could hang."""

import time
from collections.abc import Callable

# No test is about speed: a limit ends what hangs, however slow the machine.
HANG_S = 400.0


def until(condition: Callable[[], object], log: Callable[[], object] = str) -> None:
    """Wait until `condition` holds; `log` says what was seen instead."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_S:.0f} s: {log()}"
        time.sleep(0.1)
