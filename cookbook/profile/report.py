"""A profile as tables, as one JSON object, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.tables import INK, QUIET, draw_figure, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.profile.kernels import BY_NAME, CATEGORIES, COMMUNICATION
from cookbook.profile.profile import Profile
from cookbook.profile.rank import RankProfile

HOST = "idle: the host had launched nothing"
QUEUED = "idle: launched, not yet started"
# Beyond this share of a step in unknown kernels the report names them.
_MOST_UNKNOWN = 0.05
_LEAST_CAUSE = 0.001
_MOST_CAUSES = 5


def step_parts(rank: RankProfile) -> list[tuple[str, str, float]]:
    """Return title, colour and milliseconds of each part of a step."""
    parts = []
    for category in CATEGORIES:
        exposed = ", exposed" if category.kind == COMMUNICATION else ""
        ms = rank.counted.get(category.name, 0.0)
        parts.append((category.title + exposed, category.colour, ms))
    idle = [(HOST, "#e0e0e0", rank.idle_host_ms), (QUEUED, "#c2c2c2", rank.idle_queued_ms)]
    return parts + idle


def render_text(profile: Profile, width: int | None = None) -> str:
    """Return the report's tables; the last column is wrapped to `width` where that is given."""
    first = profile.ranks[0]
    numbers = ", ".join(map(str, first.steps))
    steps = f"mean of steps {numbers}" if len(first.steps) > 1 else f"step {numbers}"
    parts = [
        f"{profile.source}: {steps if first.steps else 'the whole trace'}, {profile.device}",
        _steps(profile),
        *_details(profile, width),
        text_table([["-", note] for note in _notes(profile)], width=width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _steps(profile: Profile) -> str:
    shown = [(profile.ranks[index], role) for index, role in profile.shown()]
    rows = [["ms a step, share"]]
    for rank, role in shown:
        rows[0] += [profile.name(rank), role]
    for parts in zip(*(step_parts(rank) for rank, _ in shown), strict=True):
        if any(ms for *_, ms in parts) or parts[0][0] == HOST:
            rows.append([parts[0][0]])
            for (rank, _), (*_, ms) in zip(shown, parts, strict=True):
                rows[-1] += [f"{ms:,.1f}", f"{ms / rank.step_ms:.1%}"]
    rows.append(["step"])
    for rank, _ in shown:
        rows[-1] += [f"{rank.step_ms:,.1f}", "100.0%"]
    return text_table(rows, align="l" + "rr" * len(shown))


def _details(profile: Profile, width: int | None) -> Iterator[str]:
    """Yield the tables of communication, of GEMMs and of the host in idle times."""
    communication = [["communication", "ran", "hidden", "exposed", "of it waiting"]]
    gemms = [["GEMMs", "ms", "TFLOP/s", "of peak", "shapes known"]]
    idle = [["the host meanwhile", "ms", "was in"]]
    for index, _ in profile.shown():
        rank, waited = profile.ranks[index], profile.waited[index] or {}
        name = profile.name(rank)
        for kind, busy in rank.busy.items():
            if BY_NAME[kind].kind != COMMUNICATION:
                continue
            waiting = "not known"
            if kind in waited:
                waiting = f"{waited[kind]:,.1f} for other ranks"
            times = [f"{ms:,.1f}" for ms in (busy, rank.hidden[kind], rank.counted[kind])]
            communication.append([f"{BY_NAME[kind].title}, {name}", *times, waiting])
        for kind, rate in rank.gemms.items():
            speed = f"{rate.tflops:,.3g}" if rate.tflops is not None else "-"
            share = f"{rate.peak_share:.0%}" if rate.peak_share is not None else "-"
            known = f"for {rate.known_ms / rate.ms:.0%} of the time" if rate.ms else "-"
            gemms.append([f"{BY_NAME[kind].title}, {name}", f"{rate.ms:,.1f}", speed, share, known])
        for cause, ms in list(rank.causes.items())[:_MOST_CAUSES]:
            if ms >= _LEAST_CAUSE * rank.step_ms:
                idle.append([name, f"{ms:,.1f}", cause])
    for rows, align in ((communication, "lrrrl"), (gemms, "lrrrl"), (idle, "lrl")):
        if len(rows) > 1:
            yield text_table(rows, align=align, width=width)


def _notes(profile: Profile) -> Iterator[str]:
    ranks = profile.ranks
    if not all(rank.steps for rank in ranks):
        yield "no ProfilerStep in the trace: the whole trace is counted as one step"
    for rank in ranks:
        share = 1 - rank.accounted
        if share > _MOST_UNKNOWN:
            most = ", ".join(f"{name[:60]} ({ms:,.1f} ms)" for name, _, ms in rank.unknown[:5])
            yield (
                f"{profile.name(rank)}: {share:.1%} of the step is in kernels that no rule knows: "
                f"{most}; add rules to cookbook/profile/kernels.py"
            )
    if not all(rank.on_gpu for rank in ranks):
        yield (
            "a CPU has no kernels: the operations of its threads are counted, each without those "
            "within it; gloo does not say which group communicates, and no peak is known"
        )
    if any(rank.calls for rank in ranks):
        if any(profile.waited):
            yield (
                f"waiting for other ranks: the same calls on {len(ranks)} ranks, compared by how "
                "long they took; the last to come waits least"
            )
        else:
            yield (
                "one rank's trace cannot tell waiting for other ranks from a slow network; name "
                "more with --ranks"
            )
    yield "the profiler slows the host down: take speeds from a run without it"


def render_json(profile: Profile) -> str:
    """Return one JSON object; times in ms a step, an unknown value is null."""
    content = {
        "source": profile.source,
        "device": profile.device,
        "on_gpu": profile.ranks[0].on_gpu,
        "ranks": [
            _rank_json(rank, waited)
            for rank, waited in zip(profile.ranks, profile.waited, strict=True)
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def _rank_json(rank: RankProfile, waited: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "trace": shown_path(rank.path),
        "steps": rank.steps,
        "step_ms": rank.step_ms,
        "each_step_ms": rank.each_step_ms,
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
            "causes_ms": rank.causes,
        },
        "waiting_for_other_ranks_ms": waited,
        "gemms": {name: asdict(rate) for name, rate in rank.gemms.items()},
        "longest_kernels": [
            {"name": name, "category": category, "ms": ms} for name, category, ms in rank.longest
        ],
    }


def render_svg(profile: Profile) -> bytes:
    """Return a bar for each rank of the report, divided as its step is."""
    shown = [(profile.ranks[index], role) for index, role in profile.shown()]
    longest = max(rank.step_ms for rank, _ in shown) or 1.0

    def paint(axes: Any) -> None:
        axes.set(xlim=(0, longest), ylim=(len(shown) - 0.4, -0.7), yticks=[])
        axes.set_xlabel(f"milliseconds of a step, {profile.source}", color=QUIET)
        labelled: set[str] = set()
        for row, (rank, role) in enumerate(shown):
            name = profile.name(rank) + (f" ({role})" if role else "")
            axes.text(0, row - 0.32, name, color=INK, weight="bold")
            left = 0.0
            for title, colour, ms in step_parts(rank):
                if not ms:
                    continue
                label = None if title in labelled else title
                labelled.add(title)
                axes.barh(row, ms, 0.42, left=left, color=colour, label=label)
                # Narrower parts have no room for their number.
                if ms > 0.05 * longest:
                    place = {"ha": "center", "va": "center", "fontsize": 8}
                    axes.text(left + ms / 2, row, f"{ms:,.0f}", color=INK, **place)
                left += ms

    height = 2.2 + 0.6 * len(shown)
    try:
        return draw_figure("profile", height, paint, grid="x", legend=INK)["svg"]
    except ModuleNotFoundError as error:
        raise InputError("--figure", f"{error.name} is not installed", "run: ./setup.sh") from None
