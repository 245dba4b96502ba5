"""How one rank spends a step: time by category, causes of idle time, GEMM rates.

Each moment counts once: as compute if anything computes, as exposed communication if only
communication runs, and otherwise as idle.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cookbook.base.errors import InputError
from cookbook.base.gpus import peak_tflops
from cookbook.base.yamlfile import shown_path
from cookbook.profile.kernels import BY_NAME, CATEGORIES, COMMUNICATION, GEMMS, NUMBERS
from cookbook.profile.trace import NOTHING, Column, Trace, kernels_of, read_trace

# If the trace's first kernel waited longer than this, a step before the trace was still running.
_QUEUED_US = 1000.0
_MOST_KERNELS = 25
_MOST_CAUSES = 8
_BLOCKED = re.compile(r"Synchronize|Memcpy")
# Parts of an event's name to strip: module names, region numbers and graph hashes.
_PARTICULAR = re.compile(r"\s+\(.*\)|\s+for \S+|(?<=[\w)])#.*|:?\s*\d+/\d+|\bf[0-9a-z]{20,}|#+")


@dataclass(frozen=True)
class GemmRate:
    """The time and speed of one kind of GEMM."""

    ms: float  # milliseconds per step
    known_ms: float  # milliseconds per step of the GEMMs whose shapes are known
    tflops: float | None  # TFLOP/s of the GEMMs whose shapes are known; None if none are
    peak_share: float | None  # share of the GPU's peak for the inputs' formats; None if unknown


@dataclass(frozen=True)
class CategoryTime:
    """The time of a category of kernels, in milliseconds per step."""

    kind: str
    ms: float  # if several categories run at once, the first in CATEGORIES gets the time
    share: float  # share of the step
    hidden_ms: float  # time in which this category ran, but another one got the time


@dataclass(frozen=True)
class Idle:
    """The time during which the device did nothing, in milliseconds per step."""

    host_ms: float  # idle until the host launched the next kernel
    queued_ms: float  # idle from that launch to the kernel's start
    causes_ms: Mapping[str, float]  # parts of `host_ms` by what the host was doing


@dataclass(frozen=True)
class KernelTime:
    """The time of all kernels of one name, in milliseconds per step."""

    name: str
    category: str
    ms: float


@dataclass(eq=False)
class RankProfile:
    """How one rank spends a step; times are milliseconds per step, averaged over traced steps."""

    rank: int | None
    stage: int | None
    trace: str
    steps: tuple[int, ...]  # step numbers; if the trace marks none, it counts as a single step
    step_ms: float
    each_step_ms: Sequence[float]
    accounted: float  # 1 minus the share of unknown kernels (category `other`) in the step
    compute_ms: float
    exposed_communication_ms: float  # time during which only communication ran
    categories: Mapping[str, CategoryTime]
    idle: Idle
    gemms: Mapping[str, GemmRate]
    longest_kernels: Sequence[KernelTime]
    unknown: Sequence[KernelTime]  # longest kernels of category `other`
    gpu: str | None
    on_gpu: bool  # whether GPU kernels were counted, rather than a CPU's operations

    def counted_ms(self, category: str) -> float:
        """Return the `ms` of a category's `CategoryTime`, or 0 if none of its kernels ran."""
        return self.categories[category].ms if category in self.categories else 0.0


def profile_rank(path: Path) -> RankProfile:
    trace = read_trace(path)
    kernels = kernels_of(trace)
    windows = step_windows(trace, kernels)
    start, end, count = windows[0], windows[-1], len(windows) - 1
    if start == end:
        raise InputError(shown_path(path), "covers no time", "profile the recipe again")
    step_ms = _per_step(end - start, count)
    divided, gaps = divide(kernels, start, end)
    categories = {}
    for name, times in divided.items():
        counted, busy = (_per_step(us, count) for us in times)
        share = counted / step_ms
        categories[name] = CategoryTime(BY_NAME[name].kind, counted, share, busy - counted)
    exposed = sum(own.ms for own in categories.values() if own.kind == COMMUNICATION)
    idle = explain_idle(gaps, kernels, trace, count)
    kernels = kernels[(kernels.end > start) & (kernels.start < end)]
    alike, which = np.unique([kernels.name, kernels.category], axis=1, return_inverse=True)
    durations = np.bincount(which.reshape(-1), kernels.end - kernels.start)
    longest = [
        KernelTime(trace.names[name], CATEGORIES[category].name, _per_step(us, count))
        for name, category, us in zip(*alike.tolist(), durations.tolist(), strict=True)
    ]
    longest.sort(key=lambda kernel: -kernel.ms)
    unknown = [kernel for kernel in longest if kernel.category == "other"]
    other = categories.get("other")
    return RankProfile(
        rank=trace.header.rank,
        stage=trace.header.stage,
        trace=shown_path(path),
        steps=tuple(step.number for step in trace.steps),
        step_ms=step_ms,
        each_step_ms=(np.diff(windows) / 1000).tolist(),
        accounted=1 - other.share if other else 1.0,
        compute_ms=sum(own.ms for own in categories.values()) - exposed,
        exposed_communication_ms=exposed,
        categories=categories,
        idle=idle,
        gemms=_gemm_rates(trace, kernels, count),
        longest_kernels=longest[:_MOST_KERNELS],
        unknown=unknown[:_MOST_KERNELS],
        gpu=trace.gpu,
        on_gpu=trace.on_gpu,
    )


def _per_step(us: float, count: int) -> float:
    return us / count / 1000


def step_windows(trace: Trace, kernels: Column) -> list[float]:
    """Return when each traced step begins on the device, and when the last one ends.

    The host runs ahead of the device. A step begins on the device once the host has begun it and
    the device has finished the previous step.
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
) -> tuple[dict[str, tuple[float, float]], Column]:
    """Divide the microseconds from `start` to `end` among the categories of kernels.

    Return each category's counted time and its total running time, and the starts and ends of idle
    gaps, shape (gaps, 2). Overlapping time is counted only for the first category in CATEGORIES.
    """
    first, last = np.clip(kernels.start, start, end), np.clip(kernels.end, start, end)
    edges = np.unique(np.concatenate([[start, end], first, last]))
    lengths = np.diff(edges)
    changes = np.zeros((len(CATEGORIES), len(edges)), dtype=np.int32)
    np.add.at(changes, (kernels.category, np.searchsorted(edges, first)), 1)
    np.add.at(changes, (kernels.category, np.searchsorted(edges, last)), -1)
    runs = changes.cumsum(axis=1)[:, :-1] > 0
    counts_for = np.where(runs.any(axis=0), runs.argmax(axis=0), NOTHING)
    times = {
        category.name: (float(lengths[counts_for == number].sum()), float(lengths[own].sum()))
        for number, (category, own) in enumerate(zip(CATEGORIES, runs, strict=True))
        if own.any()
    }
    change = np.diff(np.concatenate([[0], counts_for == NOTHING, [0]]))
    return times, np.stack([edges[change == 1], edges[change == -1]], axis=1)


def explain_idle(gaps: Column, kernels: Column, trace: Trace, count: int) -> Idle:
    """Return how long the device was idle in `gaps`, and what the host did meanwhile."""
    start, end = gaps.T
    following = np.searchsorted(kernels.start, end)
    launched = np.append(kernels.launched, np.nan)[following]
    thread = np.append(kernels.thread, NOTHING)[following]
    is_known = ~np.isnan(launched) & trace.on_gpu
    busiest = statistics.mode(trace.host.thread.tolist() or [NOTHING])
    thread = np.where(is_known, thread, busiest)
    launched = np.where(is_known, np.clip(launched, start, end), end)
    causes: dict[str, float] = defaultdict(float)
    by_thread = np.argsort(thread, kind="stable")
    own = by_thread[(launched > start)[by_thread]]
    before = trace.innermost(thread[own], start[own])
    during = trace.innermost(thread[own], (start[own] + launched[own]) / 2)
    for first, middle, us in zip(before, during, (launched - start)[own].tolist(), strict=True):
        # If the host was waiting for the device when the gap began, that wait caused the gap.
        waited = first != NOTHING and _BLOCKED.search(trace.inside[first][0])
        name = _activity(trace, first if waited else middle)
        causes[f"had waited for the GPU in {name}" if waited else name] += us
    most = sorted(causes.items(), key=lambda cause: -cause[1])[:_MOST_CAUSES]
    return Idle(
        host_ms=_per_step(float((launched - start).sum()), count),
        queued_ms=_per_step(float((end - launched).sum()), count),
        causes_ms={name: _per_step(us, count) for name, us in most},
    )


def _activity(trace: Trace, event: int) -> str:
    if event == NOTHING:
        return "Python, in no operation"
    operation = trace.operation[event]
    if operation == NOTHING:
        return trace.inside[event][0]
    name = trace.inside[operation][0]
    return _PARTICULAR.sub("", name).strip() or name


def _gemm_rates(trace: Trace, kernels: Column, count: int) -> dict[str, GemmRate]:
    flops, bits = trace.host.flops, trace.host.bits
    rates = {}
    for category in GEMMS:
        own = kernels[kernels.category == NUMBERS[category]]
        if not len(own):
            continue
        gemm = trace.gemm[own.operation]
        duration = own.end - own.start
        seconds = float(duration[gemm != NOTHING].sum()) / 1e6
        work = np.unique(gemm[gemm != NOTHING])
        peaks = [peak_tflops(trace.gpu, int(size)) if trace.gpu else None for size in bits[work]]
        known = [
            flop / peak for flop, peak in zip(flops[work].tolist(), peaks, strict=True) if peak
        ]
        is_known = seconds and len(known) == len(peaks)
        rates[category] = GemmRate(
            ms=_per_step(float(duration.sum()), count),
            known_ms=seconds * 1000 / count,
            tflops=float(flops[work].sum()) / seconds / 1e12 if seconds else None,
            peak_share=sum(known) / seconds / 1e12 if is_known else None,
        )
    return rates
