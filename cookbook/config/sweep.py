"""A sweep: recipes crossed with axes, read from a YAML file, and the resulting cells."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, described, named_at, unknown_name
from cookbook.base.yamlfile import Text, Texts, YamlFile, fill, read_yaml
from cookbook.config.asked import of_speed
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster
from cookbook.config.options import Setting, Settings, read_options
from cookbook.config.recipe import (
    Overlay,
    Recipe,
    check_name,
    find_file,
    load_ep_backend,
    load_precision,
    load_recipe,
    names_in,
    word_of,
)
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.config.stack import load_stack

Pair = tuple[Overlay, Overlay]


@dataclass(frozen=True)
class Point:
    """One combination of precision and EP backend in a sweep, and the settings for it."""

    pair: Pair | None = None  # None for the recipe's own precision and EP backend
    recipe: Recipe | None = None  # the only recipe that uses the point; None for all recipes
    name: str = ""  # suffix for the names of the point's cells
    settings: Settings = field(default_factory=dict)  # settings that override the sweep's
    prediction: str = ""  # text for the report: expected speed, and what a deviation means


@dataclass(frozen=True)
class Sweep:
    """Recipes and the axes that they are crossed with."""

    name: str
    description: str
    recipes: tuple[Recipe, ...]
    points: tuple[Point, ...] = (Point(),)  # the pairs of precision and EP backend to train
    baseline: str | None = None  # the baseline's pair, such as `bf16+standard`
    settings: Settings = field(default_factory=dict)
    # Further axes: TorchTitan options, and the values to try for each.
    vary: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class CellRequest:
    """The command line's choices for every cell; None or empty keeps the sweep's values."""

    cluster: Cluster
    precision: str | None = None
    ep_backend: str | None = None
    nodes: int | None = None
    overrides: Settings = field(default_factory=dict)


def expand_sweep(sweep: Sweep, request: CellRequest) -> list[Cell]:
    """Return the cells of `sweep` in order, without duplicates."""
    cells: dict[str, Cell] = {}
    # Cells of a group differ only in precision and EP backend, so they share a baseline.
    groups: dict[str, tuple[str, Point]] = {}
    baselines: dict[str, str] = {}
    axes = {name: axis for name, axis in sweep.vary.items() if name not in request.overrides}
    for recipe, point in itertools.product(sweep.recipes, sweep.points):
        if point.recipe not in (None, recipe):
            continue
        pair = requested_pair(recipe, request, point.pair)
        parts = (recipe, *pair, request.cluster, request.nodes)
        of_sweep = {**sweep.settings, **point.settings}
        for values in itertools.product(*axes.values()):
            varied = dict(zip(axes, values, strict=True))
            overrides = {**varied, **request.overrides}
            cell = merge_config(*parts, of_sweep=of_sweep, overrides=overrides)
            words = [point.name] if point.name and not cell.stand_in_for else []
            words += [f"{key.rpartition('.')[2]}_{word_of(varied[key].value)}" for key in varied]
            cell = resolve_cell(cell, words)
            group = f"{recipe.name} {point.name} {[setting.value for setting in values]}"
            if cell.name in cells:
                # Skip duplicates: cluster `local` can replace two recipes by the same small one,
                # and --precision or --ep-backend can make two combinations equal.
                other, other_point = groups[cell.name]
                if cell.stand_in_for or (other == group and other_point is not point):
                    continue
                found = f"two of its cells are called {cell.name!r}"
                remedy = "list each value of an axis once, and give each recipe its own name"
                raise InputError(f"sweep {sweep.name}", found, remedy)
            is_own = pair == point.pair and cell.nodes == recipe.nodes and not cell.stand_in_for
            if is_own and not of_speed(request.overrides):
                cell = replace(cell, prediction=point.prediction or None)
            cells[cell.name], groups[cell.name] = cell, (group, point)
            if cell.pair == sweep.baseline:
                baselines[group] = cell.name
    return [replace(cell, baseline=baselines.get(groups[name][0])) for name, cell in cells.items()]


def in_rounds(cells: Sequence[Cell], num_repeats: int) -> list[Cell]:
    """Return every cell `num_repeats` times, in training order: A B, then B A, then A B, ...

    The cells of a round run next to each other in alternating order, so a machine that slows down
    affects both sides of a comparison equally. Repeats are separate cells: `<cell>-r2`, ...
    """
    found = list(cells)
    for repeat in range(2, num_repeats + 1):
        runnable = [cell for cell in cells if not cell.refused]
        for cell in runnable if repeat % 2 else reversed(runnable):
            name = f"{cell.name}-r{repeat}"
            if any(other.name == name for other in cells):
                raise InputError(f"--repeat {num_repeats}", f"the sweep has a cell {name} already")
            found.append(replace(cell, name=name, repeat_of=cell.name, repeat=repeat))
    return found


def requested_pair(recipe: Recipe, request: CellRequest, pair: Pair | None = None) -> Pair:
    """Look up the precision and the EP backend in `request`, then in `pair`, then in `recipe`."""
    cluster = request.cluster
    if cluster.scheduler == "local" and recipe.stand_in is not None:
        recipe = load_recipe(recipe.stand_in)
    precision, ep_backend = pair or recipe.pair
    if request.precision is not None:
        with named_at("--precision"):
            precision = load_precision(request.precision)
    if request.ep_backend is not None:
        with named_at("--ep-backend"):
            ep_backend = load_ep_backend(request.ep_backend)
    return precision, ep_backend


def _pair_name(pair: Pair) -> str:
    return "+".join(overlay.name for overlay in pair)


@dataclass(frozen=True)
class _Names:
    precision: Text
    ep_backend: Text


@dataclass(frozen=True)
class _Entry(_Names):
    recipe: Text | None = None
    name: Text = ""
    options: dict[str, Any] = field(default_factory=dict)
    prediction: Text = ""


@dataclass(frozen=True)
class _File:
    description: Text
    recipes: Texts
    precision: Texts = ()
    ep_backend: Texts = ()
    cells: tuple[_Entry, ...] = ()
    baseline: _Names | None = None
    options: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, Any] = field(default_factory=dict)


def load_sweep(name: str) -> Sweep:
    path = find_file("sweep", name)
    file = read_yaml(path)
    if "recipes" not in file.content and "nodes" in file.content:
        remedy = f"write: python submit.py run {name}"
        raise InputError(file.place("nodes"), "is a key of a recipe", remedy)
    for key in file.content:
        if key.partition(".")[0] in load_stack().sections:
            found = "is a TorchTitan option, not a key of a sweep"
            raise InputError(file.place(key), found, f"put {key} below `options`")
    own = fill(_File, file)
    for key in ("recipes", "precision", "ep_backend", "cells"):
        if file.content.get(key) == []:
            raise InputError(file.place(key), "is empty: a sweep over nothing", "name at least one")
    with named_at(file.place("recipes")):
        recipes = tuple(load_recipe(recipe) for recipe in own.recipes)
    points = tuple(_points(file, own, recipes))
    baseline = _pair_name(_pair(file, own.baseline, "baseline")) if own.baseline else None
    if baseline:
        known = {_pair_name(one.pair or recipe.pair) for one in points for recipe in recipes}
        if baseline not in known:
            raise unknown_name(file.place("baseline"), "cell of the sweep", baseline, known)
    axes = {}
    for name, values in own.vary.items():
        place = file.place("vary", name)
        option = load_stack().setting(place, name)
        if not isinstance(values, list) or not values:
            found = "an empty list, a sweep over nothing" if values == [] else described(values)
            raise InputError(place, f"found {found}, allowed: a list of at least one value")
        axes[name] = tuple(Setting(option.check(place, value), place) for value in values)
    settings = read_options(file, own.options, ("options",))
    return Sweep(path.stem, own.description, recipes, points, baseline, settings, axes)


def sweep_of_recipe(name: str) -> Sweep:
    """Return a sweep with one cell: the recipe `name` with its own precision and EP backend."""
    recipe = load_recipe(name)
    return Sweep(recipe.short_name, recipe.description, (recipe,))


def is_sweep(name: str) -> bool:
    """Return whether `name` is a sweep of the cookbook or a YAML file with the key `recipes`."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).is_file() and "recipes" in read_yaml(Path(name)).content
    return name in names_in("sweep")


def _points(file: YamlFile, own: _File, recipes: tuple[Recipe, ...]) -> Iterator[Point]:
    has_axes = own.precision or own.ep_backend
    if own.cells and has_axes:
        found = "cannot be combined with `precision` or `ep_backend`"
        raise InputError(file.place("cells"), found, "keep one of the two")
    if not own.cells:
        axes = itertools.product(own.precision or ("bf16",), own.ep_backend or ("standard",))
        pairs = (_pair(file, _Names(*names)) for names in axes)
        yield from map(Point, pairs if has_axes else (None,))
    by_name = {recipe.name: recipe for recipe in recipes}
    for index, entry in enumerate(own.cells):
        within = ("cells", str(index))
        if entry.name:
            check_name(file.place(*within, "name"), entry.name)
        if entry.recipe is not None and entry.recipe not in by_name:
            place = file.place(*within, "recipe")
            raise unknown_name(place, "recipe of the sweep", entry.recipe, by_name)
        settings = read_options(file, entry.options, (*within, "options"))
        recipe = by_name[entry.recipe] if entry.recipe else None
        prediction = " ".join(entry.prediction.split())
        yield Point(_pair(file, entry, "cells"), recipe, entry.name, settings, prediction)


def _pair(file: YamlFile, names: _Names, *within: str) -> Pair:
    with named_at(file.place(*within or ("precision",))):
        precision = load_precision(names.precision)
    with named_at(file.place(*within or ("ep_backend",))):
        return precision, load_ep_backend(names.ep_backend)
