"""Why nothing ran on the device: the host had launched nothing, or what it had launched waited.

One trace shows which of the two it was, since it has the moment of every launch. What the host was
in at that moment is the nearest thing to a cause that it holds.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cookbook.profile.classify import Kernel
from cookbook.profile.host import NOTHING, Host

PYTHON = "Python, in no operation"
_BLOCKED = re.compile(r"Synchronize|Memcpy")
# Modules, numbers of regions and the hashes of graphs would make each cause a different one.
_PARTICULAR = re.compile(r"\s+\(.*\)|\s+for \S+|(?<=[\w)])#.*|:?\s*\d+/\d+|\bf[0-9a-z]{20,}|#+")


@dataclass
class Idle:
    """Idle time in microseconds.

    Attributes:
        host: nothing was queued: the device waited for the host to launch the next kernel.
        queued: the next kernel was launched already: its launch, or an event that it waited for.
        causes: what the host was in while nothing was queued, with the time.
    """

    host: float = 0.0
    queued: float = 0.0
    causes: dict[str, float] = field(default_factory=dict)


def explain_idle(
    gaps: Sequence[tuple[float, float]], kernels: Sequence[Kernel], host: Host
) -> Idle:
    """Why the device was idle in `gaps`.

    Args:
        kernels: of the same trace, by their start, also those after the last gap.
    """
    idle = Idle()
    starts = [kernel.start for kernel in kernels]
    on_gpu = host.trace.on_gpu
    busiest = max(host.threads, key=lambda thread: len(host.threads[thread]), default=0)
    asked: dict[int, list[tuple[float, float]]] = {}
    for start, end in gaps:
        index = bisect.bisect_left(starts, end)
        following = kernels[index] if index < len(kernels) else None
        launched = end
        if on_gpu and following is not None and following.launched is not None:
            launched = min(max(following.launched, start), end)
        idle.host += launched - start
        idle.queued += end - launched
        if launched > start:
            # On a CPU any thread may come next; the one that does most is the training's.
            known = following is not None and following.thread is not None and on_gpu
            thread = following.thread if known and following else busiest
            asked.setdefault(thread if thread is not None else busiest, []).append(
                (start, launched)
            )
    for thread, waits in asked.items():
        waits.sort()
        before = list(host.innermost(thread, [start for start, _ in waits]))
        middle = list(host.innermost(thread, [(start + end) / 2 for start, end in waits]))
        for (start, end), first, during in zip(waits, before, middle, strict=True):
            cause = _cause(host, first, during)
            idle.causes[cause] = idle.causes.get(cause, 0.0) + end - start
    return idle


def _cause(host: Host, first: int, during: int) -> str:
    """In words; `first` is the host's event when the device ran dry, `during` one in the gap."""
    trace = host.trace
    if first != NOTHING and _BLOCKED.search(trace.names[trace.host.name[first]]):
        # The host had waited for the device itself, and so could launch nothing ahead.
        return f"had waited for the GPU in {_name(host, first)}"
    return _name(host, during)


def _name(host: Host, event: int) -> str:
    operation = host.operation(event)
    if operation == NOTHING:
        return PYTHON if event == NOTHING else host.enclosing(event)[0]
    name = host.enclosing(operation)[0]
    return _PARTICULAR.sub("", name).strip() or name
