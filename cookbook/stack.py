"""In: the name of a stack. Out: its pins, the options its TorchTitan knows, and their argv.

This is the one module that knows which options there are and how they are written as argv. It has
that from `stacks/<name>.json` (made from the installed TorchTitan, see `titan/option_table.py`) and
from `requirements.txt`; a second stack is a second pair of files.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.errors import InputError, nearest, unknown_name
from cookbook.pins import REQUIREMENTS, read_pins
from cookbook.yamlfile import described

DEFAULT_STACK = "2026.02"
_REQUIREMENTS = {"2026.02": REQUIREMENTS}
# What the scripts tell TorchTitan themselves, after all settings, and what to do instead.
_SET_BY_SCRIPTS = {
    "job.dump_folder": "set CELL_DIR or COOKBOOK_RUNS in the environment",
    "metrics.save_tb_folder": "it is in the attempt's folder",
    "comm.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_memory_snapshot_folder": "it is in the attempt's folder",
    "job.custom_config_module": "add options to cookbook/titan/job_config.py",
    "experimental.custom_import": "import the module in cookbook/titan/__init__.py",
    "cookbook.precision": "use --precision",
    "cookbook.ep_backend": "use --ep-backend",
    "cookbook.emulated": "it follows from precision and cluster",
}


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
        if self.kind == "float" and _KINDS["int"][0](value):
            value = float(value) if abs(value) < 1e300 else math.inf
        holds, allowed = _KINDS[self.kind]
        if not holds(value):
            raise InputError(place, f"found {described(value)}, allowed: {allowed}")
        if self.optional and value == "None":
            raise InputError(place, "found the text 'None', which TorchTitan reads as nothing")
        if self.kind == "list" and not value and self.default:
            # TorchTitan reads an empty word as a list of one empty name.
            raise InputError(place, "found an empty list, which TorchTitan cannot be given here")
        for items in {"list": [value], "lists": value}.get(self.kind, ()):
            if any("," in item or item == "" for item in items):
                raise InputError(
                    place,
                    f"found {items!r}: items may hold no comma and not be empty",
                    "split the item",
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
            return []
        return [f"--{self.name}={','.join(value) if self.kind == 'list' else value}"]


def _is_text(value: Any) -> bool:
    """Whether `value` is a text that can be a word of a command line."""
    if not isinstance(value, str) or "\0" in value:
        return False
    # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, float) and math.isfinite(value), "a number"),
    "str": (_is_text, "a text in UTF-8"),
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
                for key in nearest(
                    name.rpartition(".")[2], {n.rpartition(".")[2] for n in self.options}
                )
                for full in self.options
                if full.endswith(f".{key}")
            ]
            raise InputError(
                place,
                f"TorchTitan {self.pins['torchtitan']} has no option {name!r}",
                f"nearest: {', '.join(close)}"
                if close
                else "see `python -m torchtitan.train --help`",
            )
        return self.options[name]

    def setting(self, place: str, name: str) -> Option:
        """`option`, for YAML files and `--set`, where what the scripts set may not stand."""
        if name in _SET_BY_SCRIPTS:
            raise InputError(place, f"{name} is set by the scripts", _SET_BY_SCRIPTS[name])
        return self.option(place, name)

    def argv(self, options: Mapping[str, Any]) -> list[str]:
        """TorchTitan's argv for checked `options`, in their order."""
        return [
            word for name, value in options.items() for word in self.options[name].arguments(value)
        ]

    def value(self, options: Mapping[str, Any], name: str) -> Any:
        """What a job with `options` holds for the option `name`: set, or TorchTitan's default."""
        return options[name] if name in options else self.options[name].default

    def model(self, options: Mapping[str, Any]) -> ModelSizes | None:
        """The sizes of the model that `options` name; None for one that the stack does not know."""
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


def parse_arguments(words: Sequence[str], place: str, stack: Stack) -> dict[str, Any]:
    """The options that TorchTitan arguments set, checked; of an option named twice, the last.

    Args:
        words: as they stand on a command line, `--section.key=value` or `--section.key value`.
        place: what an error names as the place of the words.
    """
    options: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            raise InputError(
                place, f"found {word!r}", "TorchTitan options start with --section.key"
            )
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        section, _, key = name.rpartition(".")
        positive = f"{section}.{key.removeprefix('no_')}"
        is_negative = name not in stack.options and positive in stack.options
        option = stack.option(place, positive if is_negative else name)
        at = f"{place}: {option.name}"
        if option.kind == "bool":
            if equals:
                no = f"--{section}.no_{key}"
                raise InputError(at, f"takes no value, found {text!r}", f"write --{name} or {no}")
            options[option.name] = not is_negative
        elif option.kind == "lists" and not equals:
            items = []
            while index < len(words) and not words[index].startswith("--"):
                items.append(words[index].split(","))
                index += 1
            options[option.name] = option.check(at, items)
        else:
            if not equals:
                if index == len(words):
                    raise InputError(at, "has no value")
                text = words[index]
                index += 1
            options[option.name] = option.parse(at, text)
    return options
