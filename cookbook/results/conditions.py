"""What a run's cells were asked to do and where they did it: what all share, and what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.results.table import UNKNOWN, Table
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run
from cookbook.run.status import read_json

Facts = Mapping[str, str]
# More nodes than these are counted and not all named.
_MOST_NODES = 4
# Said by the configuration; what was active under that name may be another thing.
_ASKED = frozenset({"precision", "ep_backend", "loss"})


@dataclass(frozen=True)
class Conditions:
    """Facts of a run's cells, by name.

    Attributes:
        shared: what all cells that are known have in common.
        differing: a row for each fact in which two cells differ, a column for each cell.
        is_known: whether there is a cell of which anything is known.
    """

    shared: tuple[tuple[str, str], ...]
    differing: Table | None
    is_known: bool = True


def configuration(run: Run) -> Conditions:
    """The options of every cell, of its newest attempt; an option that is not set is a dash."""
    return _compare("option", {cell.name: _asked(_read(cell)) for cell in _cells(run)})


def environment(run: Run) -> Conditions:
    """Versions, GPUs, driver and nodes, as the newest attempt's training process saw them."""
    found = {cell.name: _seen(cell) for cell in _cells(run)}
    conditions = _compare("what", {name: facts for name, facts in found.items() if facts})
    if run.record.commit is None:
        return conditions
    commit = (("commit of the cookbook", run.record.commit), *conditions.shared)
    return replace(conditions, shared=commit)


def _compare(title: str, cells: Mapping[str, Facts]) -> Conditions:
    names = list(dict.fromkeys(name for facts in cells.values() for name in facts))
    shared, differing = [], []
    for name in names:
        values = [facts.get(name, UNKNOWN) for facts in cells.values()]
        if len(set(values)) == 1:
            shared.append((name, values[0]))
        else:
            differing.append((name, *values))
    if not differing:
        return Conditions(tuple(shared), None, is_known=any(cells.values()))
    table = Table((title, *cells), tuple(differing), "l" * (1 + len(cells)))
    return Conditions(tuple(shared), table)


def _cells(run: Run) -> list[CellFolder]:
    """The cells without their further repeats, which differ in nothing that was asked."""
    return [cell for cell in run.cells if (record := _read(cell)) is None or not record.repeat_of]


def _read(cell: CellFolder) -> CellRecord | None:
    try:
        return read_record(cell.record).newest
    except InputError:
        return None  # `collect_results` says what is wrong with it


def _asked(record: CellRecord | None) -> dict[str, str]:
    if record is None:
        return {}
    facts = {
        "recipe": record.recipe,
        "precision": record.precision,
        "EP backend": record.ep_backend,
        "cluster": record.cluster,
        "stack": record.stack,
        "nodes": record.nodes,
        "ranks per node": record.ranks_per_node,
        **{f"variable {name}": value for name, value in record.environment.items()},
        **record.asked_options,
    }
    return _texts(facts)


def _seen(cell: CellFolder) -> dict[str, str]:
    for attempt in reversed(cell.attempts()):
        try:
            content = read_json(attempt.environment)
        except InputError:
            continue
        versions = content.pop("versions", None)
        nodes = content.pop("nodes", None)
        facts = {name.replace("_", " "): content[name] for name in content if name not in _ASKED}
        if isinstance(nodes, list):
            facts["nodes"] = _nodes(nodes)
        if isinstance(versions, dict):
            facts |= versions
        return _texts(facts)
    return {}


def _nodes(nodes: Iterable[Any]) -> str:
    names = [str(node) for node in nodes]
    if len(names) <= _MOST_NODES:
        return ", ".join(names)
    return f"{len(names)}: {names[0]} to {names[-1]}"


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): _text(value) for name, value in facts.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or UNKNOWN
    if isinstance(value, bool | dict):
        return json.dumps(value)
    return UNKNOWN if value is None or value == "" else str(value)
