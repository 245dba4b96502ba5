"""The events of `deep_ep.utils`: what was sent is there when somebody has waited for its event.

Until then there is `nan` in its place, so that a test sees who reads it too early.
"""

from collections.abc import Callable
from typing import Any


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.arrivals: list[Callable[[], object]] = []

    def current_stream_wait(self) -> None:
        while self.arrivals:
            self.arrivals.pop()()
