"""A profile in words and tables, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cookbook.base.tables import text_table
from cookbook.base.yamlfile import shown_path
from cookbook.profile.kernels import BY_NAME, CATEGORIES, COMMUNICATION, GEMMS
from cookbook.profile.profile import Profile
from cookbook.profile.rank import RankProfile

HOST = "idle: the host had launched nothing"
QUEUED = "idle: launched, not yet started"
# A share of a step that names no known kernel is said beyond this.
_MOST_UNKNOWN = 0.05
_LEAST_CAUSE = 0.001
_MOST_CAUSES = 5


def render_text(profile: Profile, width: int | None = None) -> str:
    """What a person reads; the last column is wrapped to `width` where that is given."""
    parts = [
        _heading(profile),
        _steps(profile),
        _communication(profile, width),
        _gemms(profile, width),
        _idle(profile, width),
        text_table([["-", note] for note in _notes(profile)], width=width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(profile: Profile) -> str:
    first = profile.ranks[0]
    device = first.gpu or ("GPU" if first.on_gpu else "CPU")
    numbers = ", ".join(map(str, first.steps))
    steps = f"mean of steps {numbers}" if len(first.steps) > 1 else f"step {numbers}"
    return f"{profile.source}: {steps if first.steps else 'the whole trace'}, {device}"


def _steps(profile: Profile) -> str:
    shown = profile.shown()
    ranks = [profile.ranks[index] for index, _ in shown]
    rows = [["ms a step, share"]]
    for rank, (_, said) in zip(ranks, shown, strict=True):
        rows[0] += [profile.name(rank), said]
    for category in CATEGORIES:
        if any(category.name in rank.counted for rank in ranks):
            exposed = ", exposed" if category.kind == COMMUNICATION else ""
            rows.append([category.title + exposed])
            for rank in ranks:
                rows[-1] += _with_share(rank.counted.get(category.name, 0.0), rank)
    rows.append([HOST])
    for rank in ranks:
        rows[-1] += _with_share(rank.idle_host_ms, rank)
    if any(rank.on_gpu for rank in ranks):
        rows.append([QUEUED])
        for rank in ranks:
            rows[-1] += _with_share(rank.idle_queued_ms, rank)
    rows.append(["step"])
    for rank in ranks:
        rows[-1] += _with_share(rank.step_ms, rank)
    return text_table(rows, align="l" + "rr" * len(ranks))


def _with_share(ms: float, rank: RankProfile) -> list[str]:
    return [_ms(ms), f"{ms / rank.step_ms:.1%}" if rank.step_ms else "-"]


def _ms(ms: float) -> str:
    return f"{ms:,.1f}"


def _communication(profile: Profile, width: int | None) -> str:
    rows = [["communication", "ran", "hidden", "exposed", "of it waiting"]]
    for index, _ in profile.shown():
        rank, waited = profile.ranks[index], profile.waited[index]
        for name, busy in rank.busy.items():
            if BY_NAME[name].kind != COMMUNICATION:
                continue
            exposed = rank.counted.get(name, 0.0)
            if waited is not None and name in waited:
                waiting = f"{_ms(waited[name])} for other ranks"
            elif name in rank.beyond_fastest:
                waiting = f"up to {_ms(rank.beyond_fastest[name])} beyond the fastest call"
            else:
                waiting = "not known"
            title = f"{BY_NAME[name].title}, {profile.name(rank)}"
            rows.append([title, _ms(busy), _ms(busy - exposed), _ms(exposed), waiting])
    return text_table(rows, align="lrrrl", width=width) if len(rows) > 1 else ""


def _gemms(profile: Profile, width: int | None) -> str:
    rows = [["GEMMs", "ms", "TFLOP/s", "of peak", "shapes known"]]
    for index, _ in profile.shown():
        rank = profile.ranks[index]
        for name in GEMMS:
            if rate := rank.gemms.get(name):
                rows.append(
                    [
                        f"{BY_NAME[name].title}, {profile.name(rank)}",
                        _ms(rate.ms),
                        f"{rate.tflops:,.3g}" if rate.tflops is not None else "-",
                        f"{rate.peak_share:.0%}" if rate.peak_share is not None else "-",
                        f"for {rate.known_ms / rate.ms:.0%} of the time" if rate.ms else "-",
                    ]
                )
    return text_table(rows, align="lrrrl", width=width) if len(rows) > 1 else ""


def _idle(profile: Profile, width: int | None) -> str:
    rows = []
    for index, _ in profile.shown():
        rank = profile.ranks[index]
        for cause, ms in list(rank.causes.items())[:_MOST_CAUSES]:
            if ms >= _LEAST_CAUSE * rank.step_ms:
                rows.append([profile.name(rank), _ms(ms), cause])
    if not rows:
        return ""
    head = ["the host meanwhile", "ms", "was in"]
    return text_table([head, *rows], align="lrl", width=width)


def _notes(profile: Profile) -> Iterator[str]:
    ranks = profile.ranks
    if not all(rank.steps for rank in ranks):
        yield "no ProfilerStep in the trace: the whole trace is counted as one step"
    for rank in ranks:
        share = 1 - rank.accounted
        if share > _MOST_UNKNOWN:
            most = ", ".join(f"{name[:60]} ({_ms(ms)} ms)" for name, _, ms in rank.unknown[:5])
            yield (
                f"{profile.name(rank)}: {share:.1%} of the step is in kernels that no rule knows: "
                f"{most}; add rules to cookbook/profile/kernels.py"
            )
    if not all(rank.on_gpu for rank in ranks):
        yield (
            "a CPU has no kernels: the operations of its threads are counted, each without those "
            "within it; gloo does not say which group communicates, and no peak is known"
        )
    communicates = any(rank.calls for rank in ranks)
    if communicates and all(waited is None for waited in profile.waited):
        yield (
            "one rank's trace cannot tell waiting for other ranks from a slow network: 'beyond "
            "the fastest call' of the same size is an upper limit; name more ranks with --ranks"
        )
    elif communicates:
        yield (
            f"waiting for other ranks: the same calls on {len(ranks)} ranks, compared by how "
            "long they took; the last to come waits least"
        )
    yield "the profiler slows the host down: take speeds from a run without it"


def render_json(profile: Profile) -> str:
    """One object; times in ms a step, a value that is not known is null."""
    first = profile.ranks[0]
    content = {
        "source": profile.source,
        "device": first.gpu or ("GPU" if first.on_gpu else "CPU"),
        "on_gpu": first.on_gpu,
        "ranks": [
            _rank_json(rank, waited)
            for rank, waited in zip(profile.ranks, profile.waited, strict=True)
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def _rank_json(rank: RankProfile, waited: Any) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "trace": shown_path(rank.path),
        "steps": list(rank.steps),
        "step_ms": rank.step_ms,
        "each_step_ms": list(rank.each_step_ms),
        "accounted": rank.accounted,
        "compute_ms": rank.compute_ms,
        "exposed_communication_ms": rank.exposed_ms,
        "categories": {
            name: {
                "kind": BY_NAME[name].kind,
                "ms": ms,
                "share": ms / rank.step_ms if rank.step_ms else None,
                "hidden_ms": rank.hidden[name],
            }
            for name, ms in rank.counted.items()
        },
        "idle": {
            "host_ms": rank.idle_host_ms,
            "queued_ms": rank.idle_queued_ms,
            "causes_ms": dict(rank.causes),
        },
        "waiting_for_other_ranks_ms": dict(waited) if waited is not None else None,
        "beyond_fastest_call_ms": dict(rank.beyond_fastest),
        "gemms": {
            name: {
                "ms": rate.ms,
                "known_ms": rate.known_ms,
                "tflops": rate.tflops,
                "peak_share": rate.peak_share,
            }
            for name, rate in rank.gemms.items()
        },
        "longest_kernels": [
            {"name": name, "category": category, "ms": ms} for name, category, ms in rank.longest
        ],
    }
