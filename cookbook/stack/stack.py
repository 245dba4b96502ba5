"""In: the name of a stack. Out: its pins, the options its TorchTitan knows, and their argv.

This is the one module that knows which options there are and how argv names them. It has that from
`stacks/<name>.json` (made from the installed TorchTitan, see `titan/option_table.py`) and
from `requirements.txt`; a second stack is a second pair of files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, nearest, unknown_name
from cookbook.base.paths import REQUIREMENTS
from cookbook.stack.option import Option
from cookbook.stack.pins import read_pins

DEFAULT_STACK = "2026.02"
_REQUIREMENTS = {"2026.02": REQUIREMENTS}
# What the scripts tell TorchTitan themselves, after all settings, and what to do instead.
_SET_BY_SCRIPTS = {
    "job.dump_folder": "set CELL_DIR or COOKBOOK_RUNS in the environment",
    "metrics.save_tb_folder": "it is in the attempt's folder",
    "comm.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_memory_snapshot_folder": "it is in the attempt's folder",
    "job.custom_config_module": "add options to cookbook/titan/stack_2026_02/job_config.py",
    "experimental.custom_import": "import the module in cookbook/titan/__init__.py",
    "cookbook.precision": "use --precision",
    "cookbook.ep_backend": "use --ep-backend",
    "cookbook.grouped_gemms": "declare it in the precision's active block",
    "cookbook.linear_layers": "declare it in the precision's active block",
    "cookbook.dispatch": "declare it in the EP backend's active block",
    "cookbook.emulated": "it follows from precision and cluster",
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
    table = json.loads((Path(__file__).parent / "tables" / f"{name}.json").read_text())
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
