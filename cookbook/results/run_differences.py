"""Compare the conditions under which cells ran: what they share, and what differs.

An unset option counts as TorchTitan's default, so setting the default explicitly is no difference.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.stack import load_stack
from cookbook.results.columns import UNKNOWN, Table
from cookbook.results.result import Result, RunResults
from cookbook.run.record import EXCLUDED, TOTAL_STEPS, CellRecord, of_speed

_MOST_NODES = 4
# Skip these facts of `environment.json`: they follow from options, which are compared anyway.
_ASKED = frozenset({"precision", "ep_backend", "loss"})
_DURATION = "self check seconds"  # a duration, which varies from run to run
# Facts not to compare: they vary from run to run, or the comparison shows them elsewhere.
_NOISE = re.compile(r"nodes$|gpu$|self check |mean attended length$")
_KINDS = {
    "training.dataset": "the texts: ",
    "training.dataset_path": "the texts: ",
    "model.hf_assets_path": "the tokenizer: ",
}
# Options that change the loss, but not a step's speed.
_OF_LOSS = ("optimizer.lr", "lr_scheduler.", "debug.seed", "data.shuffle_seed")
# Options that decide which texts a step reads, besides the recipe and the number of tokens.
_OF_TEXTS = (*_KINDS, "data.files", "data.text_key", "data.shuffle_seed", "training.seq_len")


@dataclass(frozen=True)
class Conditions:
    """Facts of a run's cells: those that all cells share, and a table of those that differ."""

    shared: Sequence[tuple[str, str]]  # name and value of each fact
    differing: Table | None
    is_known: bool = True


def configuration(results: RunResults) -> Conditions:
    """Return the recipe, layout and options requested for each cell's newest attempt."""
    names = dict.fromkeys(name for cell in results.cells for name in cell.asked)
    cells = {
        cell.name: {name: _asked(cell.asked, name) for name in names} if cell.asked else {}
        for cell in results.cells
    }
    return _conditions("option", cells)


def environment(results: RunResults) -> Conditions:
    """Return versions, GPUs, driver and nodes of the cells that have reached their first step."""
    found = _conditions("fact", {cell.name: cell.seen for cell in results.cells if cell.seen})
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
        for name in {**base.asked, **own.asked}:
            if name not in ("cluster", "stack"):
                first, second = (_asked(cell.asked, name) for cell in (base, own))
                differing[_KINDS.get(name, "") + name, first, second].append(base.name)
        for name, value in base.seen.items():
            if name in own.seen and not _NOISE.match(name):
                differing[name, value, own.seen[name]].append(base.name)
    for (name, first, second), cells in differing.items():
        if first != second:
            where = f" (of {', '.join(cells)})" if cells and len(cells) < len(common) else ""
            yield f"{name}{where}: {first} in {one.run.run}, {second} in {other.run.run}"


def speed_facts(asked: Mapping[str, str]) -> dict[str, str]:
    """Return those of a cell's requested facts that can change a step's speed, without defaults."""
    default = _defaults(asked.get("stack", UNKNOWN))
    return {name: one for name, one in of_speed(asked).items() if one != default.get(name)}


def repeated_facts(asked: Mapping[str, str]) -> dict[str, str]:
    """Return those of a cell's requested facts that all its repeats share."""
    of_loss = {name: one for name, one in asked.items() if name.startswith(_OF_LOSS)}
    # A resume with more steps keeps the schedule: then both options say the same.
    total = asked.get(TOTAL_STEPS) or asked.get("training.steps", "")
    return {**speed_facts(asked), **of_loss, TOTAL_STEPS: total}


def texts_of(record: CellRecord) -> tuple[object, ...]:
    """Return what decides which texts each step of an attempt reads."""
    tokens, asked = (record.tokens_per_step_per_gpu or 0) * record.world, asked_facts(record)
    is_anew = "dataloader" in (record.options.get(EXCLUDED) or ())
    return record.recipe, tokens, is_anew, *(_asked(asked, name) for name in _OF_TEXTS)


def have_same_texts(one: Result, other: Result) -> bool:
    """Return whether both runs read the same texts in every step that both logged."""
    return all(one.texts[step] == other.texts[step] for step in one.texts.keys() & other.texts)


def _asked(asked: Mapping[str, str], name: str) -> str:
    return asked.get(name) or _defaults(asked.get("stack", UNKNOWN)).get(name, UNKNOWN)


@functools.cache
def _defaults(stack: str) -> Mapping[str, str]:
    try:
        options = load_stack(None if stack == UNKNOWN else stack).options
    except InputError:
        return {}
    return {name: text_of(option.default) for name, option in options.items()}


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
    active = ((cell.world, cell.active) for cell in run.cells if cell.active)
    found = dict.fromkeys(f"{world} x {one.get('gpu') or 'CPU rank'}" for world, one in active)
    return " and ".join(found) or UNKNOWN


def asked_facts(record: CellRecord) -> dict[str, str]:
    """Return the requested recipe, layout and options as text, by name; {} if none are recorded."""
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


def seen_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts in an attempt's `environment.json`, each value as one line of text."""
    content = dict(environment)
    versions, nodes = content.pop("versions", {}), content.pop("nodes", [])
    facts = {name.replace("_", " "): content[name] for name in content if name not in _ASKED}
    if nodes:
        many = f"{len(nodes)}: {nodes[0]} to {nodes[-1]}"
        facts["nodes"] = nodes if len(nodes) <= _MOST_NODES else many
    return {name: value for name, value in _flat({**facts, **versions}) if name != _DURATION}


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat({f"{name} {key.replace('_', ' ')}": value[key] for key in value})
        else:
            yield name, text_of(value)


def text_of(value: Any) -> str:
    """Return the value of an option or fact as one line of text."""
    if isinstance(value, list | tuple):
        return ", ".join(map(text_of, value)) or UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{key} {text_of(item)}" for key, item in value.items()) or UNKNOWN
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return UNKNOWN if value is None or value == "" else str(value)
