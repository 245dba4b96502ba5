"""The kernels on a rank's device, each with its category and the operation that launched it.

On a GPU these are kernels, copies and fills. A CPU has none: there the operations of all threads
count, each for the time in which no operation ran inside it.
"""

from __future__ import annotations

import re

import numpy as np

from cookbook.profile.kernels import CATEGORIES, NO_WORK, Source, category_of
from cookbook.profile.trace import DEVICE, NOTHING, Column, Trace

# CUDA's runtime and driver: cudaMemcpyAsync, cuLaunchKernel.
_CALL = re.compile(r"cu(da)?[A-Z]")
_NUMBERS = {category.name: number for number, category in enumerate(CATEGORIES)} | {NO_WORK: -1}


class Host:
    """The nesting of the host's events.

    Attributes:
        parent: of each event the one that encloses it, or NOTHING.
        chain: a number for the names of an event and all that enclose it.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        events = trace.host
        self.parent = np.full(len(events), NOTHING)
        self.chain = np.full(len(events), NOTHING)
        chains: dict[tuple[int, int], int] = {}
        stack: list[tuple[int, float, float]] = []
        columns = zip(
            *(events[name].tolist() for name in ("name", "start", "end", "thread")), strict=True
        )
        for event, (name, start, end, thread) in enumerate(columns):
            while stack and (stack[-1][1] <= start or stack[-1][2] != thread):
                stack.pop()
            if stack:
                self.parent[event] = stack[-1][0]
            above = int(self.chain[stack[-1][0]]) if stack else NOTHING
            self.chain[event] = chains.setdefault((above, name), len(chains))
            stack.append((event, end, thread))
        self._is_call = np.array([bool(_CALL.match(name)) for name in trace.names], dtype=bool)

    def innermost(self, thread: float, times: Column) -> Column:
        """Return the innermost event of `thread` at each of `times`, NOTHING for none."""
        events = self.trace.host
        first, last = np.searchsorted(events.thread, [thread, np.nextafter(thread, np.inf)])
        if first == last:
            return np.full(len(times), NOTHING)
        at = first + np.searchsorted(events.start[first:last], times, side="right") - 1
        at[at < first] = NOTHING
        while (over := (at != NOTHING) & (events.end[at] < times)).any():
            at[over] = self.parent[at[over]]
        return at

    def operation(self, events: Column) -> Column:
        """Return the operations that `events` are or lie in, CUDA calls aside; NOTHING for none."""
        found = np.array(events)
        if len(self.parent):
            names = self.trace.host.name
            while (calls := (found != NOTHING) & self._is_call[names[found]]).any():
                found[calls] = self.parent[found[calls]]
        return found

    def enclosing(self, event: int) -> tuple[str, ...]:
        """Return the names of `event` and of all that encloses it, from the inside out."""
        names = []
        while event != NOTHING:
            names.append(self.trace.names[self.trace.host.name[event]])
            event = int(self.parent[event])
        return tuple(names)


# All work, by start. `operation`: the host's event that it belongs to, or NOTHING; `category`:
# index into CATEGORIES.
KERNEL = np.dtype([*DEVICE.descr, ("operation", int), ("category", int)])


def kernels_of(trace: Trace, host: Host) -> Column:
    """Return the work on the device, without operations that only wait or call others."""
    device = trace.device
    if trace.on_gpu:
        launcher = np.full(len(device), NOTHING)
        known = ~np.isnan(device.launched)
        for thread in np.unique(device.thread[known]):
            own = known & (device.thread == thread)
            launcher[own] = host.innermost(thread, device.launched[own])
        columns = [device[name] for name in DEVICE.names]
        operation = host.operation(launcher)
    else:
        parts = [_own_time(host, thread) for thread in np.unique(trace.host.thread)]
        start, end, operation = (np.concatenate(column) for column in zip(*parts, strict=True))
        name, thread = trace.host.name[operation], trace.host.thread[operation]
        columns = [name, start, end, start, thread, np.full(len(start), NOTHING)]
    kernels = np.rec.fromarrays([*columns, operation, np.zeros(len(operation))], dtype=KERNEL)
    kernels.category = _categories(trace, host, kernels)
    kernels = kernels[kernels.category >= 0]
    return kernels[np.lexsort((kernels.end, kernels.start))]


def _own_time(host: Host, thread: float) -> tuple[Column, Column, Column]:
    """Return when `thread` was in an operation itself, not in one inside it: start, end, event."""
    events = host.trace.host
    own = events.thread == thread
    edges = np.unique([events.start[own], events.end[own]])
    inside = host.innermost(thread, (edges[:-1] + edges[1:]) / 2)
    work = (inside != NOTHING) & events.is_work[inside]
    return edges[:-1][work], edges[1:][work], inside[work]


def _categories(trace: Trace, host: Host, kernels: Column) -> Column:
    operation = kernels.operation
    chain = np.full(len(operation), NOTHING)
    chain[operation != NOTHING] = host.chain[operation[operation != NOTHING]]
    # Kernels that are alike in all that rules look at are classified once.
    alike = np.stack([kernels.name, chain, kernels.collective])
    _, first, inverse = np.unique(alike, axis=1, return_index=True, return_inverse=True)
    found = []
    for event in first:
        inside = host.enclosing(operation[event])
        number = kernels.collective[event]
        record = trace.collectives[number] if number != NOTHING else None
        source = Source(
            kernel=trace.names[kernels.name[event]],
            operation=inside[0] if inside else "",
            inside=inside,
            collective=record.name if record else "",
            group=record.group if record else "",
        )
        found.append(_NUMBERS[category_of(source)])
    return np.array(found, dtype=int)[inverse.reshape(-1)]
