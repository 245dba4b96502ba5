"""Read one rank's PyTorch profiler trace into NumPy columns, and find the device's work.

Times are microseconds on the trace's own clock. A GPU's work is kernels, copies and fills. A CPU's
work is the operations of all threads, each without the time of the operations nested in it.
"""

import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path
from cookbook.profile.kernels import CATEGORIES, NO_WORK, category_of

# A one-dimensional array of numbers, or of records of dtype HOST, DEVICE or KERNEL.
Column: TypeAlias = np.ndarray

NOTHING = -1
# CUDA runtime and driver calls in which the host may wait for the GPU, and calls that launch work.
_BLOCKING = re.compile(r"Synchronize|cudaMemcpy$|cudaMemcpyAsync|Malloc|cudaFree|HostAlloc")
_LAUNCH = re.compile(r"Launch|Memcpy|Memset")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
# Bytes to read for the header: Kineto writes rank, groups and device before the first event.
_HEADER_SIZE = 1 << 22

# Index of the left matrix among the inputs of each GEMM operation.
_MATRICES = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm"), 0),
    "aten::_scaled_grouped_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
_BITS = {"BFloat16": 16, "Half": 16, "float": 32, "Float": 32, "double": 64}


class Step(NamedTuple):
    """A training step on the host's timeline, in microseconds."""

    number: int
    start: float
    end: float


# Operations, annotations and blocking calls, sorted by thread and start, outer before inner. `name`
# is an index into the trace's names; annotations are not work (`is_work`), they only enclose it.
# `flops` is 0 except for GEMMs with known shapes; `bits` is the size of a GEMM's input elements.
HOST = np.dtype(
    [
        *[("name", int), ("start", float), ("end", float), ("thread", float)],
        *[("is_work", bool), ("flops", float), ("bits", int)],
    ]
)
# Kernels, copies and fills. `launched` is the time of the host's launch, NaN if unknown, and
# `thread` the launching thread. `collective` is an index into the trace's collectives, or NOTHING.
DEVICE = np.dtype(
    [
        *[("name", int), ("start", float), ("end", float), ("launched", float)],
        *[("thread", float), ("collective", int)],
    ]
)


class Header:
    """The metadata of a trace: its rank, GPU, process groups and pipeline."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        info: Mapping[str, Any] = content.get("distributedInfo") or {}
        named = re.search(r"rank[-_]?(\d+)", path.name)
        # None on a CPU.
        self.gpu: str | None = (content.get("deviceProperties") or [{}])[0].get("name")
        self.rank: int | None = info.get("rank", int(named[1]) if named else None)
        self._groups: Sequence[Mapping[str, Any]] = info.get("pg_config", ())
        meshes = {group["pg_desc"] for group in self._groups}
        # The ranks of this rank's pipeline; without PP only its own rank. Empty if unknown.
        self.pipeline: list[int] = []
        if "mesh_pp" in meshes:
            own = [] if self.rank is None else [self.rank]
            self.pipeline = self.group_ranks("mesh_pp") or own
        elif any(mesh.startswith("mesh_") for mesh in meshes):
            # A mesh that spans all ranks has no process group of its own, so PP spans all ranks.
            self.pipeline = list(range(info.get("world_size", 0)))
        places = {rank: place for place, rank in enumerate(self.pipeline)}
        self.stage = None if self.rank is None else places.get(self.rank)

    def group_ranks(self, description: str) -> list[int]:
        """Return the ranks of this rank's process group; empty if it has one rank or all."""
        named = (one["ranks"] for one in self._groups if one["pg_desc"] == description)
        return next((list(ranks) for ranks in named if len(ranks) > 1), [])


@dataclass(frozen=True)
class Trace:
    """One rank's trace; if it has no kernels, the host's operations count as work.

    Each of `collectives` is PyTorch's record: name, and the group's description and ranks.
    """

    header: Header
    names: Sequence[str]
    collectives: Sequence[tuple[str, ...]]
    steps: Sequence[Step]
    host: Column
    device: Column

    @property
    def on_gpu(self) -> bool:
        return len(self.device) > 0

    @property
    def gpu(self) -> str | None:
        return self.header.gpu if self.on_gpu else None


def read_header(path: Path) -> Header:
    """Read a trace's metadata, which precedes its first event."""
    with _open(path) as file:
        found = _EVENTS.split(file.read(_HEADER_SIZE), maxsplit=1)
    return Header(path, json.loads(found[0] + '"traceEvents": []}') if len(found) > 1 else {})


def read_trace(path: Path) -> Trace:
    place = shown_path(path)
    reader = _Reader()
    # The hook consumes each event when it is parsed, so the parsed events are never all in memory.
    # Not strict, because kernel names may contain unescaped control characters.
    decoder = json.JSONDecoder(object_hook=reader.take, strict=False)
    try:
        with _open(path) as file:
            content = decoder.decode(file.read())
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place}: character {error.pos:,}",
            "is not JSON, or was cut: the job ended while writing it?",
            "profile the recipe again",
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(place, f"cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(place, f"holds an event that PyTorch does not write: {error!r}") from None
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise InputError(place, "is not a trace: it has no traceEvents")
    trace = reader.trace(Header(path, content))
    if not trace.on_gpu and not len(trace.host):
        remedy = "the profiler recorded nothing in this step"
        raise InputError(place, "holds no operation and no kernel", remedy)
    return trace


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if is_packed else path.open(encoding="utf-8")


class _Reader:
    """Collects a trace's events in compact numeric columns."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._collectives: dict[tuple[str, ...], int] = {}
        self._threads: dict[str, int] = {}
        self._steps: list[Step] = []
        self._host = array("d")
        self._device = array("d")
        self._launches: dict[int, tuple[float, int]] = {}

    def take(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Keep `value` if it is an event; return anything else unchanged."""
        if "ph" not in value:
            return value
        if value["ph"] != "X":
            return None
        category = value.get("cat")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self._add_device(value)
        elif category in ("cpu_op", "user_annotation"):
            self._add_host(value, category == "cpu_op")
        elif category in ("cuda_runtime", "cuda_driver"):
            correlation = value.get("args", {}).get("correlation")
            if correlation is not None and _LAUNCH.search(value["name"]):
                self._launches[correlation] = float(value["ts"]), self._thread(value["tid"])
            if _BLOCKING.search(value["name"]):
                self._add_host(value, True)
        return None

    def _add_device(self, event: Mapping[str, Any]) -> None:
        arguments, start = event.get("args", {}), float(event["ts"])
        collective = NOTHING
        if "Collective name" in arguments:
            keys = ("Collective name", "Process Group Description", "Process Group Ranks")
            record = tuple(arguments.get(key, "") for key in keys)
            collective = self._collectives.setdefault(record, len(self._collectives))
        name = self._names.setdefault(event["name"], len(self._names))
        correlation = arguments.get("correlation", -1)
        self._device.extend((name, start, start + float(event["dur"]), correlation, collective))

    def _add_host(self, event: Mapping[str, Any], is_work: bool) -> None:
        name, start = event["name"], float(event["ts"])
        end = start + float(event["dur"])
        if not is_work and (step := _STEP.fullmatch(name)):
            # The step's annotation encloses every event, so it would explain nothing as a cause.
            self._steps.append(Step(int(step[1]), start, end))
            return
        flops, bits = _gemm_work(name, event.get("args", {})) if name in _MATRICES else (0.0, 0)
        # Gloo's work has no operation, only an annotation, so count the annotation as work.
        is_work = is_work or name.startswith("gloo:")
        number = self._names.setdefault(name, len(self._names))
        self._host.extend((number, start, end, self._thread(event["tid"]), is_work, flops, bits))

    def _thread(self, thread: int | str) -> int:
        if isinstance(thread, int):
            return thread
        return self._threads.setdefault(thread, -1 - len(self._threads))

    def trace(self, header: Header) -> Trace:
        host = np.rec.fromarrays(np.array(self._host).reshape(-1, 7).T, dtype=HOST)
        host = host[np.lexsort((-host.end, host.start, host.thread))]
        name, start, end, correlation, collective = np.array(self._device).reshape(-1, 5).T
        unknown = (math.nan, NOTHING)
        launches = np.array([self._launches.get(int(key), unknown) for key in correlation])
        columns = (name, start, end, *launches.reshape(-1, 2).T, collective)
        device = np.rec.fromarrays(columns, dtype=DEVICE)
        steps = sorted(self._steps, key=lambda step: step.start)
        return Trace(header, list(self._names), list(self._collectives), steps, host, device)


def _gemm_work(operation: str, arguments: Mapping[str, Any]) -> tuple[float, int]:
    """Return a GEMM operation's FLOPs (0 without shapes) and the bits of an input element.

    A grouped GEMM's rows include its groups' padding, which the kernel multiplies too.
    """
    first = _MATRICES[operation]
    dims, types = arguments.get("Input Dims", ()), arguments.get("Input type", ())
    left, right = (*dims[first : first + 2], (), ())[:2]
    if len(left) not in (2, 3) or len(right) not in (2, 3):
        return 0.0, 0
    kind = types[first].removeprefix("c10::") if types else ""
    bits = 8 if kind.startswith("Float8") else _BITS.get(kind, 0)
    if operation in ("aten::bmm", "aten::baddbmm"):
        return 2.0 * math.prod(left) * right[-1], bits
    # Dense: (M, K) x (K, N). Grouped: (M, K) x (groups, K, N), where the groups divide M; weight
    # gradients (M, K) x (K, N), where they divide K; (groups, M, K) x (K, N), where they divide N.
    return 2.0 * left[-2] * left[-1] * right[-1], bits


# Names of CUDA runtime and driver calls, such as cudaMemcpyAsync and cuLaunchKernel.
_CALL = re.compile(r"cu(da)?[A-Z]")
_NUMBERS = {category.name: number for number, category in enumerate(CATEGORIES)} | {NO_WORK: -1}


class Host:
    """The nesting of the host's events."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        events = trace.host
        self.parent = np.full(len(events), NOTHING)
        self.chain = np.full(len(events), NOTHING)
        chains: dict[tuple[int, int], int] = {}
        stack: list[tuple[int, float, float]] = []
        names = ("name", "start", "end", "thread")
        columns = zip(*(events[name].tolist() for name in names), strict=True)
        for event, (name, start, end, thread) in enumerate(columns):
            while stack and (stack[-1][1] <= start or stack[-1][2] != thread):
                stack.pop()
            above = NOTHING
            if stack:
                self.parent[event] = stack[-1][0]
                above = int(self.chain[stack[-1][0]])
            self.chain[event] = chains.setdefault((above, name), len(chains))
            stack.append((event, end, thread))
        self._is_call = np.array([bool(_CALL.match(name)) for name in trace.names], dtype=bool)

    def innermost(self, thread: float, times: Column) -> Column:
        """Return the innermost event of `thread` at each of `times`, or NOTHING."""
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
        """Return the operation of each event: itself or, for CUDA calls, the enclosing event."""
        found = np.array(events)
        if len(self.parent):
            names = self.trace.host.name
            while (calls := (found != NOTHING) & self._is_call[names[found]]).any():
                found[calls] = self.parent[found[calls]]
        return found

    def enclosing(self, event: int) -> tuple[str, ...]:
        """Return the names of `event` and of its enclosing events, from the inside out."""
        names = []
        while event != NOTHING:
            names.append(self.trace.names[self.trace.host.name[event]])
            event = int(self.parent[event])
        return tuple(names)


# The device's work, sorted by start. `operation` is the index of the host event that it belongs to,
# or NOTHING; `category` is an index into CATEGORIES.
KERNEL = np.dtype([*DEVICE.descr, ("operation", int), ("category", int)])


def kernels_of(trace: Trace, host: Host) -> Column:
    """Return the device's work, without operations that only wait or call other operations."""
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
    operation = kernels.operation
    chain = np.full(len(operation), NOTHING)
    chain[operation != NOTHING] = host.chain[operation[operation != NOTHING]]
    # Classify kernels once per combination of the values that rules match.
    alike = np.stack([kernels.name, chain, kernels.collective])
    _, first, inverse = np.unique(alike, axis=1, return_index=True, return_inverse=True)
    found = []
    for event in first:
        number = kernels.collective[event]
        call, group, _ = trace.collectives[number] if number != NOTHING else ("", "", "")
        kernel, inside = trace.names[kernels.name[event]], host.enclosing(operation[event])
        found.append(_NUMBERS[category_of(kernel, inside, call, group)])
    kernels.category = np.array(found, dtype=int)[inverse.reshape(-1)]
    kernels = kernels[kernels.category >= 0]
    return kernels[np.lexsort((kernels.end, kernels.start))]


def _own_time(host: Host, thread: float) -> tuple[Column, Column, Column]:
    """Return `thread`'s time in operations without nested ones, as starts, ends and events."""
    events = host.trace.host
    own = events.thread == thread
    edges = np.unique([events.start[own], events.end[own]])
    inside = host.innermost(thread, (edges[:-1] + edges[1:]) / 2)
    work = (inside != NOTHING) & events.is_work[inside]
    return edges[:-1][work], edges[1:][work], inside[work]
