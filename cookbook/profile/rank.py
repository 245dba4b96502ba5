"""How one rank spends a step: time by category, causes of idle time, GEMM rates.

Each moment counts once: as compute if anything computes, as exposed communication if only
communication runs, and otherwise as idle.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cookbook.base.gpus import peak_tflops
from cookbook.profile.kernels import BY_NAME, CATEGORIES, COMMUNICATION, GEMMS
from cookbook.profile.trace import NOTHING, Column, Host, Trace, kernels_of, read_trace

# If the first kernel was queued for longer, the device was still busy with the previous step.
_QUEUED_US = 1000.0
_MOST_KERNELS = 25
_MOST_CAUSES = 8
_BLOCKED = re.compile(r"Synchronize|Memcpy")
# Details to strip from names (modules, region numbers, graph hashes), so that equal causes add up.
_PARTICULAR = re.compile(r"\s+\(.*\)|\s+for \S+|(?<=[\w)])#.*|:?\s*\d+/\d+|\bf[0-9a-z]{20,}|#+")
_IS_COMMUNICATION = np.array([category.kind == COMMUNICATION for category in CATEGORIES])


@dataclass(frozen=True)
class GemmRate:
    """The speed of GEMMs of one kind; None if no shape, or not the GPU's peak, is known."""

    ms: float  # milliseconds per step
    known_ms: float  # milliseconds per step of the GEMMs whose shapes are known
    tflops: float | None  # TFLOP/s of the GEMMs whose shapes are known
    peak_share: float | None  # share of the GPU's peak for the inputs' formats


class Call(NamedTuple):
    """A communication kernel; calls of different ranks match by category, step and key."""

    category: str
    step: int
    key: tuple[str, ...]
    duration: float  # microseconds


@dataclass(frozen=True, eq=False)
class RankProfile:
    """How one rank spends a step; times are milliseconds per step, averaged over traced steps."""

    path: Path
    rank: int | None
    stage: int | None
    gpu: str | None
    on_gpu: bool  # whether kernels were counted, or else a CPU's operations
    steps: tuple[int, ...]  # step numbers; empty if the trace has none and counts as one step
    step_ms: float
    each_step_ms: tuple[float, ...]
    counted: Mapping[str, float]  # by category, without overlap; the rest of the step is idle
    busy: Mapping[str, float]  # by category, including overlap with other categories
    idle_host_ms: float
    idle_queued_ms: float
    causes: Mapping[str, float]  # host activity while the device waited for the next launch
    gemms: Mapping[str, GemmRate]
    longest: tuple[tuple[str, str, float], ...]  # kernels: name, category and time
    unknown: tuple[tuple[str, str, float], ...]  # longest kernels of category `other`
    calls: tuple[Call, ...] = field(repr=False, default=())
    # Exposed communication spent waiting for other ranks, by category; None if unknown.
    waited: Mapping[str, float] | None = None

    @property
    def exposed_ms(self) -> float:
        """Time during which only communication ran."""
        return sum(ms for name, ms in self.counted.items() if BY_NAME[name].kind == COMMUNICATION)

    @property
    def compute_ms(self) -> float:
        """Time during which the device computed."""
        return sum(self.counted.values()) - self.exposed_ms

    @property
    def hidden(self) -> dict[str, float]:
        """Time of each category that counts for another category, which ran at the same time."""
        return {name: ms - self.counted[name] for name, ms in self.busy.items()}

    @property
    def accounted(self) -> float:
        """The share of the step outside unknown kernels (category `other`)."""
        return 1 - self.counted.get("other", 0.0) / self.step_ms if self.step_ms else 0.0


def profile_rank(path: Path) -> RankProfile:
    trace = read_trace(path)
    host = Host(trace)
    kernels = kernels_of(trace, host)
    windows = step_windows(trace, kernels)
    start, end, count = windows[0], windows[-1], len(windows) - 1
    counted, busy, gaps = divide(kernels, start, end)
    idle_host, idle_queued, causes = explain_idle(gaps, kernels, host)
    kernels = kernels[(kernels.end > start) & (kernels.start < end)]
    # On a CPU, nested operations split a call into parts that do not match other ranks' calls.
    is_call = _IS_COMMUNICATION[kernels.category] & trace.on_gpu
    calls = tuple(_calls(trace, kernels[is_call], windows))
    alike, which = np.unique(kernels.name * len(CATEGORIES) + kernels.category, return_inverse=True)
    times = np.bincount(which, kernels.end - kernels.start, len(alike)).tolist()
    totals = {
        (trace.names[key // len(CATEGORIES)], CATEGORIES[key % len(CATEGORIES)].name): us
        for key, us in zip(alike.tolist(), times, strict=True)
    }

    def per_step(times: Mapping[Any, float]) -> dict[Any, float]:
        """Convert microseconds of all steps to milliseconds per step."""
        return {name: us / count / 1000 for name, us in times.items()}

    longest = [(*key, ms) for key, ms in _largest(per_step(totals)).items()]
    return RankProfile(
        path=path,
        rank=trace.header.rank,
        stage=trace.header.stage,
        gpu=trace.gpu,
        on_gpu=trace.on_gpu,
        steps=tuple(step.number for step in trace.steps),
        step_ms=(end - start) / count / 1000,
        each_step_ms=tuple((np.diff(windows) / 1000).tolist()),
        counted=per_step(counted),
        busy=per_step(busy),
        idle_host_ms=idle_host / count / 1000,
        idle_queued_ms=idle_queued / count / 1000,
        causes=_largest(per_step(causes), _MOST_CAUSES),
        gemms=_gemm_rates(trace, host, kernels, count),
        longest=tuple(longest[:_MOST_KERNELS]),
        unknown=tuple([one for one in longest if one[1] == "other"][:_MOST_KERNELS]),
        calls=calls,
    )


def _largest(times: Mapping[Any, float], most: int | None = None) -> dict[Any, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1])[:most])


def step_windows(trace: Trace, kernels: Column) -> list[float]:
    """Return the boundaries of the traced steps on the device: one more than there are steps.

    The host runs ahead of the device. A step begins on the device once the host has begun it and
    the device has finished the previous step. So the steps cover wall time without gap or overlap.
    """
    if not trace.steps:
        source = kernels if len(kernels) else trace.host
        return [float(source.start.min()), float(source.end.max())]
    finished = trace.steps[0].start
    boundaries: list[float] = []
    for step in trace.steps:
        own = kernels[(step.start <= kernels.launched) & (kernels.launched < step.end)]
        boundary = max(step.start, finished)
        is_first = not boundaries and len(own) > 0 and trace.on_gpu
        if is_first and own.start[0] - own.launched[0] > _QUEUED_US:
            boundary = float(own.start[0])
        boundaries.append(boundary)
        finished = max([finished, *own.end.tolist()])
    last = trace.steps[-1].end
    return [*boundaries, max(last, finished) if trace.on_gpu else last]


def divide(
    kernels: Column, start: float, end: float
) -> tuple[dict[str, float], dict[str, float], Column]:
    """Divide the microseconds from `start` to `end` among the categories of kernels.

    Return the time counted for each category, the time for which each category ran at all, and the
    idle gaps, (gaps, 2). Overlapping time counts for the first category in CATEGORIES.
    """
    first, last = np.clip(kernels.start, start, end), np.clip(kernels.end, start, end)
    edges = np.unique(np.concatenate([[start, end], first, last]))
    lengths = np.diff(edges)
    covered = np.zeros(len(lengths), dtype=bool)
    counted, busy = {}, {}
    for number, category in enumerate(CATEGORIES):
        own = kernels.category == number
        changes = np.zeros(len(edges))
        np.add.at(changes, np.searchsorted(edges, first[own]), 1)
        np.add.at(changes, np.searchsorted(edges, last[own]), -1)
        runs = np.cumsum(changes)[:-1] > 0
        if runs.any():
            busy[category.name] = float(lengths[runs].sum())
            counted[category.name] = float(lengths[runs & ~covered].sum())
            covered |= runs
    change = np.diff(np.concatenate([[True], covered, [True]]).astype(int))
    return counted, busy, np.stack([edges[change == -1], edges[change == 1]], axis=1)


def explain_idle(
    gaps: Column, kernels: Column, host: Host
) -> tuple[float, float, dict[str, float]]:
    """Explain the idle time in `gaps` by the next kernel's launch and the host's activity.

    Return microseconds: the host-bound time, before the next kernel was launched; the queued time,
    from a launch to the kernel's start; and the host-bound time by cause.
    """
    start, end = gaps.T
    events = host.trace.host
    threads, counts = np.unique(events.thread, return_counts=True)
    busiest = threads[counts.argmax()] if len(threads) else NOTHING
    launched, thread = end.copy(), np.full(len(gaps), float(busiest))
    if host.trace.on_gpu:
        following = np.searchsorted(kernels.start, end)
        gap = np.flatnonzero(following < len(kernels))
        following = following[gap]
        known = ~np.isnan(kernels.launched[following])
        gap, following = gap[known], following[known]
        launched[gap] = np.clip(kernels.launched[following], start[gap], end[gap])
        thread[gap] = kernels.thread[following]
    causes: dict[str, float] = defaultdict(float)
    for one in np.unique(thread):
        own = (thread == one) & (launched > start)
        before = host.innermost(one, start[own])
        during = host.innermost(one, (start[own] + launched[own]) / 2)
        for first, middle, us in zip(before, during, (launched - start)[own], strict=True):
            # The host was waiting for the device as the gap began, so it could not launch ahead.
            waited = first != NOTHING and _BLOCKED.search(host.trace.names[events.name[first]])
            name = _activity(host, first if waited else middle)
            causes[f"had waited for the GPU in {name}" if waited else name] += float(us)
    return float((launched - start).sum()), float((end - launched).sum()), causes


def _activity(host: Host, event: int) -> str:
    """Return the name of the operation that contains `event`, or else of the CUDA call."""
    if event == NOTHING:
        return "Python, in no operation"
    operation = int(host.operation(np.array([event]))[0])
    name = host.enclosing(event if operation == NOTHING else operation)[0]
    return name if operation == NOTHING else _PARTICULAR.sub("", name).strip() or name


def _calls(trace: Trace, kernels: Column, windows: list[float]) -> list[Call]:
    """Return the communication calls; a call has the same key on every rank of its group."""
    steps = np.searchsorted(windows[1:-1], kernels.start, side="right")
    ep_ranks = str(trace.header.group_ranks("mesh_ep"))
    calls = []
    for kernel, step in zip(kernels, steps.tolist(), strict=True):
        # DeepEP's kernels record no process group, so use the EP ranks.
        key: tuple[str, ...] = trace.names[kernel.name].split("<")[0].split("(")[0], ep_ranks
        if kernel.collective != NOTHING:
            key = trace.collectives[kernel.collective]
        category, duration = CATEGORIES[kernel.category].name, float(kernel.end - kernel.start)
        calls.append(Call(category, step, key, duration))
    return calls


def _gemm_rates(trace: Trace, host: Host, kernels: Column, count: int) -> dict[str, GemmRate]:
    flops, bits = trace.host.flops, trace.host.bits
    rates = {}
    for category in GEMMS:
        own = kernels[kernels.category == list(BY_NAME).index(category)]
        if not len(own):
            continue
        # Find the outermost GEMM around each kernel: on a CPU, a grouped GEMM calls dense ones.
        gemm, event = np.full(len(own), NOTHING), own.operation.copy()
        while (inside := event != NOTHING).any():
            found = inside & (flops[event] > 0)
            gemm[found] = event[found]
            event[inside] = host.parent[event[inside]]
        duration = own.end - own.start
        seconds = float(duration[gemm != NOTHING].sum()) / 1e6
        # Count each operation's FLOPs once, even if it launched several kernels.
        work = np.unique(gemm[gemm != NOTHING])
        peaks = [peak_tflops(trace.gpu, int(size)) if trace.gpu else None for size in bits[work]]
        known = [
            flop / peak for flop, peak in zip(flops[work].tolist(), peaks, strict=True) if peak
        ]
        is_known = seconds and len(known) == len(peaks)
        rates[category] = GemmRate(
            ms=float(duration.sum()) / count / 1000,
            known_ms=seconds * 1000 / count,
            tflops=float(flops[work].sum()) / seconds / 1e12 if seconds else None,
            peak_share=sum(known) / seconds / 1e12 if is_known else None,
        )
    return rates
