"""The profile of a job: its ranks' traces, read side by side, and matched."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.errors import InputError, JobError
from cookbook.profile.rank import RankProfile, profile_rank
from cookbook.profile.waits import waits_for_others


@dataclass(frozen=True)
class Profile:
    """Where a step goes, by rank.

    Attributes:
        waited: of each rank's exposed communication, what it waited for other ranks; see `waits`.
    """

    source: str
    ranks: tuple[RankProfile, ...]
    waited: tuple[Mapping[str, float] | None, ...]

    @property
    def has_stages(self) -> bool:
        """Whether ranks of several pipeline stages were read."""
        return len({rank.stage for rank in self.ranks}) > 1

    def name(self, rank: RankProfile) -> str:
        """`rank 128`, and its stage where there are several."""
        number = "?" if rank.rank is None else rank.rank
        return f"stage {rank.stage}, rank {number}" if self.has_stages else f"rank {number}"

    def shown(self) -> list[tuple[int, str]]:
        """The ranks of a report: index and what each is.

        Of each pipeline stage the first rank, and where several were read, the slowest and the
        fastest. All take the same wall time: the slowest is the one that computes longest, and for
        which the others wait.
        """
        chosen: list[tuple[int, str]] = []
        for stage in sorted({rank.stage for rank in self.ranks}, key=lambda stage: stage or 0):
            own = [index for index, rank in enumerate(self.ranks) if rank.stage == stage]
            words: dict[int, list[str]] = {own[0]: []}
            if len(own) > 1:
                by_compute = sorted(own, key=lambda index: self.ranks[index].compute_ms)
                words.setdefault(by_compute[-1], []).append("slowest")
                words.setdefault(by_compute[0], []).append("fastest")
            chosen += [(index, ", ".join(said)) for index, said in words.items()]
        return chosen


def make_profile(source: str, paths: Sequence[Path]) -> Profile:
    """Read the traces, several at once where there are cores for it.

    Raises:
        InputError: a trace cannot be read.
        JobError: a process that read one was killed.
    """
    if len(paths) == 1:
        ranks = [profile_rank(paths[0])]
    else:
        workers = min(len(paths), len(os.sched_getaffinity(0)))
        try:
            with ProcessPoolExecutor(workers, initializer=_end_quietly) as pool:
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


def _end_quietly() -> None:
    """An interrupt ends the whole command; its readers need not each show where they were."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _profile_or_error(path: Path) -> RankProfile | tuple[str, str, str]:
    """An InputError has more parts than pickle would restore."""
    try:
        return profile_rank(path)
    except InputError as error:
        return error.place, error.found, error.remedy
