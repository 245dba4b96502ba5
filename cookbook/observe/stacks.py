"""Where the ranks of an attempt stood that made no step: who stopped, and who only waited for it.

Each rank writes `stacks/rank-<r>.txt` when it makes no step for long (cookbook/titan/common/
stall.py). A rank without one is stopped, or gone, or goes on.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from cookbook.run.folder import Attempt

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>[0-9]+) in (?P<function>\S+)')
_MOST_BYTES = 1 << 20
_MOST_NAMED = 8


def describe_stacks(attempt: Attempt, world: int) -> str | None:
    """Which ranks are to blame and where the others wait, in words; None without any stack."""
    places = {rank: place for rank in range(world) if (place := _place(_path(attempt, rank)))}
    if not places:
        return None
    silent = [rank for rank in range(world) if rank not in places]
    (usual, count), *_ = Counter(places.values()).most_common(1)
    if silent:
        return f"{_ranks(silent)} not heard of (stopped, or gone); {_others(count)} in {usual}"
    odd = {rank: place for rank, place in places.items() if place != usual}
    if not odd or len(odd) > world // 4 + 1:
        return f"{count} of {world} ranks in {usual}"
    where = ", ".join(dict.fromkeys(odd.values()))
    return f"{_ranks(list(odd))} in {where}; {_others(count)} in {usual}"


def _path(attempt: Attempt, rank: int) -> Path:
    return attempt.stacks / f"rank-{rank}.txt"


def _place(path: Path) -> str | None:
    """The innermost frame of the main thread that is not torch's own: `name (file.py:12)`."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    # faulthandler prints the main thread last, and of each thread the innermost frame first.
    thread = re.split(r"^(?:Current t|T)hread 0x.*$", text, flags=re.MULTILINE)[-1]
    frames = [found for line in thread.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return None
    own = [one for one in frames if "/torch/" not in one["file"]]
    named = (own or frames)[0]
    inner = frames[0]
    words = f"{named['function']} ({Path(named['file']).name}:{named['line']})"
    return words if named is inner else f"{inner['function']} < {words}"


def _others(count: int) -> str:
    return "the other one" if count == 1 else f"the other {count}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
