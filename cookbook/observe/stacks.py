"""Name the ranks that stopped in an attempt that makes no step, and where the others wait.

Each rank writes `stacks/rank-<r>.txt` when it makes no step for long (cookbook/titan/common/
stall.py). A rank without one has stopped, is gone, or still makes steps.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from cookbook.run.folder import Attempt

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>[0-9]+) in (?P<function>\S+)')
_MOST_NAMED = 8


def describe_stacks(attempt: Attempt, world: int) -> str | None:
    """Return the ranks to blame and the place where the others wait; None without any stack."""
    places = {
        rank: place
        for rank in range(world)
        if (place := _place(attempt.stacks / f"rank-{rank}.txt"))
    }
    if not places:
        return None
    missing = [rank for rank in range(world) if rank not in places]
    (usual, count), *_ = Counter(places.values()).most_common(1)
    others = "the other one" if count == 1 else f"the other {count}"
    if missing:
        return f"{_ranks(missing)} not heard of (stopped, or gone); {others} in {usual}"
    odd = {rank: place for rank, place in places.items() if place != usual}
    if not odd or len(odd) > world // 4 + 1:
        return f"{count} of {world} ranks in {usual}"
    return f"{_ranks([*odd])} in {', '.join(dict.fromkeys(odd.values()))}; {others} in {usual}"


def _place(path: Path) -> str | None:
    """Return the innermost frame of the main thread outside torch: `name (file.py:12)`."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return None
    # faulthandler prints the main thread last, and of each thread the innermost frame first.
    thread = re.split(r"^(?:Current t|T)hread 0x.*$", text, flags=re.MULTILINE)[-1]
    frames = [found for line in thread.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return None
    own = next((one for one in frames if "/torch/" not in one["file"]), frames[0])
    words = f"{own['function']} ({Path(own['file']).name}:{own['line']})"
    return words if own is frames[0] else f"{frames[0]['function']} < {words}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
