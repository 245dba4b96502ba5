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
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path
from cookbook.profile.kernels import NUMBERS, category_of

# A one-dimensional array of numbers, or of records of dtype HOST, DEVICE or KERNEL.
Column: TypeAlias = np.ndarray

NOTHING = -1
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
# CUDA runtime and driver calls in which the host may wait for the GPU, and calls that launch work.
_BLOCKING = re.compile(r"Synchronize|cudaMemcpy$|cudaMemcpyAsync|Malloc|cudaFree|HostAlloc")
_LAUNCH = re.compile(r"Launch|Memcpy|Memset")
# Names of CUDA runtime and driver calls, such as cudaMemcpyAsync and cuLaunchKernel.
_CALL = re.compile(r"cu(da)?[A-Z]")
_STEP = re.compile(r"ProfilerStep#(\d+)")

_GEMM = re.compile(r"aten::(mm|bmm|addmm|baddbmm|_scaled_mm|_grouped_mm|_scaled_grouped_mm)")
_BITS = {"BFloat16": 16, "Half": 16, "float": 32, "Float": 32, "double": 64}


class Step(NamedTuple):
    """A training step on the host's timeline, in microseconds."""

    number: int
    start: float
    end: float


# Host events (operations, annotations, blocking calls), sorted by thread and start, outer first.
# `name` is an index into the trace's names. `is_work` is false for mere labels.
# `flops` is 0 except for GEMMs with known shapes; `bits` is the size of a GEMM's input elements.
HOST = np.dtype(
    [
        *[("name", int), ("start", float), ("end", float), ("thread", float)],
        *[("is_work", bool), ("flops", float), ("bits", int)],
    ]
)
# Device events: kernels, copies, fills. `launched` is when the host launched one, NaN if unknown;
# `thread` is the launching thread. `collective` is an index into `collectives`, or NOTHING.
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
        self.gpu: str | None = (content.get("deviceProperties") or [{}])[0].get("name")
        self.rank: int | None = info.get("rank", int(named[1]) if named else None)
        # Maps each process group's description to its ranks (empty for a group of one rank).
        self.groups: dict[str, list[int]] = {}
        for group in info.get("pg_config", ()):
            ranks = [*group["ranks"]] if len(group["ranks"]) > 1 else []
            self.groups[group["pg_desc"]] = self.groups.get(group["pg_desc"]) or ranks
        # The ranks of this rank's pipeline; without PP, only its own rank. Empty if unknown.
        self.pipeline: list[int] = []
        if "mesh_pp" in self.groups:
            own = [] if self.rank is None else [self.rank]
            self.pipeline = self.groups["mesh_pp"] or own
        elif any(mesh.startswith("mesh_") for mesh in self.groups):
            # If PP spans all ranks, it uses the default group, so there is no `mesh_pp`.
            self.pipeline = [*range(info.get("world_size", 0))]
        self.stage = self.pipeline.index(self.rank) if self.rank in self.pipeline else None


@dataclass
class Trace:
    """The host events and device events of one rank's trace.

    For each host event, three arrays hold the index of a host event, or NOTHING if there is none.
    `parent`: the event that directly encloses it. `gemm`: the outermost GEMM in which it runs.
    `operation`: the event itself or, if it is a CUDA call, the operation that made the call.
    """

    header: Header
    names: Sequence[str]
    # Each collective's name and group. Index NOTHING selects an entry of empty strings.
    collectives: Sequence[tuple[str, str]]
    steps: Sequence[Step]
    host: Column
    device: Column

    def __post_init__(self) -> None:
        columns = ("name", "start", "end", "thread", "flops")
        numbers, starts, ends, threads, flops = (self.host[name].tolist() for name in columns)
        size = len(numbers) + 1
        parent, operation, gemm = ([NOTHING] * size for _ in range(3))
        # The names of each event and of its enclosing events, from the inside out.
        self.inside: list[tuple[str, ...]] = [()] * size
        alike: dict[tuple[str, ...], tuple[str, ...]] = {}
        for event, number in enumerate(numbers):
            above = event - 1
            while above != NOTHING and (
                ends[above] <= starts[event] or threads[above] != threads[event]
            ):
                above = parent[above]
            name = self.names[number]
            inside = (name, *self.inside[above])
            self.inside[event] = alike.setdefault(inside, inside)
            parent[event] = above
            operation[event] = operation[above] if _CALL.match(name) else event
            is_outermost = flops[event] > 0 and gemm[above] == NOTHING
            gemm[event] = event if is_outermost else gemm[above]
        self.parent = np.array(parent)
        self.operation = np.array(operation)
        self.gemm = np.array(gemm)

    @property
    def on_gpu(self) -> bool:
        return len(self.device) > 0

    @property
    def gpu(self) -> str | None:
        return self.header.gpu if self.on_gpu else None

    def innermost(self, thread: Column, times: Column) -> Column:
        """Return, for each i, the innermost event on `thread[i]` at `times[i]`, or NOTHING."""
        at = np.full(len(times), NOTHING)
        if not len(self.host):
            return at
        for number in np.unique(thread):
            mine = thread == number
            first, last = (np.searchsorted(self.host.thread, number, side) for side in _SIDES)
            found = first - 1 + np.searchsorted(self.host.start[first:last], times[mine], "right")
            at[mine] = np.where(found < first, NOTHING, found)
        while (over := (at != NOTHING) & (self.host.end[at] < times)).any():
            at[over] = self.parent[at[over]]
        return at


def read_trace(path: Path) -> Trace:
    place = shown_path(path)
    reader = _Events()
    # The hook consumes each event when it is parsed, so the parsed events are never all in memory.
    # `strict=False` because kernel names may contain unescaped control characters.
    decoder = json.JSONDecoder(object_hook=reader.take, strict=False)
    try:
        with _open(path) as file:
            content = decoder.decode(file.read())
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place}: character {error.pos:,}",
            "is not JSON, or is truncated: did the job end while writing it?",
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
        is_packed = file.read(2) == b"\x1f\x8b"  # an unpacked trace may still be named `.gz`
    return gzip.open(path, "rt", encoding="utf-8") if is_packed else path.open(encoding="utf-8")


class _Events:
    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._collectives: dict[tuple[str, str], int] = {}
        self._steps: list[Step] = []
        self._host = array("d")
        self._device = array("d")
        self._launches: dict[int, tuple[float, float]] = {}

    def take(self, value: dict[str, Any]) -> dict[str, Any] | None:
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
                self._launches[correlation] = float(value["ts"]), float(value["tid"])
            if _BLOCKING.search(value["name"]):
                self._add_host(value, True)
        return None

    def _add_device(self, event: Mapping[str, Any]) -> None:
        arguments, start = event.get("args", {}), float(event["ts"])
        collective = NOTHING
        if "Collective name" in arguments:
            record = arguments["Collective name"], arguments.get("Process Group Description", "")
            collective = self._collectives.setdefault(record, len(self._collectives))
        name = self._names.setdefault(event["name"], len(self._names))
        correlation = arguments.get("correlation", -1)
        self._device.extend((name, start, start + float(event["dur"]), correlation, collective))

    def _add_host(self, event: Mapping[str, Any], is_work: bool) -> None:
        name, start = event["name"], float(event["ts"])
        end = start + float(event["dur"])
        if not is_work and (step := _STEP.fullmatch(name)):
            # The profiler counts from 0, and training from 1.
            self._steps.append(Step(int(step[1]) + 1, start, end))
            return
        flops, bits = 0.0, 0
        if _GEMM.fullmatch(name):
            flops, bits = _gemm_work(name, event.get("args", {}))
        # A gloo call is recorded as an annotation only, so count that annotation as work.
        is_work = is_work or name.startswith("gloo:")
        number = self._names.setdefault(name, len(self._names))
        self._host.extend((number, start, end, float(event["tid"]), is_work, flops, bits))

    def trace(self, header: Header) -> Trace:
        host = np.rec.fromarrays(np.array(self._host).reshape(-1, 7).T, dtype=HOST)
        host = host[np.lexsort((-host.end, host.start, host.thread))]
        name, start, end, correlation, collective = np.array(self._device).reshape(-1, 5).T
        unknown = (math.nan, NOTHING)
        launches = np.array([self._launches.get(int(key), unknown) for key in correlation])
        columns = (name, start, end, *launches.reshape(-1, 2).T, collective)
        device = np.rec.fromarrays(columns, dtype=DEVICE)
        steps = sorted(self._steps, key=lambda step: step.start)
        collectives = [*self._collectives, ("", "")]
        return Trace(header, list(self._names), collectives, steps, host, device)


def _gemm_work(operation: str, arguments: Mapping[str, Any]) -> tuple[float, int]:
    """Return a GEMM operation's FLOPs (0 without shapes) and the bits of an input element."""
    # The first input of `addmm` and `baddbmm` is the addend.
    first = 1 if "add" in operation else 0
    dims, types = arguments.get("Input Dims", ()), arguments.get("Input type", ())
    left, right = (*dims[first : first + 2], (), ())[:2]
    if len(left) not in (2, 3) or len(right) not in (2, 3):
        return 0.0, 0
    kind = types[first].removeprefix("c10::") if types else ""
    bits = 8 if kind.startswith("Float8") else _BITS.get(kind, 0)
    if operation in ("aten::bmm", "aten::baddbmm"):
        return 2.0 * math.prod(left) * right[-1], bits
    # Dense: (M, K) x (K, N). Grouped, if the groups split M: (M, K) x (groups, K, N). If they
    # split K, as for weight gradients: (M, K) x (K, N). If they split N: (groups, M, K) x (K, N).
    return 2.0 * left[-2] * left[-1] * right[-1], bits


# The device's work, sorted by start. `operation` is the index of the host event that it belongs to,
# or NOTHING; `category` is an index into CATEGORIES.
KERNEL = np.dtype([*DEVICE.descr, ("operation", int), ("category", int)])


def kernels_of(trace: Trace) -> Column:
    """Return the device's work as KERNEL records, without events marked NO_WORK."""
    device = trace.device
    if trace.on_gpu:
        columns = [device[name] for name in DEVICE.names]
        operation = trace.operation[trace.innermost(device.thread, device.launched)]
    else:
        columns, operation = _own_time(trace)
    found = []
    values = (column.tolist() for column in (columns[0], operation, columns[-1]))
    for name, event, number in zip(*values, strict=True):
        category = category_of(trace.names[name], trace.inside[event], *trace.collectives[number])
        found.append(NUMBERS[category])
    categories = np.array(found, dtype=int)
    kernels = np.rec.fromarrays([*columns, operation, categories], dtype=KERNEL)
    kernels = kernels[categories >= 0]
    return kernels[np.lexsort((kernels.end, kernels.start))]


def _own_time(trace: Trace) -> tuple[list[Column], Column]:
    events = trace.host
    threads = np.concatenate([events.thread, events.thread])
    times = np.concatenate([events.start, events.end])
    # The rows are sorted by thread, then by time.
    thread, time = np.unique(np.stack([threads, times], axis=1), axis=0).T
    inside = trace.innermost(thread[:-1], (time[:-1] + time[1:]) / 2)
    is_work = (np.diff(thread) == 0) & (inside != NOTHING) & events.is_work[inside]
    start, end, operation = time[:-1][is_work], time[1:][is_work], inside[is_work]
    columns = [events.name[operation], start, end, start, events.thread[operation]]
    return [*columns, np.full(len(start), NOTHING)], operation
