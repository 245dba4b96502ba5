"""A stack: pinned packages, and the options and models of the pinned TorchTitan.

It is read from `requirements.txt` and from `options.json` in the stack's package in `titan/`, which
that package's `job_config.py` generates from the installed TorchTitan.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError, described, nearest, quotes_remedy, unknown_name
from cookbook.base.family import Family, Model
from cookbook.config.dialect.names import ALIASES, OFF, PACKAGE, SET_BY_SCRIPTS
from cookbook.config.pins import read_pins, stack_name


@dataclass(frozen=True)
class Option:
    """One TorchTitan option, e.g. `training.steps`, as the stack's JobConfig declares it."""

    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()

    def check(self, place: str, value: Any) -> Any:
        """Return `value`, converted to TorchTitan's type; raise InputError if it is not allowed."""
        if self.optional and value in (None, "None"):
            return None
        if self.name in OFF and value in (None, "None", "null", "inf", math.inf):
            return 0.0
        if self.kind == "choice":
            if value not in self.choices:
                raise unknown_name(place, "value", str(value), self.choices)
            return value
        if self.kind == "list" and isinstance(value, str):
            value = value.split(",") if value else []
        if self.kind == "float" and _holds("int", value):
            value = float(value)
        if not _holds(self.kind, value):
            found = f"found {described(value)}, allowed: {_ALLOWED[self.kind]}"
            raise InputError(place, found, quotes_remedy(value, _ALLOWED[self.kind]))
        if self.kind == "list" and not value and self.default:
            raise InputError(place, "found an empty list, which cannot be passed as an argument")
        if self.kind == "list" and any("," in item or item == "" for item in value):
            found = f"found {value!r}: items may hold no comma and not be empty"
            raise InputError(place, found, "split the item")
        return value

    def parse(self, place: str, text: str) -> Any:
        # As in YAML, where null is no text and no list either.
        if text in ("None", "null") and (self.optional or self.kind in ("str", "list")):
            return self.check(place, None)
        value: Any = text
        # As in a recipe, and as remedies write it; the text of a glob such as [ab]* is none.
        if self.kind == "list" and re.fullmatch(r"\[.*\]", text):
            with contextlib.suppress(yaml.YAMLError):
                value = yaml.safe_load(text)
        readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
        if self.kind == "bool":
            value = {"true": True, "false": False}.get(text.lower(), text)
        # int() and float() accept non-ASCII digits; TorchTitan and Slurm do not.
        elif self.kind in readers and text.isascii():
            with contextlib.suppress(ValueError):
                value = readers[self.kind](text)
        return self.check(place, value)

    def as_text(self, value: Any) -> str:
        """Return a checked `value` as a text that `parse` and TorchTitan read alike."""
        if self.name in OFF and not value:
            return OFF[self.name]
        if isinstance(value, list):
            return ",".join(value)
        return str(value)


_ALLOWED = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
_ALLOWED |= {"list": "a list of texts"}


def _holds(kind: str, value: Any) -> bool:
    if kind == "list":
        return isinstance(value, list) and all(_holds("str", item) for item in value)
    if kind == "lists":
        return True  # The only such option may only have its default.
    return type(value).__name__ == kind and (kind != "float" or math.isfinite(value))


# Keys of recipes and sweeps that are not TorchTitan options, and how to set them.
_OWN_KEYS = {
    "precision": "use --precision, or `precision` at the top of a recipe or sweep",
    "ep_backend": "use --ep-backend, or `ep_backend` at the top of a recipe or sweep",
    "nodes": "use --nodes, or `nodes` at the top of a recipe",
}


@dataclass(frozen=True, eq=False)
class Stack:
    """A pinned set of packages, with the options and model families of its TorchTitan."""

    name: str
    pins: Mapping[str, str]
    options: Mapping[str, Option]
    sections: frozenset[str]  # first words of option names: `training`, `parallelism`, ...
    families: Mapping[str, Family]
    refused_families: Mapping[str, str]
    datasets: Sequence[str]

    @property
    def hooks(self) -> str:
        """The package that TorchTitan imports in every training process."""
        return PACKAGE

    def option(self, place: str, name: str) -> Option:
        """Return the option called `name`; raise InputError with the nearest names if unknown."""
        if name not in self.options:
            known = [full for full in self.options if full not in SET_BY_SCRIPTS]
            last = {full: full.rpartition(".")[2] for full in known}
            key = name.rpartition(".")[2].lower()
            # Users take an option for one of another section, or write another project's name.
            close = [full for full in last if key == last[full] or full == ALIASES.get(key)]
            # They abbreviate degrees: for `tp`, suggest `tensor_parallel_degree`.
            initials = {full: "".join(w[:1] for w in last[full].split("_")) for full in last}
            close = close or [full for full in initials if initials[full] == f"{key}d"]
            close = close or nearest(name, last, 3)
            close = close or [full for full in last if last[full] in nearest(key, last.values())]
            found = f"TorchTitan {self.pins['torchtitan']} has no option {name!r}"
            remedy = f"nearest: {', '.join(close)}" if close else ""
            raise InputError(place, found, remedy or "see docs/reference/options.md")
        return self.options[name]

    def setting(self, place: str, name: str) -> Option:
        """Return the option called `name`; raise InputError if users may not set it."""
        if name in _OWN_KEYS:
            raise InputError(place, "is not an option of TorchTitan", _OWN_KEYS[name])
        if name in SET_BY_SCRIPTS:
            raise InputError(place, f"{name} is set by the scripts", SET_BY_SCRIPTS[name])
        return self.option(place, name)


@functools.cache
def load_stack(name: str | None = None) -> Stack:
    """Read the stack that requirements.txt names; raise InputError if `name` is another one."""
    if name not in (None, own := stack_name()):
        raise unknown_name("requirements.txt", "stack", str(name), [own])
    # Beside this code: a job runs a copy of the cookbook, and the checkout may have changed since.
    file = Path(__file__).parents[2].joinpath(*PACKAGE.split("."), "options.json")
    pins = {pin.name: pin.value for pin in read_pins()}
    if not file.is_file():
        found = f"no package in cookbook/titan is for torchtitan {pins['torchtitan']}"
        raise InputError("requirements.txt", found, "see `another stack` in CONTRIBUTING.md")
    table = json.loads(file.read_text(encoding="utf-8"))
    choices, optional = table["choices"], table["optional"]
    options = {}
    for one, default in table["options"].items():
        kind = optional.get(one, "choice" if one in choices else type(default).__name__)
        options[one] = Option(one, kind, default, one in optional, tuple(choices.get(one, ())))
    families = {}
    for entry in table["families"]:
        flavors = {name: Model(**sizes) for name, sizes in entry["flavors"].items()}
        families[entry["name"]] = Family(**{**entry, "flavors": flavors})
    sections = frozenset(option.partition(".")[0] for option in options)
    refused, datasets = table["refused_families"], table["datasets"]
    return Stack(own, pins, options, sections, families, refused, datasets)
