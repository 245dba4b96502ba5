"""Where a step of one rank goes: its trace, read and counted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.base.gpus import peak_tflops
from cookbook.profile.classify import Kernel, kernels_of, longest
from cookbook.profile.host import NOTHING, Host
from cookbook.profile.idle import Idle, explain_idle
from cookbook.profile.kernels import BY_NAME, COMMUNICATION, GEMMS
from cookbook.profile.timeline import Division, Span, divide
from cookbook.profile.trace import Trace, read_trace

# A first kernel that waited longer in its queue found the device busy with the step before.
_QUEUED_US = 1000.0
_MOST_KERNELS = 25
_MOST_CAUSES = 8
# From so few calls nobody can tell how long an undisturbed one takes.
_FEWEST_CALLS = 3


@dataclass(frozen=True)
class GemmRate:
    """How fast GEMMs of one kind ran, of those whose shapes are known.

    Attributes:
        ms: a step's time in all of them; `known_ms`: in those whose shapes are known.
        tflops: per second; None where no shape is known.
        peak_share: of the card's peak for their inputs' format; None where that is not known.
    """

    ms: float
    known_ms: float
    tflops: float | None
    peak_share: float | None


@dataclass(frozen=True)
class Call:
    """A communication kernel: what to match it by with other ranks, and how long it took (us)."""

    category: str
    step: int
    key: tuple[str, ...]
    duration: float


@dataclass(frozen=True)
class RankProfile:
    """Where a step of one rank goes; times in milliseconds a step, mean of the traced steps.

    Attributes:
        on_gpu: kernels were counted; else a CPU's operations.
        steps: numbers of the traced steps; empty where the trace names none and counts as one.
        counted: by category; with `idle_host_ms` and `idle_queued_ms` they are the step.
        busy: by category, also what ran beside something else.
        beyond_fastest: of exposed communication by category, what is beyond the fastest call of
            its kind: waiting for other ranks, or a slower network. None where that is not known.
        causes: what the host was in while the device waited for it.
        longest: names, category and time of the longest kernels.
    """

    path: Path
    rank: int | None
    stage: int | None
    gpu: str | None
    on_gpu: bool
    steps: tuple[int, ...]
    step_ms: float
    each_step_ms: tuple[float, ...]
    counted: Mapping[str, float]
    busy: Mapping[str, float]
    idle_host_ms: float
    idle_queued_ms: float
    causes: Mapping[str, float]
    beyond_fastest: Mapping[str, float]
    gemms: Mapping[str, GemmRate]
    longest: tuple[tuple[str, str, float], ...]
    unknown: tuple[tuple[str, str, float], ...]
    calls: tuple[Call, ...] = field(repr=False, default=())

    @property
    def compute_ms(self) -> float:
        """Time in which the device computed."""
        return sum(ms for name, ms in self.counted.items() if BY_NAME[name].kind != COMMUNICATION)

    @property
    def exposed_ms(self) -> float:
        """Time in which only communication ran."""
        return sum(ms for name, ms in self.counted.items() if BY_NAME[name].kind == COMMUNICATION)

    @property
    def hidden(self) -> dict[str, float]:
        """By category, what ran beside something that the moment was counted for."""
        return {name: ms - self.counted.get(name, 0.0) for name, ms in self.busy.items()}

    @property
    def accounted(self) -> float:
        """The share of the step that a named category or an explained wait takes."""
        return 1 - self.counted.get("other", 0.0) / self.step_ms if self.step_ms else 0.0


def profile_rank(path: Path) -> RankProfile:
    """Read and count one trace."""
    trace = read_trace(path)
    host = Host(trace)
    kernels = kernels_of(trace, host)
    windows = step_windows(trace, kernels)
    start, end = windows[0], windows[-1]
    count = len(windows) - 1
    spans = [Span(kernel.start, kernel.end, kernel.category) for kernel in kernels]
    division = divide(spans, start, end)
    idle = explain_idle(division.idle, kernels, host)
    inside = [kernel for kernel in kernels if kernel.end > start and kernel.start < end]
    # On a CPU a call is cut where another operation runs within it, so no two are alike.
    calls = [kernel for kernel in inside if trace.on_gpu and _is_call(kernel)]

    def a_step(times: Mapping[str, float]) -> dict[str, float]:
        return {name: time / count / 1000 for name, time in times.items()}

    longest_first = [(name, kind, us / count / 1000) for name, kind, us in longest(inside, 10**6)]
    return RankProfile(
        path=path,
        rank=trace.rank,
        stage=trace.stage,
        gpu=trace.gpu,
        on_gpu=trace.on_gpu,
        steps=tuple(step.number for step in trace.steps),
        step_ms=(end - start) / count / 1000,
        each_step_ms=tuple((last - first) / 1000 for first, last in itertools.pairwise(windows)),
        counted=a_step(division.counted),
        busy=a_step(division.busy),
        idle_host_ms=idle.host / count / 1000,
        idle_queued_ms=idle.queued / count / 1000,
        causes=a_step(_largest(idle)),
        beyond_fastest=a_step(_beyond_fastest(calls, division)),
        gemms=_gemm_rates(trace, host, inside, count),
        longest=tuple(longest_first[:_MOST_KERNELS]),
        unknown=tuple([one for one in longest_first if one[1] == "other"][:_MOST_KERNELS]),
        calls=tuple(_numbered(calls, windows, trace.group_ranks("mesh_ep"))),
    )


def step_windows(trace: Trace, kernels: Sequence[Kernel]) -> list[float]:
    """The device's boundaries of the traced steps: one more than there are steps.

    The host runs ahead of the device. A step begins on the device when the host has begun it and
    the device has finished the one before. So the windows are wall time, without gap or overlap.
    """
    ends = [kernel.end for kernel in kernels]
    if not trace.steps:
        host = trace.host
        starts = [kernel.start for kernel in kernels] or list(host.start)
        return [min(starts), max(ends or list(host.end))]
    boundaries = [trace.steps[0].start]
    finished = trace.steps[0].start
    for number, step in enumerate(trace.steps):
        own = [
            kernel
            for kernel in kernels
            if kernel.launched is not None and step.start <= kernel.launched < step.end
        ]
        if number:
            boundaries.append(max(step.start, finished))
        elif own and trace.on_gpu and own[0].start - (own[0].launched or 0.0) > _QUEUED_US:
            boundaries[0] = own[0].start
        finished = max([finished, *(kernel.end for kernel in own)])
    last = trace.steps[-1].end
    return [*boundaries, max(last, finished) if trace.on_gpu else last]


def _largest(idle: Idle) -> dict[str, float]:
    ordered = sorted(idle.causes.items(), key=lambda item: -item[1])
    return dict(ordered[:_MOST_CAUSES])


def _call_key(kernel: Kernel) -> tuple[str, ...]:
    """What the same call has on every rank of its group; DeepEP's kernels name no group."""
    name = kernel.name.split("<")[0].split("(")[0]
    collective = kernel.collective
    if collective is None:
        return (name,)
    return (collective.name, collective.description, collective.ranks)


def _is_call(kernel: Kernel) -> bool:
    return BY_NAME[kernel.category].kind == COMMUNICATION


def _numbered(
    calls: Sequence[Kernel], windows: Sequence[float], ep_ranks: Sequence[int]
) -> list[Call]:
    """The calls with the index of their step, for other ranks' to be matched with."""
    found = []
    step = 0
    for kernel in calls:
        while step < len(windows) - 2 and kernel.start >= windows[step + 1]:
            step += 1
        key = _call_key(kernel)
        key = key if kernel.collective else (*key, str(ep_ranks))
        found.append(Call(kernel.category, step, key, kernel.end - kernel.start))
    return found


def _beyond_fastest(calls: Sequence[Kernel], division: Division) -> dict[str, float]:
    """Of the exposed communication, what its calls took beyond the fastest of the same size."""
    alike: dict[tuple[object, ...], list[float]] = {}
    for kernel in calls:
        elements = kernel.collective.elements if kernel.collective else ()
        key = (kernel.category, *_call_key(kernel), *elements)
        alike.setdefault(key, []).append(kernel.end - kernel.start)
    totals: dict[str, float] = {}
    beyond: dict[str, float] = {}
    for key, durations in alike.items():
        category = str(key[0])
        totals[category] = totals.get(category, 0.0) + sum(durations)
        if len(durations) >= _FEWEST_CALLS:
            slow = sum(durations) - min(durations) * len(durations)
            beyond[category] = beyond.get(category, 0.0) + slow
    return {
        category: division.counted.get(category, 0.0) * slow / totals[category]
        for category, slow in beyond.items()
        if totals[category]
    }


def _outermost_gemm(trace: Trace, host: Host, event: int) -> int:
    """The outermost GEMM that `event` is or lies in: on a CPU a grouped one is made of others."""
    found = NOTHING
    while event != NOTHING:
        if event in trace.gemms:
            found = event
        event = host.parent[event]
    return found


def _gemm_rates(
    trace: Trace, host: Host, kernels: Sequence[Kernel], count: int
) -> dict[str, GemmRate]:
    rates = {}
    for category in GEMMS:
        own = [kernel for kernel in kernels if kernel.category == category]
        if not own:
            continue
        operations = [_outermost_gemm(trace, host, kernel.operation) for kernel in own]
        # One operation may launch several kernels.
        work = [trace.gemms[event] for event in {*operations} - {NOTHING}]
        seconds = sum(
            (kernel.end - kernel.start) / 1e6
            for kernel, operation in zip(own, operations, strict=True)
            if operation != NOTHING
        )
        peaks = [peak_tflops(trace.gpu, gemm.bits) if trace.gpu else None for gemm in work]
        least = sum(
            gemm.flops / peak / 1e12 for gemm, peak in zip(work, peaks, strict=True) if peak
        )
        flops = sum(gemm.flops for gemm in work)
        is_known = seconds > 0 and flops > 0
        rates[category] = GemmRate(
            ms=sum(kernel.end - kernel.start for kernel in own) / count / 1000,
            known_ms=seconds * 1000 / count,
            tflops=flops / seconds / 1e12 if is_known else None,
            peak_share=least / seconds if is_known and all(peaks) else None,
        )
    return rates
