"""The profile of a job: its traces, and a report as text or JSON."""

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cookbook.base.errors import InputError, JobError
from cookbook.base.tables import text_table
from cookbook.base.yamlfile import shown_path
from cookbook.profile.kernels import BY_NAME, CATEGORIES, COMMUNICATION
from cookbook.profile.rank import RankProfile, profile_rank
from cookbook.run.folder import CellFolder

# The most traces to read by default. At even distances they are of all pipeline stages.
MOST_TRACES = 8
_TRACE = re.compile(r"rank[-_]?(\d+).*\.json(\.gz)?")


@dataclass(frozen=True)
class Profile:
    """The profiles of all ranks whose traces were read, ordered by stage, then by rank number."""

    source: str
    ranks: Sequence[RankProfile]

    @property
    def device(self) -> str:
        """The GPU's name, or `GPU` if unknown, or `CPU`."""
        return self.ranks[0].gpu or ("GPU" if self.ranks[0].on_gpu else "CPU")

    def name(self, rank: RankProfile) -> str:
        """Return a name such as `rank 128`, prefixed with the stage if there are several stages."""
        number = "?" if rank.rank is None else rank.rank
        has_stages = len({rank.stage for rank in self.ranks}) > 1
        return f"stage {rank.stage}, rank {number}" if has_stages else f"rank {number}"

    def shown(self) -> list[tuple[RankProfile, str]]:
        """Return the ranks to report, with their roles.

        For each pipeline stage, report its first rank. If several ranks of the stage were read,
        also report the ranks with the most and the least compute time.
        """
        chosen: list[tuple[RankProfile, str]] = []
        for _, group in itertools.groupby(self.ranks, key=lambda rank: rank.stage or 0):
            own = list(group)
            roles: dict[RankProfile, list[str]] = {own[0]: []}
            if len(own) > 1:
                fastest, *_, slowest = sorted(own, key=lambda rank: rank.compute_ms)
                roles.setdefault(slowest, []).append("slowest")
                roles.setdefault(fastest, []).append("fastest")
            chosen += [(rank, ", ".join(words)) for rank, words in roles.items()]
        return chosen


def cell_traces(cell: CellFolder) -> dict[int, Path]:
    """Return the traces of the newest attempt that wrote any, by rank; empty if none did."""
    found = (_newest(attempt.traces) for attempt in reversed(cell.attempts()))
    return next((traces for traces in found if traces), {})


def folder_traces(folder: Path) -> dict[int, Path]:
    """Return the traces in `folder`, or in its newest subfolder `iteration_<step>`, by rank."""
    if traces := _newest(folder):
        return traces
    remedy = "profile it: python submit.py profile RECIPE"
    raise InputError(shown_path(folder), "holds no trace (rank<R>_trace.json)", remedy)


def _newest(folder: Path) -> dict[int, Path]:
    steps = folder.glob("iteration_*[0-9]")
    newest_first = sorted(steps, key=lambda path: int(path.name.split("_")[1]), reverse=True)
    for candidate in (folder, *newest_first):
        matches = ((_TRACE.fullmatch(path.name), path) for path in candidate.glob("*"))
        if found := {int(match[1]): path for match, path in matches if match and path.is_file()}:
            return dict(sorted(found.items()))
    return {}


def choose_ranks(traces: Mapping[int, Path], asked: str | None) -> list[Path]:
    """Return the traces selected by `asked`: `all`, rank numbers separated by commas, or None.

    None selects all traces or, if there are more than `MOST_TRACES`, as many at even distances.
    """
    if asked in (None, "all"):
        every = 1 if asked else -(-len(traces) // MOST_TRACES)
        return list(traces.values())[::every]
    known = {str(rank): path for rank, path in traces.items()}
    chosen = {word.strip() for word in str(asked).split(",")}
    for number in sorted(chosen - known.keys()):
        allowed = f"all, or some of {', '.join(known)}, separated by commas"
        raise InputError("--ranks", f"found {number!r}, allowed: {allowed}")
    return [path for number, path in known.items() if number in chosen]


def make_profile(source: str, paths: Sequence[Path]) -> Profile:
    """Read traces in parallel; raise InputError for a broken trace, JobError if a process died."""
    workers = min(len(paths), len(os.sched_getaffinity(0)))
    try:
        # Let Ctrl-C kill the worker processes, so that they print no tracebacks.
        with ProcessPoolExecutor(
            workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
        ) as pool:
            ranks = list(pool.map(profile_rank, paths))
    except BrokenProcessPool:
        found = f"{source}: a process that read a trace was killed, perhaps for lack of memory"
        raise JobError(f"{found}; read fewer at a time: --ranks") from None
    ranks.sort(key=lambda rank: (rank.stage or 0, rank.rank or 0))
    return Profile(source, ranks)


HOST = "idle: the host had launched nothing"
QUEUED = "idle: launched, not yet started"
# The report names unknown kernels if they take more than this share of a step.
_MOST_UNKNOWN = 0.05
# Fields of a rank that the JSON report leaves out.
_NOT_REPORTED = {"unknown", "gpu", "on_gpu"}
_LEAST_CAUSE = 0.001
_MOST_CAUSES = 5


def step_parts(rank: RankProfile) -> dict[str, float]:
    """Return the milliseconds of each part of a step by its title, and at the end of the step."""
    parts = {}
    for category in CATEGORIES:
        exposed = ", exposed" if category.kind == COMMUNICATION else ""
        parts[category.title + exposed] = rank.counted_ms(category.name)
    return parts | {HOST: rank.idle.host_ms, QUEUED: rank.idle.queued_ms, "step": rank.step_ms}


def render_text(profile: Profile, width: int | None = None) -> str:
    """Return the report's tables; their last columns wrap to fit `width`, if given."""
    first = profile.ranks[0]
    numbers = ", ".join(map(str, first.steps))
    steps = f"mean of steps {numbers}" if len(first.steps) > 1 else f"step {numbers}"
    shown = profile.shown()
    rows = [["ms a step, share"]]
    for rank, role in shown:
        rows[0] += [profile.name(rank), role]
    parts = [step_parts(rank) for rank, _ in shown]
    for title in parts[0]:
        if title == HOST or any(part[title] for part in parts):
            rows.append([title])
            for part in parts:
                rows[-1] += [f"{part[title]:,.1f}", f"{part[title] / part['step']:.1%}"]
    blocks = [
        f"{profile.source}: {steps if first.steps else 'the whole trace'}, {profile.device}",
        text_table(rows, align="l" + "rr" * len(shown)),
        *_details(profile, width),
        text_table([["-", note] for note in _notes(profile)], width=width),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _details(profile: Profile, width: int | None) -> Iterator[str]:
    communication = [["communication", "ran", "hidden", "exposed"]]
    gemms = [["GEMMs", "ms", "TFLOP/s", "of peak", "shapes known"]]
    idle = [["the host meanwhile", "ms", "was in"]]
    for rank, _ in profile.shown():
        name = profile.name(rank)
        for kind, own in rank.categories.items():
            if own.kind != COMMUNICATION:
                continue
            times = [f"{ms:,.1f}" for ms in (own.ms + own.hidden_ms, own.hidden_ms, own.ms)]
            communication.append([f"{BY_NAME[kind].title}, {name}", *times])
        for kind, rate in rank.gemms.items():
            speed = f"{rate.tflops:,.3g}" if rate.tflops is not None else "-"
            share = f"{rate.peak_share:.0%}" if rate.peak_share is not None else "-"
            known = f"for {rate.known_ms / rate.ms:.0%} of the time" if rate.ms else "-"
            gemms.append([f"{BY_NAME[kind].title}, {name}", f"{rate.ms:,.1f}", speed, share, known])
        for cause, ms in [*rank.idle.causes_ms.items()][:_MOST_CAUSES]:
            if ms >= _LEAST_CAUSE * rank.step_ms:
                idle.append([name, f"{ms:,.1f}", cause])
    for rows, align in ((communication, "lrrr"), (gemms, "lrrrl"), (idle, "lrl")):
        if len(rows) > 1:
            yield text_table(rows, align=align, width=width)


def _notes(profile: Profile) -> Iterator[str]:
    ranks = profile.ranks
    if not all(rank.steps for rank in ranks):
        yield "no ProfilerStep in the trace: the whole trace is counted as one step"
    for rank in ranks:
        if (share := 1 - rank.accounted) > _MOST_UNKNOWN:
            most = ", ".join(f"{one.name[:60]} ({one.ms:,.1f} ms)" for one in rank.unknown[:5])
            yield (
                f"{profile.name(rank)}: {share:.1%} of the step is in kernels that no rule knows: "
                f"{most}; add rules to cookbook/profile/kernels.py"
            )
    if not all(rank.on_gpu for rank in ranks):
        yield (
            "a CPU has no kernels: the operations of its threads are counted, each without those "
            "within it; gloo does not say which group communicates, and no peak is known"
        )
    yield "the profiler slows the host down: take speeds from a run without it"


def render_json(profile: Profile) -> str:
    """Return one JSON object; times are in milliseconds per step, and unknown values are null."""
    keys = [one.name for one in fields(RankProfile) if one.name not in _NOT_REPORTED]
    content = {
        "source": profile.source,
        "device": profile.device,
        "on_gpu": profile.ranks[0].on_gpu,
        "ranks": [{key: getattr(rank, key) for key in keys} for rank in profile.ranks],
    }
    return json.dumps(content, indent=1, default=asdict) + "\n"
