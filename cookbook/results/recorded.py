"""What was asked of a cell and what its job saw, as names and texts.

An unset option counts as TorchTitan's default, so setting the default explicitly is no difference.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.asked import asked_options, of_speed
from cookbook.config.dialect.names import TEXTS, options_that
from cookbook.config.facts import Facts, facts_of
from cookbook.config.stack import load_stack
from cookbook.run.record import CellRecord

UNKNOWN = "-"
_MOST_NODES = 4
# Facts of `environment.json` to skip: they follow from options, or vary from run to run.
_SKIPPED = frozenset({"precision", "ep_backend", "loss"})
_DURATION = "self check seconds"
# Options that change the loss, but not a step's speed.
_OF_LOSS = (Facts.lr, "lr_scheduler.", Facts.seed, Facts.shuffle_seed)


def asked_facts(record: CellRecord) -> dict[str, str]:
    """Return the requested recipe, layout and options as text, by name; {} if none are recorded."""
    if record.recipe is None:
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
        **asked_options(record),
    }
    return {name: text_of(value) for name, value in facts.items()}


def asked_value(asked: Mapping[str, str], name: str) -> str:
    """Return the value of a requested fact, or the default of an option that is not set."""
    return asked.get(name) or _defaults(asked.get("stack", UNKNOWN)).get(name, UNKNOWN)


@functools.cache
def _defaults(stack: str) -> Mapping[str, str]:
    try:
        options = load_stack(None if stack == UNKNOWN else stack).options
    except InputError:
        return {}
    return {name: text_of(option.default) for name, option in options.items()}


def speed_facts(record: CellRecord) -> dict[str, str]:
    """Return the requested facts that can change a step's speed, without defaults."""
    asked = asked_facts(record)
    default = _defaults(asked.get("stack", UNKNOWN))
    return {name: one for name, one in of_speed(asked).items() if one != default.get(name)}


def repeated_facts(record: CellRecord) -> dict[str, str]:
    """Return those of a cell's requested facts that all its repeats share."""
    asked = asked_facts(record)
    of_loss = {name: one for name, one in asked.items() if name.startswith(_OF_LOSS)}
    # A resume with more steps keeps the schedule: then both options say the same.
    total = asked.get(Facts.total_steps) or asked.get(Facts.steps, "")
    return {**speed_facts(record), **of_loss, Facts.total_steps: total}


def texts_of(record: CellRecord) -> tuple[object, ...]:
    """Return what decides which texts each step of an attempt reads."""
    tokens, asked = (record.tokens_per_step_per_gpu or 0) * record.world, asked_facts(record)
    is_anew = "dataloader" in (record.options.get(Facts.load_excluded) or ())
    own = (asked_value(asked, name) for name in options_that(TEXTS))
    return record.recipe, tokens, is_anew, *own


def routing_of(record: CellRecord) -> str | None:
    """Return `trained`, `round_robin` or `random`; None if nothing is recorded."""
    return None if record.recipe is None else facts_of(record).routing


def seen_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts in an attempt's `environment.json`, each value as one line of text."""
    content = dict(environment)
    versions, nodes = content.pop("versions", {}), content.pop("nodes", [])
    facts = {name.replace("_", " "): content[name] for name in content if name not in _SKIPPED}
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
