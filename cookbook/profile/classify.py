"""What ran on a rank's device, each kernel with its category, and which operation launched it.

On a GPU these are kernels, copies and fills. A CPU has none: there the operations of all threads
are what ran, each for the time in which it was in no other operation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cookbook.profile.host import NOTHING, Host
from cookbook.profile.kernels import NO_WORK, Source, category_of
from cookbook.profile.trace import Collective, Trace


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, copy or fill that ran; times in microseconds.

    Attributes:
        launched: when the host launched it, None where the trace does not say.
        thread: of the host, that launched it.
        operation: the host's event that it belongs to, or NOTHING.
    """

    name: str
    category: str
    start: float
    end: float
    launched: float | None
    thread: int | None
    operation: int
    collective: Collective | None = None


_category = functools.cache(category_of)


def kernels_of(trace: Trace, host: Host) -> list[Kernel]:
    """Everything that ran, by its start."""
    found = _on_gpu(trace, host) if trace.on_gpu else _on_cpu(trace, host)
    return sorted(found, key=lambda kernel: (kernel.start, kernel.end))


def _on_gpu(trace: Trace, host: Host) -> Iterator[Kernel]:
    device = trace.device
    by_thread: dict[int, list[tuple[float, int]]] = {}
    launchless = []
    for event, correlation in enumerate(device.correlation):
        launch = trace.launches.get(correlation)
        if launch:
            by_thread.setdefault(launch[1], []).append((launch[0], event))
        else:
            launchless.append(event)
    for event in launchless:
        yield _kernel(trace, host, event, None, None, NOTHING)
    for thread, launches in by_thread.items():
        launches.sort()
        around = host.innermost(thread, [time for time, _ in launches])
        for (time, event), launcher in zip(launches, around, strict=True):
            yield _kernel(trace, host, event, time, thread, launcher)


def _kernel(
    trace: Trace,
    host: Host,
    event: int,
    launched: float | None,
    thread: int | None,
    launcher: int,
) -> Kernel:
    device = trace.device
    name = trace.names[device.name[event]]
    index = device.collective[event]
    collective = trace.collectives[index] if index >= 0 else None
    operation = host.operation(launcher)
    around = host.enclosing(operation)
    source = Source(
        kernel=name,
        operation=around[0] if around else "",
        inside=around,
        collective=collective.name if collective else "",
        group=collective.description if collective else "",
    )
    start, end = device.start[event], device.end[event]
    return Kernel(name, _category(source), start, end, launched, thread, operation, collective)


def _on_cpu(trace: Trace, host: Host) -> Iterator[Kernel]:
    events = trace.host
    for thread in host.threads:
        for start, end, event in host.own_time(thread):
            if not events.is_work[event]:
                continue
            around = host.enclosing(event)
            category = _category(Source(kernel=around[0], operation=around[0], inside=around))
            if category != NO_WORK:
                yield Kernel(around[0], category, start, end, start, thread, event)


def longest(kernels: Iterable[Kernel], count: int) -> list[tuple[str, str, float]]:
    """The `count` names that took most time: name, category, microseconds."""
    times: dict[tuple[str, str], float] = {}
    for kernel in kernels:
        key = kernel.name, kernel.category
        times[key] = times.get(key, 0.0) + kernel.end - kernel.start
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return [(name, category, time) for (name, category), time in ordered[:count]]
