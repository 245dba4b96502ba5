"""In: the name of a recipe, precision or EP backend. Out: its YAML file, checked by the stack."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, named_at, unknown_name
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import Key, YamlFile, check_value, read_keys, read_yaml
from cookbook.stack.stack import Stack

# Safe in a shell, in a path, and as a name of jobs and W&B runs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME_ALLOWED = "letters, digits, '.', '-' and '_', a letter or digit first"


@dataclass(frozen=True)
class Setting:
    """One TorchTitan option with a checked value, and the place that set it."""

    value: Any
    place: str


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Recipe:
    """A model, its layout on the cluster and its training options."""

    name: str
    short_name: str
    description: str
    nodes: int
    stand_in: str | None
    published: Mapping[str, float]
    published_source: str | None
    settings: Settings
    path: Path


@dataclass(frozen=True)
class Needs:
    """What an overlay asks of the machine and of the rest of the cell."""

    device: str | None = None
    compute_capability: float = 0.0
    packages: tuple[str, ...] = ()
    expert_parallel: bool = False
    precision: tuple[str, ...] = ()
    settings: Settings | None = None


@dataclass(frozen=True)
class Overlay:
    """A precision or an EP backend: options laid over a recipe, and what they need.

    `environment_from` exports a variable with the value of another, where the cluster sets that.
    `emulated` is laid over `settings` where the GPU lacks `needs.compute_capability`; None where
    there is no emulation.
    """

    name: str
    description: str
    synonyms: tuple[str, ...]
    needs: Needs
    environment: Mapping[str, str]
    environment_from: Mapping[str, str]
    settings: Settings
    emulated: Settings | None
    path: Path


_RECIPE_KEYS = {
    "name": Key(required=True),
    "description": Key(required=True),
    "nodes": Key("int", required=True),
    "stand_in": Key(),
    "published": Key("mapping", default={}),
}
_PUBLISHED_KEYS = {
    "source": Key(required=True),
    "tokens_per_second_per_gpu": Key("numbers", default={}),
}
_OVERLAY_KEYS = {
    "description": Key(required=True),
    "synonyms": Key("texts", default=[]),
    "needs": Key("mapping", default={}),
    "environment": Key("scalars", default={}),
    "environment_from": Key("scalars", default={}),
    "emulated": Key("mapping"),
}
_NEEDS_KEYS = {
    "device": Key(choices=("cuda",)),
    "compute_capability": Key("number", default=0.0),
    "packages": Key("texts", default=[]),
    "expert_parallel": Key("bool", default=False),
    "precision": Key("texts", default=[]),
    "options": Key("mapping", default={}),
}


def names_in(kind: str) -> list[str]:
    """The names of the files in `kind`: "" (recipes), precision, ep_backend, cluster or sweep."""
    return sorted(path.stem for path in (RECIPES / kind).glob("*.yaml"))


def find_file(kind: str, name: str, what: str) -> Path:
    """The file for `name`, which may also be the path of a YAML file of the user's own."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise InputError(
                name, f"is a folder, not a {what} file" if path.is_dir() else f"no such {what} file"
            )
        # Cells, jobs and folders are named after it.
        if not _NAME.fullmatch(path.stem):
            raise InputError(
                name, f"{path.stem!r} is no name of a {what}, allowed: {_NAME_ALLOWED}"
            )
        return path
    path = RECIPES / kind / f"{name}.yaml"
    if "/" in name or not path.is_file():
        error = unknown_name(what, what, name, names_in(kind))
        for other, verb in {"": "run", "sweep": "sweep"}.items():
            if what in ("recipe", "sweep") and name in names_in(other):
                raise InputError(error.place, error.found, f"write: python submit.py {verb} {name}")
        raise error
    return path


@functools.cache
def load_recipe(name: str, stack: Stack) -> Recipe:
    """Read the recipe called `name`, or at the path `name`."""
    path = find_file("", name, "recipe")
    file = read_yaml(path)
    own, settings = split_keys(file, _RECIPE_KEYS, stack)
    published = {}
    source = None
    if own["published"]:
        block = read_keys(file, _PUBLISHED_KEYS, ("published",))
        published, source = block["tokens_per_second_per_gpu"], block["source"]
        pairs = [f"{p}+{e}" for p in names_in("precision") for e in names_in("ep_backend")]
        for pair in published:
            if pair not in pairs:
                place = file.place("published", "tokens_per_second_per_gpu", pair)
                raise unknown_name(place, "pair", pair, pairs)
    if own["stand_in"] is not None:
        with named_at(file.place("stand_in")):
            find_file("", own["stand_in"], "recipe")
    if not _NAME.fullmatch(own["name"]):
        raise InputError(file.place("name"), f"found {own['name']!r}, allowed: {_NAME_ALLOWED}")
    return Recipe(
        name=path.stem,
        short_name=own["name"],
        description=own["description"],
        nodes=own["nodes"],
        stand_in=own["stand_in"],
        published=published,
        published_source=source,
        settings=settings,
        path=path,
    )


@functools.cache
def load_overlay(kind: str, name: str, stack: Stack) -> Overlay:
    """Read the overlay of `kind` (`precision` or `ep_backend`) called `name`, or by a synonym."""
    what = {"precision": "precision", "ep_backend": "EP backend"}[kind]
    if not name.endswith((".yaml", ".yml")) and name not in names_in(kind):
        for candidate in names_in(kind):
            overlay = load_overlay(kind, candidate, stack)
            if name in overlay.synonyms:
                return overlay
    path = find_file(kind, name, what)
    file = read_yaml(path)
    own, settings = split_keys(file, _OVERLAY_KEYS, stack)
    for synonym in own["synonyms"]:
        if not _NAME.fullmatch(synonym):
            raise InputError(file.place("synonyms"), f"found {synonym!r}, allowed: {_NAME_ALLOWED}")
    _check_variables(file, "environment_from", own["environment_from"].values())
    needs = read_keys(file, _NEEDS_KEYS, ("needs",)) if own["needs"] else {}
    emulated = None
    if own["emulated"] is not None:
        emulated = flatten(file, own["emulated"], stack, ("emulated",))
    return Overlay(
        name=path.stem,
        description=own["description"],
        synonyms=tuple(own["synonyms"]),
        needs=Needs(
            device=needs.get("device"),
            compute_capability=float(needs.get("compute_capability", 0)),
            packages=tuple(needs.get("packages", ())),
            expert_parallel=needs.get("expert_parallel", False),
            precision=tuple(needs.get("precision", ())),
            settings=flatten(file, needs.get("options", {}), stack, ("needs", "options")),
        ),
        environment=environment_of(file, own["environment"]),
        environment_from=environment_of(file, own["environment_from"]),
        settings=settings,
        emulated=emulated,
        path=path,
    )


def environment_of(file: YamlFile, mapping: Mapping[str, Any]) -> dict[str, str]:
    """The values as the texts that a shell exports; YAML's true is 1."""
    _check_variables(file, "environment", mapping)
    return {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in mapping.items()
    }


def _check_variables(file: YamlFile, key: str, names: Iterable[Any]) -> None:
    """These stand in scripts as they are, so nothing but a variable's name may."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise InputError(file.place(key), f"{name!r} is not the name of a variable")


def split_keys(
    file: YamlFile, own_keys: Mapping[str, Key], stack: Stack
) -> tuple[dict[str, Any], Settings]:
    """Separate a file's own keys from the TorchTitan sections beside them; check both."""
    sections = {}
    for key, value in file.content.items():
        if key.partition(".")[0] in stack.sections:
            sections[key] = value
        elif key not in own_keys:
            raise unknown_name(file.place(key), "key", key, [*own_keys, *stack.sections])
    own = {
        name: check_value(file.place(name), file.content.get(name), key)
        for name, key in own_keys.items()
    }
    return own, flatten(file, sections, stack)


def flatten(
    file: YamlFile, sections: Mapping[str, Any], stack: Stack, within: tuple[str, ...] = ()
) -> dict[str, Setting]:
    """Options by dotted name from nested sections; `a: {b: 1}` and `a.b: 1` mean the same."""
    settings: dict[str, Setting] = {}
    _flatten(file, sections, stack, within, "", settings)
    return settings


def _flatten(
    file: YamlFile,
    mapping: Mapping[str, Any],
    stack: Stack,
    keys: tuple[str, ...],
    prefix: str,
    settings: dict[str, Setting],
) -> None:
    for key, value in mapping.items():
        name, below = f"{prefix}{key}", (*keys, key)
        if isinstance(value, dict) and name not in stack.options:
            if not any(option.startswith(f"{name}.") for option in stack.options):
                stack.setting(file.place(*below), name)
            _flatten(file, value, stack, below, f"{name}.", settings)
            continue
        place = file.place(*below)
        option = stack.setting(place, name)
        if name in settings:
            raise InputError(place, f"{name} stands twice, first at {settings[name].place}")
        settings[name] = Setting(option.check(place, value), place)
