"""In: the name of a sweep, or of one recipe. Out: its cells, in order, none twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, named_at, unknown_name
from cookbook.base.yamlfile import Key, YamlFile, check_value, described, read_yaml
from cookbook.cells.cell import Cell, resolve_cell
from cookbook.cells.cluster import Cluster
from cookbook.cells.recipe import (
    Overlay,
    Recipe,
    Setting,
    Settings,
    find_file,
    flatten,
    load_overlay,
    load_recipe,
    split_keys,
)
from cookbook.stack.stack import Stack

Pair = tuple[Overlay, Overlay]


@dataclass(frozen=True)
class Sweep:
    """Recipes and the axes to multiply them by.

    `pairs` are (precision, EP backend), either the product of two axes or listed one by one;
    `vary` multiplies further by the values of any TorchTitan options.
    """

    name: str
    description: str
    recipes: tuple[Recipe, ...]
    pairs: tuple[Pair, ...]
    baseline: Pair | None
    settings: Settings
    vary: Mapping[str, tuple[Setting, ...]]


@dataclass(frozen=True)
class CellRequest:
    """What the command line asks of every cell; None and empty leave the sweep's own choice."""

    cluster: Cluster
    stack: Stack
    precision: str | None = None
    ep_backend: str | None = None
    nodes: int | None = None
    overrides: Mapping[str, Setting] | None = None


_KEYS = {
    "description": Key(required=True),
    "recipes": Key("texts", required=True),
    "precision": Key("texts"),
    "ep_backend": Key("texts"),
    "cells": Key("mappings"),
    "baseline": Key("mapping"),
    "options": Key("mapping", default={}),
    "vary": Key("mapping", default={}),
}


def load_sweep(name: str, stack: Stack) -> Sweep:
    """Read the sweep called `name`, or at the path `name`."""
    path = find_file("sweep", name, "sweep")
    file = read_yaml(path)
    own, stray = split_keys(file, _KEYS, stack)
    for name, setting in stray.items():
        raise InputError(
            setting.place,
            "is a TorchTitan option, not a key of a sweep",
            f"put {name} below `options`",
        )
    for key in ("recipes", "precision", "ep_backend", "cells"):
        if own[key] == []:
            raise InputError(file.place(key), "is empty: a sweep over nothing", "name at least one")
    pairs = _pairs(file, own, stack)
    baseline = None
    if own["baseline"] is not None:
        baseline = _pair(file, own["baseline"], ("baseline",), stack)
        if _names(baseline) not in map(_names, pairs):
            raise unknown_name(
                file.place("baseline"),
                "cell of the sweep",
                "+".join(_names(baseline)),
                ["+".join(_names(pair)) for pair in pairs],
            )
    with named_at(file.place("recipes")):
        recipes = tuple(load_recipe(recipe, stack) for recipe in own["recipes"])
    return Sweep(
        name=path.stem,
        description=own["description"],
        recipes=recipes,
        pairs=pairs,
        baseline=baseline,
        settings=flatten(file, own["options"], stack, ("options",)),
        vary=_vary(file, own["vary"], stack),
    )


def sweep_of_recipe(recipe: Recipe, stack: Stack) -> Sweep:
    """A single recipe as a sweep of one cell, BF16 with the standard EP backend by default."""
    pair = load_overlay("precision", "bf16", stack), load_overlay("ep_backend", "standard", stack)
    return Sweep(recipe.short_name, recipe.description, (recipe,), (pair,), None, {}, {})


def expand_sweep(sweep: Sweep, request: CellRequest) -> list[Cell]:
    """The cells of `sweep`, with what `request` asks of each; raises where none is left."""
    cells: dict[str, Cell] = {}
    baseline_names: dict[str, str] = {}
    # An option that the command line sets is held to that one value.
    vary = {
        name: axis for name, axis in sweep.vary.items() if name not in (request.overrides or {})
    }
    for recipe, pair, varied in itertools.product(
        sweep.recipes, _asked_pairs(sweep, request), _varied(vary)
    ):
        cell = resolve_cell(
            recipe,
            *pair,
            request.cluster,
            request.stack,
            nodes=request.nodes,
            sweep_settings=sweep.settings,
            varied=varied,
            overrides=request.overrides,
        )
        if cell.name in cells:
            # Two recipes of a sweep may have the same stand-in: it runs once.
            if cell.stand_in_for is not None:
                continue
            raise InputError(
                f"sweep {sweep.name}",
                f"two of its cells are called {cell.name!r}",
                "no value of an axis may stand twice, and recipes need names of their own",
            )
        cells[cell.name] = cell
        if sweep.baseline and _names(pair) == _names(sweep.baseline):
            baseline_names[_group(cell, varied)] = cell.name
    if not cells:
        raise InputError(sweep.name, "a sweep over nothing: no cell is left", "widen the options")
    return [
        replace(cell, baseline=baseline_names.get(_group(cell, varied)))
        for cell, varied in zip(cells.values(), _groups(cells, vary), strict=True)
    ]


def _group(cell: Cell, varied: Mapping[str, Setting]) -> str:
    """Cells of one group differ in precision and EP backend alone, so they share a baseline."""
    return f"{cell.recipe.name} {[(name, setting.value) for name, setting in varied.items()]}"


def _groups(cells: Mapping[str, Cell], vary: Iterable[str]) -> Iterator[Mapping[str, Setting]]:
    for cell in cells.values():
        yield {name: cell.settings[name] for name in vary}


def _asked_pairs(sweep: Sweep, request: CellRequest) -> list[Pair]:
    """The sweep's pairs, with the axis that the command line names held to that one value."""
    pairs: dict[tuple[str, str], Pair] = {}
    for precision, ep_backend in sweep.pairs:
        if request.precision is not None:
            with named_at("--precision"):
                precision = load_overlay("precision", request.precision, request.stack)
        if request.ep_backend is not None:
            with named_at("--ep-backend"):
                ep_backend = load_overlay("ep_backend", request.ep_backend, request.stack)
        pairs.setdefault((precision.name, ep_backend.name), (precision, ep_backend))
    return list(pairs.values())


def _varied(vary: Mapping[str, tuple[Setting, ...]]) -> Iterator[dict[str, Setting]]:
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values, strict=True))


def _names(pair: Pair) -> tuple[str, str]:
    return pair[0].name, pair[1].name


def _pairs(file: YamlFile, own: Mapping[str, Any], stack: Stack) -> tuple[Pair, ...]:
    if own["cells"] is not None:
        if own["precision"] or own["ep_backend"]:
            raise InputError(
                file.place("cells"),
                "stands beside `precision` or `ep_backend`",
                "keep one of the two",
            )
        return tuple(_pair(file, cell, ("cells",), stack) for cell in own["cells"])
    return tuple(
        _pair(file, {"precision": precision, "ep_backend": ep_backend}, (), stack)
        for precision, ep_backend in itertools.product(
            own["precision"] or ["bf16"], own["ep_backend"] or ["standard"]
        )
    )


def _pair(file: YamlFile, names: Mapping[str, Any], within: tuple[str, ...], stack: Stack) -> Pair:
    for key in names:
        if key not in ("precision", "ep_backend"):
            raise unknown_name(file.place(*within), "key", key, ("precision", "ep_backend"))
    overlays = []
    for kind in ("precision", "ep_backend"):
        place = file.place(*within) if within else file.place(kind)
        name = check_value(f"{place}: {kind}", names.get(kind), Key(required=True))
        with named_at(place):
            overlays.append(load_overlay(kind, name, stack))
    return overlays[0], overlays[1]


def _vary(
    file: YamlFile, mapping: Mapping[str, Any], stack: Stack
) -> dict[str, tuple[Setting, ...]]:
    axes = {}
    for name, values in mapping.items():
        place = file.place("vary", name)
        option = stack.setting(place, name)
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            found = "an empty list, a sweep over nothing" if values == [] else described(values)
            raise InputError(place, f"found {found}, allowed: a list of at least one value")
        axes[name] = tuple(Setting(option.check(place, value), place) for value in values)
    return axes


def command_line_settings(words: Sequence[str], stack: Stack) -> dict[str, Setting]:
    """`--set SECTION.KEY=VALUE` words as settings."""
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        place = f"--set {name}"
        if not equals:
            raise InputError(place, "has no value", "write --set SECTION.KEY=VALUE")
        settings[name] = Setting(stack.setting(place, name).parse(place, text), place)
    return settings


def is_sweep(name: str) -> bool:
    """Whether `name` names a sweep: one in the cookbook, or a file with a sweep's keys."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).is_file() and "recipes" in read_yaml(Path(name)).content
    return (find_file("sweep", "matrix", "sweep").parent / f"{name}.yaml").is_file()
