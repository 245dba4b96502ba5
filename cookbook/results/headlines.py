"""A run in a few sentences: which cell to use, whether it trains alike, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cookbook.results.loss import CANNOT_TELL, DIFFERENT, EQUIVALENT, MARGIN
from cookbook.results.result import Result, RunResults
from cookbook.results.speed import LEVEL, NOISE
from cookbook.run.status import FINISHED, REFUSED


def partly_finished(results: RunResults) -> str | None:
    """How many cells are in which state, where some have not come to their end; else None."""
    counts = Counter(cell.status or "of unknown status" for cell in results.cells)
    if not counts.keys() - {FINISHED, REFUSED}:
        return None
    done = f"{counts.pop(FINISHED, 0)} of {len(results.cells)} cells finished"
    rest = [f"{number} {state}" for state, number in counts.items()]
    return f"partly finished: {', '.join([done, *rest])}; their numbers are those so far"


def headlines(results: RunResults) -> list[str]:
    """The answers, as far as the logs hold them."""
    return [*_fastest(results), *_losses(results)]


def _fastest(results: RunResults) -> Iterator[str]:
    """The fastest of the cells that are held against one baseline; each recipe has its own."""
    groups: dict[str | None, list[Result]] = {}
    for cell in results.cells:
        if cell.speedup is not None:
            groups.setdefault(results.settings[cell.name].baseline, []).append(cell)
    for base, cells in groups.items():
        if len(cells) > 1:
            cells.sort(key=lambda cell: cell.speedup or 0.0, reverse=True)
            yield from _fastest_over(base, *cells[:2])


def _fastest_over(base: str | None, first: Result, second: Result) -> Iterator[str]:
    """The fastest cell, and whether the next one may be as fast."""
    if first.name == base:
        yield f"No cell is faster than the baseline {base}{_at(first)}."
        return
    text = f"Fastest: {first.name}{_at(first)}, {_gain(first.speedup)} over {base}"
    if first.speed is None or first.speed.low is None:
        text += " (too few steps for an interval)"
    else:
        text += f" ({LEVEL:.0%} interval {_gain(first.speed.low)} to {_gain(first.speed.high)})"
        if first.speed.verdict == NOISE:
            text += ": inside the noise"
    yield f"{text}."
    if second.name != base and _overlap(first, second):
        yield (
            f"{second.name} may be as fast ({_gain(second.speedup)}): the two intervals overlap."
        )


def _losses(results: RunResults) -> Iterator[str]:
    """What was said of the losses, the cells of one verdict together."""
    for verdict, words in (
        (EQUIVALENT, f"equivalent to the baseline's within ±{MARGIN:.2%}"),
        (DIFFERENT, "different from the baseline's"),
        (CANNOT_TELL, "cannot be told from this run"),
    ):
        names = [cell.name for cell in results.cells if _verdict(cell) == verdict]
        if names:
            yield f"Loss of {_list(names)}: {words}."


def _verdict(cell: Result) -> str | None:
    """Of the whole curve and of its last tenth, the worse one."""
    found = [one.verdict for one in (cell.loss, cell.loss_last_tenth) if one is not None]
    order = (DIFFERENT, CANNOT_TELL, EQUIVALENT)
    return min(found, key=order.index) if found else None


def _overlap(one: Result, other: Result) -> bool:
    if one.speed is None or other.speed is None:
        return False
    if one.speed.low is None or other.speed.high is None:
        return True
    return one.speed.low <= other.speed.high


def _at(cell: Result) -> str:
    tokens = cell.tokens_per_second_per_gpu
    return f" at {tokens:,.0f} tokens/s/GPU" if tokens else ""


def _gain(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
