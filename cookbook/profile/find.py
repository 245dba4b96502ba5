"""Finds the traces of a run, a cell or a folder, and chooses which of them to read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path
from cookbook.profile.trace import read_header
from cookbook.run.folder import CellFolder

# So many are read where nobody chooses; of more, one rank of each pipeline stage.
MOST_TRACES = 8
_TRACE = re.compile(r"rank[-_]?(\d+).*\.json(\.gz)?")
_REMEDY = "profile it: python submit.py profile RECIPE"


def cell_traces(cell: CellFolder) -> dict[int, Path]:
    """The traces of the newest attempt that left some, by rank; empty where none did."""
    for attempt in reversed(cell.attempts()):
        if traces := _newest(attempt.traces):
            return traces
    return {}


def folder_traces(folder: Path) -> dict[int, Path]:
    """The traces in `folder`, or of the last step in its folders `iteration_<step>`, by rank."""
    traces = _newest(folder)
    if not traces:
        raise InputError(shown_path(folder), "holds no trace (rank<R>_trace.json)", _REMEDY)
    return traces


def _newest(folder: Path) -> dict[int, Path]:
    steps = sorted(
        (int(number), path)
        for path in folder.glob("iteration_*")
        if (number := path.name.removeprefix("iteration_")).isascii() and number.isdecimal()
    )
    for candidate in [folder, *(path for _, path in reversed(steps))]:
        if candidate.is_dir() and (traces := _in(candidate)):
            return traces
    return {}


def _in(folder: Path) -> dict[int, Path]:
    found = {
        int(match[1]): path
        for path in sorted(folder.iterdir())
        if (match := _TRACE.fullmatch(path.name)) and path.is_file()
    }
    return dict(sorted(found.items()))


def choose_ranks(traces: Mapping[int, Path], asked: str | None) -> list[Path]:
    """The traces to read.

    Args:
        asked: `all`, or ranks with commas between them; None reads up to `MOST_TRACES`, and of
            more ranks the first of each pipeline stage.
    """
    if asked is None:
        if len(traces) <= MOST_TRACES:
            return list(traces.values())
        first = min(traces)
        stages = read_header(traces[first]).pipeline or [first]
        return [traces[rank] for rank in stages if rank in traces]
    if asked == "all":
        return list(traces.values())
    return [traces[rank] for rank in _ranks(asked, list(traces))]


def _ranks(asked: str, known: Sequence[int]) -> list[int]:
    allowed = f"all, or some of {', '.join(map(str, known))}, with commas between them"
    ranks = []
    for word in asked.split(","):
        number = word.strip()
        is_number = number.isascii() and number.isdecimal()
        if not is_number or int(number) not in known:
            raise InputError("--ranks", f"found {number!r}, allowed: {allowed}")
        ranks.append(int(number))
    return sorted(set(ranks))
