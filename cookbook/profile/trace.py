"""One rank's trace as PyTorch's profiler wrote it, kept in columns: what ran where, and when.

Times are microseconds on the trace's own clock. Only what a profile needs is kept, some 40 bytes
an event.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path
from cookbook.profile.gemms import Gemm, gemm_of, is_gemm
from cookbook.profile.json_stream import TraceStream

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_HOST = frozenset({"cpu_op", "user_annotation"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
# Calls of the CUDA runtime in which the host may wait for the GPU.
_BLOCKING = re.compile(r"Synchronize|cudaMemcpy$|cudaMemcpyAsync|Malloc|cudaFree|HostAlloc")
_LAUNCH = re.compile(r"Launch|Memcpy|Memset")
_STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass(frozen=True)
class Collective:
    """What PyTorch records of a collective: its name, its group, elements that go in and out."""

    name: str
    group: str
    description: str
    ranks: str
    elements: tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A training step as the host saw it."""

    number: int
    start: float
    end: float


@dataclass
class HostEvents:
    """Operations, annotations and blocking calls of the host's threads."""

    name: array[int] = field(default_factory=lambda: array("I"))
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    thread: array[int] = field(default_factory=lambda: array("q"))
    is_work: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.name)


@dataclass
class DeviceEvents:
    """Kernels, copies and fills; `collective` is an index into the trace's, or -1."""

    name: array[int] = field(default_factory=lambda: array("I"))
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    collective: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.name)


@dataclass
class Trace:
    """One rank's trace.

    Attributes:
        header: the file's keys beside its events (rank, process groups, device).
        launches: for each correlation id, when the host launched it and in which thread.
        gemms: for each host event that is a GEMM with known shapes, its work.
    """

    path: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    host: HostEvents = field(default_factory=HostEvents)
    device: DeviceEvents = field(default_factory=DeviceEvents)
    launches: dict[int, tuple[float, int]] = field(default_factory=dict)
    gemms: dict[int, Gemm] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU worked; else the host's operations are the work."""
        return len(self.device) > 0

    @property
    def gpu(self) -> str | None:
        """The GPU's name."""
        devices = self.header.get("deviceProperties")
        if not (self.on_gpu and isinstance(devices, list) and devices):
            return None
        name = devices[0].get("name") if isinstance(devices[0], dict) else None
        return name if isinstance(name, str) else None

    @property
    def rank(self) -> int | None:
        """The global rank; from the file's name where the trace does not say it."""
        rank = self._distributed.get("rank")
        if isinstance(rank, int):
            return rank
        named = re.search(r"rank[-_]?(\d+)", self.path.name)
        return int(named[1]) if named else None

    @property
    def stage(self) -> int | None:
        """The rank's place in its pipeline; 0 where there is none, None where that is not known."""
        ranks = self.pipeline
        return ranks.index(self.rank) if self.rank in ranks else None

    @property
    def pipeline(self) -> list[int]:
        """The ranks of this rank's pipeline, its own alone without one; empty where unknown."""
        groups = self._distributed.get("pg_config")
        named = [group for group in groups or () if isinstance(group, dict)]
        meshes = {str(group.get("pg_desc")) for group in named}
        if not any(mesh.startswith("mesh_") for mesh in meshes):
            return []
        if "mesh_pp" not in meshes:
            # A mesh that spans all ranks has no group of its own.
            world = self._distributed.get("world_size")
            return list(range(world)) if isinstance(world, int) else []
        return self.group_ranks("mesh_pp") or ([] if self.rank is None else [self.rank])

    def group_ranks(self, description: str) -> list[int]:
        """The ranks of this rank's process group of that description; empty where none is known.

        A group of one rank is none. One of all ranks is PyTorch's `default_pg`, under that name.
        """
        groups = self._distributed.get("pg_config")
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and group.get("pg_desc") == description:
                ranks = group.get("ranks")
                if isinstance(ranks, list) and len(ranks) > 1:
                    return [rank for rank in ranks if isinstance(rank, int)]
        return []

    @property
    def _distributed(self) -> Mapping[str, Any]:
        found = self.header.get("distributedInfo")
        return found if isinstance(found, dict) else {}


def read_header(path: Path) -> Trace:
    """What stands before the first event: rank, device and process groups; no event is kept."""
    stream = TraceStream(path)
    next(stream.events(), None)
    return Trace(path, header=stream.header)


def read_trace(path: Path) -> Trace:
    """The trace in `path`; what is no whole trace with something to count is an InputError."""
    stream = TraceStream(path)
    reader = _Reader(Trace(path, header=stream.header))
    for event in stream.events():
        if event.get("ph") == "X":
            try:
                reader.add(event)
            except (KeyError, TypeError, ValueError, OverflowError):
                raise InputError(
                    shown_path(path), f"holds an event that is none of PyTorch's: {event!r:.120}"
                ) from None
    trace = reader.trace
    if not len(trace.host) and not len(trace.device):
        raise InputError(
            shown_path(path),
            "holds no operation and no kernel",
            "the profiler recorded nothing in this step",
        )
    trace.steps.sort(key=lambda step: step.start)
    return trace


class _Reader:
    """Puts events into a trace's columns."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._names: dict[str, int] = {}
        self._collectives: dict[Collective, int] = {}
        self._threads: dict[str, int] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        category = event.get("cat")
        if category in _ON_DEVICE:
            self._add_device(event)
        elif category in _ON_HOST:
            self._add_host(event, is_work=category == "cpu_op")
        elif category in _CALLS:
            self._add_call(event)

    def _add_device(self, event: Mapping[str, Any]) -> None:
        arguments, start = event.get("args", {}), float(event["ts"])
        device = self.trace.device
        device.name.append(self._name(event["name"]))
        device.start.append(start)
        device.end.append(start + float(event["dur"]))
        device.correlation.append(int(arguments.get("correlation", -1)))
        device.collective.append(self._collective(arguments))

    def _add_host(self, event: Mapping[str, Any], is_work: bool) -> None:
        name, start = event["name"], float(event["ts"])
        end = start + float(event["dur"])
        step = None if is_work else _STEP.fullmatch(name)
        if step:
            # It encloses everything, so it would explain nothing.
            self.trace.steps.append(Step(int(step[1]), start, end))
            return
        if is_gemm(name) and (gemm := gemm_of(name, event.get("args", {}))):
            self.trace.gemms[len(self.trace.host)] = gemm
        host = self.trace.host
        host.name.append(self._name(name))
        host.start.append(start)
        host.end.append(end)
        host.thread.append(self._thread(event["tid"]))
        # Gloo's own annotation is all that is known of its work.
        host.is_work.append(is_work or name.startswith("gloo:"))

    def _add_call(self, event: Mapping[str, Any]) -> None:
        correlation = event.get("args", {}).get("correlation")
        if isinstance(correlation, int) and _LAUNCH.search(event["name"]):
            thread = self._thread(event["tid"])
            self.trace.launches[correlation] = (float(event["ts"]), thread)
        if _BLOCKING.search(event["name"]):
            self._add_host(event, is_work=True)

    def _collective(self, arguments: Mapping[str, Any]) -> int:
        name = arguments.get("Collective name")
        if name is None:
            return -1
        collective = Collective(
            name=str(name),
            group=str(arguments.get("Process Group Name", "")),
            description=str(arguments.get("Process Group Description", "")),
            ranks=str(arguments.get("Process Group Ranks", "")),
            elements=(
                int(arguments.get("In msg nelems", 0)),
                int(arguments.get("Out msg nelems", 0)),
            ),
        )
        index = self._collectives.setdefault(collective, len(self._collectives))
        if index == len(self.trace.collectives):
            self.trace.collectives.append(collective)
        return index

    def _name(self, name: Any) -> int:
        index = self._names.setdefault(str(name), len(self._names))
        if index == len(self.trace.names):
            self.trace.names.append(str(name))
        return index

    def _thread(self, thread: Any) -> int:
        if isinstance(thread, int):
            return thread
        return self._threads.setdefault(str(thread), -1 - len(self._threads))
