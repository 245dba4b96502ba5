"""The profile of a job: find its ranks' traces, read them, and match their communication calls."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.errors import InputError, JobError
from cookbook.base.yamlfile import shown_path
from cookbook.profile.rank import RankProfile, profile_rank
from cookbook.profile.trace import read_header
from cookbook.run.folder import CellFolder

# The default reads up to this many traces; of more, one rank of each pipeline stage.
MOST_TRACES = 8
_TRACE = re.compile(r"rank[-_]?(\d+).*\.json(\.gz)?")


@dataclass(frozen=True)
class Profile:
    """Where a step goes, by rank.

    Attributes:
        waited: of each rank's exposed communication, the time it waited for other ranks.
    """

    source: str
    ranks: tuple[RankProfile, ...]
    waited: tuple[Mapping[str, float] | None, ...]

    @property
    def device(self) -> str:
        """The GPU's name, or its kind."""
        return self.ranks[0].gpu or ("GPU" if self.ranks[0].on_gpu else "CPU")

    def name(self, rank: RankProfile) -> str:
        """`rank 128`, with its stage where there are several."""
        number = "?" if rank.rank is None else rank.rank
        has_stages = len({rank.stage for rank in self.ranks}) > 1
        return f"stage {rank.stage}, rank {number}" if has_stages else f"rank {number}"

    def shown(self) -> list[tuple[int, str]]:
        """Return the ranks of a report: index and role.

        Of each pipeline stage the first rank, and where several were read, the slowest and the
        fastest. All take the same wall time: the slowest computes longest, and the others wait.
        """
        chosen: list[tuple[int, str]] = []
        for stage in sorted({rank.stage for rank in self.ranks}, key=lambda stage: stage or 0):
            own = [index for index, rank in enumerate(self.ranks) if rank.stage == stage]
            roles: dict[int, list[str]] = {own[0]: []}
            if len(own) > 1:
                by_compute = sorted(own, key=lambda index: self.ranks[index].compute_ms)
                roles.setdefault(by_compute[-1], []).append("slowest")
                roles.setdefault(by_compute[0], []).append("fastest")
            chosen += [(index, ", ".join(words)) for index, words in roles.items()]
        return chosen


def cell_traces(cell: CellFolder) -> dict[int, Path]:
    """Return the traces of the newest attempt that left some, by rank; empty where none did."""
    found = (_newest(attempt.traces) for attempt in reversed(cell.attempts()))
    return next((traces for traces in found if traces), {})


def folder_traces(folder: Path) -> dict[int, Path]:
    """Return the traces in `folder`, or in its newest folder `iteration_<step>`, by rank."""
    if traces := _newest(folder):
        return traces
    remedy = "profile it: python submit.py profile RECIPE"
    raise InputError(shown_path(folder), "holds no trace (rank<R>_trace.json)", remedy)


def _newest(folder: Path) -> dict[int, Path]:
    steps = {
        int(number): path
        for path in folder.glob("iteration_*")
        if (number := path.name.removeprefix("iteration_")).isdecimal()
    }
    for candidate in [folder, *(steps[step] for step in sorted(steps, reverse=True))]:
        found = {
            int(match[1]): path
            for path in candidate.glob("*")
            if (match := _TRACE.fullmatch(path.name)) and path.is_file()
        }
        if found:
            return dict(sorted(found.items()))
    return {}


def choose_ranks(traces: Mapping[int, Path], asked: str | None) -> list[Path]:
    """Return the traces to read.

    Args:
        asked: `all`, or ranks separated by commas; None reads up to `MOST_TRACES`, and of more
            ranks the first of each pipeline stage.
    """
    if asked is None and len(traces) > MOST_TRACES:
        first = min(traces)
        stages = read_header(traces[first]).pipeline or [first]
        return [traces[rank] for rank in stages if rank in traces]
    if asked in (None, "all"):
        return list(traces.values())
    known = {str(rank): path for rank, path in traces.items()}
    chosen = {}
    for word in str(asked).split(","):
        number = word.strip()
        if number not in known:
            allowed = f"all, or some of {', '.join(known)}, separated by commas"
            raise InputError("--ranks", f"found {number!r}, allowed: {allowed}")
        chosen[int(number)] = known[number]
    return [chosen[rank] for rank in sorted(chosen)]


def make_profile(source: str, paths: Sequence[Path]) -> Profile:
    """Read the traces, several at once where there are cores for it.

    Raises:
        InputError: a trace cannot be read.
        JobError: a process that read one was killed.
    """
    workers = min(len(paths), len(os.sched_getaffinity(0)))
    try:
        # An interrupt ends the whole command; its readers print no tracebacks.
        with ProcessPoolExecutor(
            workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
        ) as pool:
            found = list(pool.map(_profile_or_error, paths))
    except BrokenProcessPool:
        raise JobError(
            f"{source}: a process that read a trace was killed, perhaps for its memory; "
            "read fewer at a time: --ranks"
        ) from None
    ranks = []
    for one in found:
        if not isinstance(one, RankProfile):
            raise InputError(*one)
        ranks.append(one)
    ranks.sort(key=lambda rank: (rank.stage or 0, rank.rank or 0))
    return Profile(source, tuple(ranks), tuple(waits_for_others(ranks)))


def _profile_or_error(path: Path) -> RankProfile | tuple[str, str, str]:
    """Return an InputError as its parts, which pickle can restore."""
    try:
        return profile_rank(path)
    except InputError as error:
        return error.place, error.found, error.remedy


def waits_for_others(ranks: Sequence[RankProfile]) -> list[Mapping[str, float] | None]:
    """Return each rank's waits for other ranks, by category of exposed communication (ms a step).

    A collective ends on all its ranks at about the same time, so the rank that came last takes the
    least time in it, and the others' longer times are waits. No common clock is needed. Where few
    of a group's ranks were read, this is a lower bound. None for a rank without matched calls.
    """
    calls: dict[tuple[object, ...], dict[int, list[float]]] = {}
    ran: list[dict[str, float]] = [{} for _ in ranks]
    for index, rank in enumerate(ranks):
        for call in rank.calls:
            key = (call.category, rank.steps, call.step, *call.key)
            calls.setdefault(key, {}).setdefault(index, []).append(call.duration)
            ran[index][call.category] = ran[index].get(call.category, 0.0) + call.duration
    waited: list[dict[str, float]] = [{} for _ in ranks]
    for (name, *_), by_rank in calls.items():
        category = str(name)
        # The n-th call of one is the n-th of the others, if they made equally many. A sender
        # waits for its receiver and the other way round: neither came last.
        if category == "pp" or len(by_rank) < 2 or len(set(map(len, by_rank.values()))) > 1:
            continue
        least = sum(map(min, zip(*by_rank.values(), strict=True)))
        for index, durations in by_rank.items():
            before = waited[index].get(category, 0.0)
            waited[index][category] = before + sum(durations) - least
    # As much of the waiting is exposed as of the communication as a whole.
    return [
        {
            name: rank.counted.get(name, 0.0) * wait / (total[name] or 1)
            for name, wait in own.items()
        }
        or None
        for rank, own, total in zip(ranks, waited, ran, strict=True)
    ]
