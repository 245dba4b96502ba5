"""A run in a few sentences: which cell to use, whether it trains alike, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cookbook.results.loss import CANNOT_TELL, DIFFERENT, EQUIVALENT, MARGIN
from cookbook.results.result import Result, RunResults
from cookbook.results.speed import FASTER, LEVEL, NOISE
from cookbook.run.status import CANCELLED, FAILED, FINISHED, REFUSED

_STATES = {FAILED: "failed", CANCELLED: "was cancelled", REFUSED: "was refused"}


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
    return [*_fastest(results), *_not_compared(results), *_losses(results)]


def _fastest(results: RunResults) -> Iterator[str]:
    """The fastest of the cells that are held against one baseline; each recipe has its own."""
    groups: dict[str | None, list[Result]] = {}
    for cell in results.cells:
        if cell.speedup is not None:
            groups.setdefault(results.settings[cell.name].baseline, []).append(cell)
    title = "Fastest" if partly_finished(results) is None else "Fastest of those that finished"
    for base, cells in groups.items():
        if len(cells) > 1:
            cells.sort(key=lambda cell: cell.speedup or 0.0, reverse=True)
            yield from _fastest_over(base, cells, title)


def _fastest_over(base: str | None, cells: Sequence[Result], title: str) -> Iterator[str]:
    """The fastest cell, and which others may be as fast."""
    first, *others = cells
    if first.name == base:
        unsure = [cell for cell in others if not cell.speed or cell.speed.verdict in (NOISE, None)]
        text = f"No cell is faster than the baseline {base}{_at(first)}"
        if unsure:
            text += f"; {_list(list(map(_with_interval, unsure)))} may be as fast"
        yield f"{text}."
        return
    is_sure = first.speed is not None and first.speed.verdict == FASTER
    if is_sure:
        yield f"{title}: {first.name}{_at(first)}, {_over(first, base)}."
    else:
        sure = [cell for cell in others if cell.speed and cell.speed.verdict == FASTER]
        but = f" but {_list(list(map(_with_interval, sure)))}" if sure else ""
        text = f"No cell{but} is measurably faster than the baseline {base}"
        yield f"{text}. {first.name} comes first{_at(first)}, {_over(first, base)}."
    close = [cell for cell in others if cell.name != base and _may_be_as_fast(first, cell)]
    if close:
        names = [f"{cell.name} ({_gain(cell.speedup)})" for cell in close]
        reason = "the intervals overlap"
        if any(cell.speed is None or cell.speed.low is None for cell in (first, *close)):
            reason = "too few steps to tell"
        yield f"{_list(names)} may be as fast: {reason}."


def _over(cell: Result, base: str | None) -> str:
    text = f"{_gain(cell.speedup)} over {base} ({_interval(cell)})"
    is_noise = cell.speed is not None and cell.speed.verdict == NOISE
    return f"{text}: inside the noise" if is_noise else text


def _with_interval(cell: Result) -> str:
    return f"{cell.name} ({_gain(cell.speedup)}, {_interval(cell)})"


def _interval(cell: Result) -> str:
    if cell.speed is None or cell.speed.low is None:
        return "too few steps for an interval"
    return f"{LEVEL:.0%} interval {_gain(cell.speed.low)} to {_gain(cell.speed.high)}"


def _not_compared(results: RunResults) -> Iterator[str]:
    """Which cells that finished have no speed-up, where a word of the baseline says why."""
    finished = [cell for cell in results.cells if cell.status == FINISHED]
    emulated = [cell.name for cell in finished if cell.emulated]
    if emulated:
        are = "is" if len(emulated) == 1 else "are"
        yield f"{_list(emulated)} {are} emulated: the loss counts, the speed does not."
    by_name = {cell.name: cell for cell in results.cells}
    without: dict[str, list[str]] = {}
    for cell in finished:
        base = results.settings[cell.name].baseline
        if base and base != cell.name and not cell.emulated and cell.speedup is None:
            without.setdefault(base, []).append(cell.name)
    for base, names in without.items():
        if why := _missing(by_name.get(base)):
            yield f"No speed-up is known of {_list(names)}: the baseline {base} {why}."
    if len(finished) == 1 < len(results.cells) and not emulated and not without:
        (only,) = finished
        yield f"Only {only.name} finished{_at(only)}: there is nothing to compare it with."


def _missing(base: Result | None) -> str | None:
    """Why there is nothing to hold a speed against; None where the reason is another."""
    if base is None:
        return "is not in this run"
    if base.status != FINISHED:
        return _STATES.get(base.status or "", f"is {base.status or 'of unknown status'}")
    if base.emulated:
        return "is emulated"
    return None if base.tokens_per_second_per_gpu else "has no measured step"


def _losses(results: RunResults) -> Iterator[str]:
    """What was said of the losses, the cells of one verdict together."""
    for verdict, words in (
        (EQUIVALENT, f"equivalent to the baseline's within ±{MARGIN:.2%}"),
        (DIFFERENT, "different from the baseline's"),
        (CANNOT_TELL, "cannot be told from this run"),
    ):
        names = [cell.name for cell in results.cells if _verdict(cell) == verdict]
        bases = {results.settings[name].baseline for name in names}
        if len(bases) > 1:
            words = words.replace("the baseline's", "that of its own baseline")
        if names:
            yield f"Loss of {_list(names)}: {words}."


def _verdict(cell: Result) -> str | None:
    """Of the whole curve and of its last tenth, the worse one."""
    found = [one.verdict for one in (cell.loss, cell.loss_last_tenth) if one is not None]
    order = (DIFFERENT, CANNOT_TELL, EQUIVALENT)
    return min(found, key=order.index) if found else None


def _may_be_as_fast(first: Result, other: Result) -> bool:
    if first.speed is None or other.speed is None:
        return False
    if first.speed.low is None or other.speed.high is None:
        return True
    return first.speed.low <= other.speed.high


def _at(cell: Result) -> str:
    tokens = cell.tokens_per_second_per_gpu
    return f" at {tokens:,.0f} tokens/s/GPU" if tokens else ""


def _gain(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
