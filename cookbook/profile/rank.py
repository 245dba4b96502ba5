"""Where a step of one rank goes: each moment counted once, idle time explained, GEMM rates.

A moment in which something computes belongs to that; one in which only communication runs is
exposed communication; in the rest the device is idle.
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

# A first kernel that waited longer in its queue found the device busy with the step before.
_QUEUED_US = 1000.0
_MOST_KERNELS = 25
_MOST_CAUSES = 8
_BLOCKED = re.compile(r"Synchronize|Memcpy")
# Modules, numbers of regions and the hashes of graphs would make each cause a different one.
_PARTICULAR = re.compile(r"\s+\(.*\)|\s+for \S+|(?<=[\w)])#.*|:?\s*\d+/\d+|\bf[0-9a-z]{20,}|#+")
_IS_COMMUNICATION = np.array([category.kind == COMMUNICATION for category in CATEGORIES])


@dataclass(frozen=True)
class GemmRate:
    """The speed of GEMMs of one kind; None where no shape, or no peak of the card, is known."""

    ms: float
    known_ms: float  # a step's time in those whose shapes are known
    tflops: float | None  # per second
    peak_share: float | None  # of the card's peak for their inputs' format


class Call(NamedTuple):
    """A communication kernel; other ranks' calls match by category, step and key. Microseconds."""

    category: str
    step: int
    key: tuple[str, ...]
    duration: float


@dataclass(frozen=True, eq=False)
class RankProfile:
    """Where a step of one rank goes; times in milliseconds a step, mean of the traced steps."""

    path: Path
    rank: int | None
    stage: int | None
    gpu: str | None
    on_gpu: bool  # kernels were counted; else a CPU's operations
    steps: tuple[int, ...]  # empty where the trace names none and counts as one
    step_ms: float
    each_step_ms: tuple[float, ...]
    counted: Mapping[str, float]  # by category; with the two idle times they make up the step
    busy: Mapping[str, float]  # by category, also while something else ran
    idle_host_ms: float
    idle_queued_ms: float
    causes: Mapping[str, float]  # host activity while the device waited for the next launch
    gemms: Mapping[str, GemmRate]
    longest: tuple[tuple[str, str, float], ...]  # kernels: name, category and time
    unknown: tuple[tuple[str, str, float], ...]  # of those in `other`
    calls: tuple[Call, ...] = field(repr=False, default=())
    # By category of exposed communication, the part that waited for other ranks; None: unknown.
    waited: Mapping[str, float] | None = None

    @property
    def exposed_ms(self) -> float:
        """Time in which only communication ran."""
        return sum(ms for name, ms in self.counted.items() if BY_NAME[name].kind == COMMUNICATION)

    @property
    def compute_ms(self) -> float:
        """Time in which the device computed."""
        return sum(self.counted.values()) - self.exposed_ms

    @property
    def hidden(self) -> dict[str, float]:
        """By category, time in which it ran while the moment was counted for something else."""
        return {name: ms - self.counted[name] for name, ms in self.busy.items()}

    @property
    def accounted(self) -> float:
        """The share of the step in known categories and explained waits."""
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
    # On a CPU a call is cut where another operation runs within it, so no two are alike.
    is_call = _IS_COMMUNICATION[kernels.category] & trace.on_gpu
    calls = tuple(_calls(trace, kernels[is_call], windows))
    alike, which = np.unique(kernels.name * len(CATEGORIES) + kernels.category, return_inverse=True)
    times = np.bincount(which, kernels.end - kernels.start, len(alike)).tolist()
    totals = {
        (trace.names[key // len(CATEGORIES)], CATEGORIES[key % len(CATEGORIES)].name): us
        for key, us in zip(alike.tolist(), times, strict=True)
    }

    def per_step(times: Mapping[Any, float]) -> dict[Any, float]:
        """Return milliseconds a step, from microseconds of all steps."""
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
    """Return the device's boundaries of the traced steps: one more than there are steps.

    The host runs ahead of the device. A step begins on the device when the host has begun it and
    the device has finished the one before. So the windows are wall time, without gap or overlap.
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
    """Divide the microseconds from `start` to `end` among the kernels.

    Return by category the time counted for it, where the first of several in CATEGORIES gets the
    moment; by category the time in which it ran at all; and the gaps of shape (gaps, 2).
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

    Return the microseconds in which the device waited for the host to launch the next kernel (one
    after the last gap too), in which a launched one had not started, and the first by cause.
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
            # The host had waited for the device itself, and so could launch nothing ahead.
            waited = first != NOTHING and _BLOCKED.search(host.trace.names[events.name[first]])
            name = _activity(host, first if waited else middle)
            causes[f"had waited for the GPU in {name}" if waited else name] += float(us)
    return float((launched - start).sum()), float((end - launched).sum()), causes


def _activity(host: Host, event: int) -> str:
    """Return the operation that `event` lies in, else a call of CUDA."""
    if event == NOTHING:
        return "Python, in no operation"
    operation = int(host.operation(np.array([event]))[0])
    name = host.enclosing(event if operation == NOTHING else operation)[0]
    return name if operation == NOTHING else _PARTICULAR.sub("", name).strip() or name


def _calls(trace: Trace, kernels: Column, windows: list[float]) -> list[Call]:
    """Return the communication calls, with the keys that they have on every rank of their group."""
    steps = np.searchsorted(windows[1:-1], kernels.start, side="right")
    ep_ranks = str(trace.header.group_ranks("mesh_ep"))
    calls = []
    for kernel, step in zip(kernels, steps.tolist(), strict=True):
        # DeepEP's kernels name no group.
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
        # The outermost GEMM around each: on a CPU a grouped one is made of others.
        gemm, event = np.full(len(own), NOTHING), own.operation.copy()
        while (inside := event != NOTHING).any():
            found = inside & (flops[event] > 0)
            gemm[found] = event[found]
            event[inside] = host.parent[event[inside]]
        duration = own.end - own.start
        seconds = float(duration[gemm != NOTHING].sum()) / 1e6
        # One operation may launch several kernels.
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
