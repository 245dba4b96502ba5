"""The conditions of cells: what all share, and what differs among cells or between two runs.

An option that is not set counts as TorchTitan's default, so that no difference is only one of
writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError
from cookbook.results.columns import UNKNOWN, Table
from cookbook.results.result import CellSetting, Facts, RunResults
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import read_json

# More nodes than these are counted and not all named.
_MOST_NODES = 4
# The configuration has these; what was active under that name may be another thing.
_ASKED = frozenset({"precision", "ep_backend", "loss"})
# Facts that differ from run to run, or that a comparison shows elsewhere.
_NOISE = re.compile(r"nodes$|gpu$|self check |mean attended length$")
_TEXTS = ("training.dataset", "training.dataset_path")
_TOKENIZER = "model.hf_assets_path"


@dataclass(frozen=True)
class Conditions:
    """Facts of a run's cells: the shared ones, and a row for each in which two cells differ."""

    shared: tuple[tuple[str, str], ...]
    differing: Table | None
    is_known: bool = True


def configuration(results: RunResults) -> Conditions:
    """What each cell was asked to do in its newest attempt."""
    settings = {cell.name: results.settings[cell.name] for cell in results.cells}
    names = dict.fromkeys(name for setting in settings.values() for name in setting.asked)
    facts = {
        cell: {name: _asked(setting, name) for name in names} if setting.asked else {}
        for cell, setting in settings.items()
    }
    return _conditions("option", facts)


def environment(results: RunResults) -> Conditions:
    """Versions, GPUs, driver and nodes of the cells that have come to their first step."""
    facts = {cell.name: results.settings[cell.name].seen for cell in results.cells}
    found = _conditions("what", {name: seen for name, seen in facts.items() if seen})
    commit = results.run.commit
    shared = (("commit of the cookbook", commit), *found.shared) if commit else found.shared
    return Conditions(shared, found.differing, found.is_known)


def between_runs(one: RunResults, other: RunResults) -> Iterator[str]:
    """A line for each thing besides the cells' names in which two runs differ."""
    names = one.run.run, other.run.run

    def line(what: str, values: tuple[str | None, str | None]) -> Iterator[str]:
        if values[0] != values[1]:
            pairs = zip(values, names, strict=True)
            yield f"{what}: " + ", ".join(f"{value or UNKNOWN} in {run}" for value, run in pairs)

    for name in ("cluster", "stack", "commit"):
        yield from line(name, (getattr(one.run, name), getattr(other.run, name)))
    yield from line("GPUs", (_gpus(one), _gpus(other)))
    common = [cell.name for cell in one.cells if cell.name in other.settings]
    differing: dict[tuple[str, str, str], list[str]] = {}
    for cell in common:
        own, base = other.settings[cell], one.settings[cell]
        asked = [name for name in {**base.asked, **own.asked} if name not in ("cluster", "stack")]
        pairs = {name: (_asked(base, name), _asked(own, name)) for name in asked}
        seen = [name for name in base.seen if name in own.seen and not _NOISE.match(name)]
        pairs |= {name: (base.seen[name], own.seen[name]) for name in seen}
        for name, (first, second) in pairs.items():
            if first != second:
                differing.setdefault((name, first, second), []).append(cell)
    for (name, first, second), cells in differing.items():
        kind = "the texts: " if name in _TEXTS else "the tokenizer: " if name == _TOKENIZER else ""
        where = "" if len(cells) == len(common) else f" (of {', '.join(cells)})"
        yield from line(f"{kind}{name}{where}", (first, second))


def _asked(setting: CellSetting, name: str) -> str:
    return setting.asked.get(name) or setting.defaults.get(name, UNKNOWN)


def _conditions(title: str, cells: Mapping[str, Facts]) -> Conditions:
    names = dict.fromkeys(name for facts in cells.values() for name in facts)
    shared, differing = [], []
    for name in names:
        values = [facts.get(name, UNKNOWN) for facts in cells.values()]
        if len(set(values)) == 1:
            shared.append((name, values[0]))
        else:
            differing.append((name, *values))
    table = Table((title, *cells), tuple(differing), "l" * (1 + len(cells)))
    return Conditions(tuple(shared), table if differing else None, any(cells.values()))


def _gpus(run: RunResults) -> str:
    """`256 x NVIDIA B200`, of every size and kind that a cell of the run had."""
    found = {
        f"{run.settings[cell.name].world} x {cell.active.get('gpu') or 'CPU rank'}": None
        for cell in run.cells
        if cell.active
    }
    return " and ".join(found)


def asked_facts(record: CellRecord) -> Facts:
    """Recipe, layout and options of a record; empty where nothing was recorded."""
    if record.name is None and record.recipe is None:
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
    return {name: text_of(value) for name, value in facts.items()}


def seen_facts(cell: CellFolder) -> Facts:
    """What the training process of the newest attempt that got so far reported."""
    for attempt in reversed(cell.attempts()):
        try:
            content = read_json(attempt.environment)
        except InputError:
            continue
        versions, nodes = content.pop("versions", {}), content.pop("nodes", [])
        facts = {name.replace("_", " "): content[name] for name in content if name not in _ASKED}
        if nodes:
            many = f"{len(nodes)}: {nodes[0]} to {nodes[-1]}"
            facts["nodes"] = nodes if len(nodes) <= _MOST_NODES else many
        return dict(_flat({**facts, **versions}))
    return {}


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts as text, those of a nested one under both names."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat({f"{name} {key.replace('_', ' ')}": value[key] for key in value})
        else:
            yield name, text_of(value)


def text_of(value: Any) -> str:
    """A value of an option or a fact in one line."""
    if isinstance(value, list | tuple):
        return ", ".join(map(text_of, value)) or UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{key} {text_of(item)}" for key, item in value.items()) or UNKNOWN
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return UNKNOWN if value is None or value == "" else str(value)
