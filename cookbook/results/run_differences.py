"""Compare the conditions under which cells ran: what they share, and what differs."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cookbook.results.asked import KINDS, UNKNOWN, asked_facts, asked_value, seen_facts
from cookbook.results.columns import Table
from cookbook.results.result import Result, RunResults

# Facts not to compare: they vary from run to run, or the comparison shows them elsewhere.
_NOISE = re.compile(r"nodes$|gpu$|self check |mean attended length$")


@dataclass(frozen=True)
class Conditions:
    """Facts of a run's cells: those that all cells share, and a table of those that differ."""

    shared: Sequence[tuple[str, str]]  # name and value of each fact
    differing: Table | None
    is_known: bool = True


def configuration(results: RunResults) -> Conditions:
    """Return the recipe, layout and options requested for each cell's newest attempt."""
    asked = {cell.name: asked_facts(cell.record) for cell in results.cells}
    names = dict.fromkeys(name for own in asked.values() for name in own)
    cells = {
        cell: {name: asked_value(own, name) for name in names} if own else {}
        for cell, own in asked.items()
    }
    return _conditions("option", cells)


def environment(results: RunResults) -> Conditions:
    """Return versions, GPUs, driver and nodes of the cells that have reached their first step."""
    active = {cell.name: cell.measured.environment for cell in results.cells}
    found = _conditions("fact", {name: seen_facts(one) for name, one in active.items() if one})
    if commit := results.run.commit:
        found = replace(found, shared=(("commit of the cookbook", commit), *found.shared))
    return found


def between_runs(one: RunResults, other: RunResults) -> Iterator[str]:
    """Yield one line per difference between two runs, over the cells that both have."""
    by_name = {cell.name: cell for cell in other.cells}
    common = [(cell, by_name[cell.name]) for cell in one.cells if cell.name in by_name]
    differing = defaultdict[tuple[str, str, str], list[str]](list)
    for name in ("cluster", "stack", "commit"):
        first, second = (getattr(run.run, name) or UNKNOWN for run in (one, other))
        differing[name, first, second] = []
    differing["devices", _devices(one), _devices(other)] = []
    for base, own in common:
        asked = [asked_facts(cell.record) for cell in (base, own)]
        for name in {**asked[0], **asked[1]}:
            if name not in ("cluster", "stack"):
                first, second = (asked_value(facts, name) for facts in asked)
                differing[KINDS.get(name, "") + name, first, second].append(base.name)
        before, after = (seen_facts(cell.measured.environment) for cell in (base, own))
        for name, value in before.items():
            if name in after and not _NOISE.match(name):
                differing[name, value, after[name]].append(base.name)
    for (name, first, second), cells in differing.items():
        if first != second:
            where = f" (of {', '.join(cells)})" if cells and len(cells) < len(common) else ""
            yield f"{name}{where}: {first} in {one.run.run}, {second} in {other.run.run}"


def have_same_texts(one: Result, other: Result) -> bool:
    """Return whether both runs read the same texts in every step that both logged."""
    own, others = one.measured.texts, other.measured.texts
    return all(own[step] == others[step] for step in own.keys() & others)


def _conditions(title: str, cells: Mapping[str, Mapping[str, str]]) -> Conditions:
    names = dict.fromkeys(name for facts in cells.values() for name in facts)
    rows: list[tuple[str, ...]] = [
        (name, *(facts.get(name, UNKNOWN) for facts in cells.values())) for name in names
    ]
    shared = [(row[0], row[1]) for row in rows if len({*row[1:]}) == 1 and row[1] != UNKNOWN]
    differing = [row for row in rows if len({*row[1:]}) > 1]
    table = Table((title, *cells), differing, "l" * (1 + len(cells))) if differing else None
    return Conditions(shared, table, any(cells.values()))


def _devices(run: RunResults) -> str:
    active = [(one.record.world, one.measured.active) for one in run.cells]
    found = dict.fromkeys(
        f"{world} x {one.get('gpu') or 'CPU rank'}" for world, one in active if one
    )
    return " and ".join(found) or UNKNOWN
