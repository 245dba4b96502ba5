"""What the host's threads were in at a moment: their operations are nested, as calls are."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence

from cookbook.profile.trace import Trace

NOTHING = -1
# CUDA's runtime and driver: cudaMemcpyAsync, cuLaunchKernel.
_CALL = re.compile(r"cu(da)?[A-Z]")


class Host:
    """The host's events by thread, and what encloses each."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        host = trace.host
        self.threads: dict[int, list[int]] = {}
        for event, thread in enumerate(host.thread):
            self.threads.setdefault(thread, []).append(event)
        self.parent = array("i", [NOTHING]) * len(host)
        for events in self.threads.values():
            # Outer events first where two start together.
            events.sort(key=lambda event: (host.start[event], -host.end[event]))
            stack: list[int] = []
            for event in events:
                while stack and host.end[stack[-1]] <= host.start[event]:
                    stack.pop()
                self.parent[event] = stack[-1] if stack else NOTHING
                stack.append(event)

    def innermost(self, thread: int, times: Sequence[float]) -> Iterator[int]:
        """The innermost event of `thread` at each of `times`, which ascend; NOTHING for none."""
        host, events = self.trace.host, self.threads.get(thread, [])
        stack: list[int] = []
        following = 0
        for time in times:
            while following < len(events) and host.start[events[following]] <= time:
                event = events[following]
                while stack and host.end[stack[-1]] <= host.start[event]:
                    stack.pop()
                stack.append(event)
                following += 1
            while stack and host.end[stack[-1]] < time:
                stack.pop()
            yield stack[-1] if stack else NOTHING

    def enclosing(self, event: int) -> tuple[str, ...]:
        """The names of what encloses `event`, from the inside out, `event` itself first."""
        names = []
        while event != NOTHING:
            names.append(self.trace.names[self.trace.host.name[event]])
            event = self.parent[event]
        return tuple(names)

    def operation(self, event: int) -> int:
        """The operation that `event` is or lies in, not a call of CUDA; NOTHING for none."""
        names, host = self.trace.names, self.trace.host
        while event != NOTHING and _CALL.match(names[host.name[event]]):
            event = self.parent[event]
        return event

    def own_time(self, thread: int) -> Iterator[tuple[float, float, int]]:
        """When `thread` was in an operation itself, not in one within it: start, end, event."""
        host = self.trace.host
        stack: list[int] = []
        now = 0.0

        def until(end: float) -> Iterator[tuple[float, float, int]]:
            """What the thread did from `now` to `end`."""
            nonlocal now
            while stack and host.end[stack[-1]] <= end:
                last = stack.pop()
                if host.end[last] > now:
                    yield now, host.end[last], last
                    now = host.end[last]
            if stack and end > now:
                yield now, end, stack[-1]

        for event in self.threads.get(thread, []):
            yield from until(host.start[event])
            now = host.start[event]
            stack.append(event)
        yield from until(float("inf"))
