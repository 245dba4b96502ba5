"""In: the name of a stack. Out: its pins, the options its TorchTitan knows, and their argv.

This is the one module that knows how TorchTitan spells options. What it knows comes from
`stacks/<name>.json` (made from the installed TorchTitan, see `titan/option_table.py`) and from
`requirements.txt`; a second stack is a second pair of files.

    python -m cookbook.stack --training.steps=5    checks TorchTitan arguments without torch
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.errors import InputError, nearest, unknown_name
from cookbook.pins import REQUIREMENTS, read_pins
from cookbook.yamlfile import described

DEFAULT_STACK = "2026.02"
_REQUIREMENTS = {"2026.02": REQUIREMENTS}


@dataclass(frozen=True)
class Option:
    """One TorchTitan option, e.g. `training.steps`, as the stack's JobConfig declares it."""

    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()

    def check(self, place: str, value: Any) -> Any:
        """`value` as TorchTitan would hold it; another type or choice is an input error."""
        if value is None and self.optional:
            return None
        if self.kind == "choice":
            if value not in self.choices:
                raise unknown_name(place, "value", str(value), self.choices)
            return value
        if self.kind == "list" and isinstance(value, str):
            value = value.split(",") if value else []
        if self.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        holds, allowed = _KINDS[self.kind]
        if not holds(value):
            raise InputError(place, f"found {described(value)}, allowed: {allowed}")
        if self.kind == "list" and any("," in item or item == "" for item in value):
            raise InputError(
                place, f"found {value!r}: items may hold no comma and not be empty", "split the item"
            )
        return value

    def parse(self, place: str, text: str) -> Any:
        """The value that `text` from a command line stands for."""
        value: Any = text
        if self.optional and text in ("None", "null"):
            return None
        try:
            if self.kind == "int":
                value = int(text)
            elif self.kind == "float":
                value = float(text)
            elif self.kind == "bool" and text.lower() in ("true", "false"):
                value = text.lower() == "true"
            elif self.kind == "lists":
                value = json.loads(text)
        except ValueError:
            pass
        return self.check(place, value)

    def arguments(self, value: Any) -> list[str]:
        """The argv words that set this option to a checked `value`."""
        section, _, key = self.name.rpartition(".")
        if self.kind == "bool":
            return [f"--{section}.{key}" if value else f"--{section}.no_{key}"]
        if self.kind == "lists" and value is not None:
            return [f"--{self.name}", *(",".join(items) for items in value)]
        if self.kind == "list" and not value:
            # TorchTitan reads an empty word as a list of one empty name.
            if self.default:
                raise InputError(self.name, "TorchTitan cannot be given an empty list here")
            return []
        return [f"--{self.name}={','.join(value) if self.kind == 'list' else value}"]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_KINDS = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, float) and math.isfinite(value), "a number"),
    "str": (lambda value: isinstance(value, str) and "\0" not in value, "a text"),
    "list": (_is_texts, "a list of texts"),
    "lists": (
        lambda value: isinstance(value, list) and all(_is_texts(item) for item in value),
        "a list of lists of texts",
    ),
}


@dataclass(frozen=True)
class ModelSizes:
    """The counts of a model flavor that a layout must divide."""

    n_layers: int
    n_heads: int
    vocab_size: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, eq=False)
class Stack:
    """A pinned set of packages and the options its TorchTitan understands."""

    name: str
    pins: Mapping[str, str]
    options: Mapping[str, Option]
    models: Mapping[str, Mapping[str, ModelSizes]]

    @property
    def sections(self) -> set[str]:
        """The first words of the options: `training`, `parallelism`, ..."""
        return {name.partition(".")[0] for name in self.options}

    def option(self, place: str, name: str) -> Option:
        """The option called `name`; a misspelt one is an error that names the nearest real ones."""
        if name not in self.options:
            close = nearest(name, self.options, 3) or [
                full
                for key in nearest(name.rpartition(".")[2], {n.rpartition(".")[2] for n in self.options})
                for full in self.options
                if full.endswith(f".{key}")
            ]
            raise InputError(
                place,
                f"TorchTitan {self.pins['torchtitan']} has no option {name!r}",
                f"nearest: {', '.join(close)}" if close else "see `python -m torchtitan.train --help`",
            )
        return self.options[name]

    def argv(self, options: Mapping[str, Any]) -> list[str]:
        """TorchTitan's argv for checked `options`, in their order."""
        return [word for name, value in options.items() for word in self.options[name].arguments(value)]

    def value(self, options: Mapping[str, Any], name: str) -> Any:
        """What a job with `options` holds for the option `name`: set, or TorchTitan's default."""
        return options[name] if name in options else self.options[name].default

    def model(self, options: Mapping[str, Any]) -> ModelSizes | None:
        """The sizes of the model that `options` name; None for a model the stack has no table of."""
        flavors = self.models.get(self.value(options, "model.name"), {})
        return flavors.get(self.value(options, "model.flavor"))


@functools.cache
def load_stack(name: str = DEFAULT_STACK) -> Stack:
    """Read the stack called `name`."""
    if name not in _REQUIREMENTS:
        raise unknown_name("stack", "stack", name, _REQUIREMENTS)
    table = json.loads((Path(__file__).parent / "stacks" / f"{name}.json").read_text())
    options = {
        option: Option(
            option,
            entry["kind"],
            entry["default"],
            entry.get("optional", False),
            tuple(entry.get("choices", ())),
        )
        for option, entry in table["options"].items()
    }
    models = {
        model: {flavor: ModelSizes(**sizes) for flavor, sizes in flavors.items()}
        for model, flavors in table["models"].items()
    }
    pins = {pin.name: pin.value for pin in read_pins(_REQUIREMENTS[name])}
    return Stack(name, pins, options, models)


@dataclass(frozen=True)
class Layout:
    """How the ranks of a job are divided; every degree at least 1.

    `dp_shard` is resolved: TorchTitan's -1 (the ranks that are left) is replaced by the count, and
    is 0 where the other degrees leave none.
    """

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def loss_rank(self) -> int:
        """The rank that prints the real loss, for every schedule but ZBVZeroBubble (rank 0)."""
        return self.stage_ranks * (self.pp - 1)


DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
}


def layout_of(stack: Stack, options: Mapping[str, Any], world: int) -> Layout:
    """The layout that `options` give a job of `world` ranks."""
    degrees = {short: stack.value(options, name) for short, name in DEGREES.items()}
    if degrees["dp_shard"] == -1:
        others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
        degrees["dp_shard"] = world // max(others, 1)
    return Layout(world=world, **degrees)


def check_arguments(words: Sequence[str], place: str, stack: Stack) -> None:
    """Check TorchTitan arguments as they stand on a command line, before any process starts."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            raise InputError(place, f"found {word!r}", "TorchTitan options start with --section.key")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        positive = f"{section}.{key.removeprefix('no_')}"
        if name not in stack.options and positive in stack.options:
            name = positive
        option = stack.option(place, name)
        if option.kind == "bool":
            if equals:
                raise InputError(
                    f"{place}: {name}", f"takes no value, found {text!r}", f"--{name} or --{section}.no_{key}"
                )
            continue
        if option.kind == "lists":
            while index < len(words) and not words[index].startswith("--"):
                index += 1
            continue
        if not equals:
            if index == len(words):
                raise InputError(place, f"--{name} has no value")
            text = words[index]
            index += 1
        option.parse(f"{place}: {name}", text)


if __name__ == "__main__":
    try:
        check_arguments(sys.argv[1:], "TorchTitan arguments", load_stack())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
