"""The events of `deep_ep.utils`, which plain collectives do not need."""

from __future__ import annotations

from typing import Any


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass
