"""A sweep: recipes and the axes to multiply them by, from a YAML file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.base.errors import InputError, described, named_at, unknown_name
from cookbook.base.schema import Mappings, Text, Texts, Unchecked, fill, mapping_at
from cookbook.base.yamlfile import YamlFile, read_yaml, shown_path
from cookbook.config.names import find_file, names_in
from cookbook.config.options import Setting, Settings
from cookbook.config.overlay import Kind, Overlay, load_ep_backend, load_overlay, load_precision
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.shared_keys import read_options, sections
from cookbook.config.stack import load_stack

Pair = tuple[Overlay, Overlay]
_KINDS: tuple[Kind, Kind] = ("precision", "ep_backend")


@dataclass(frozen=True)
class Sweep:
    """Recipes and the axes to multiply them by.

    Attributes:
        pairs: (precision, EP backend), either the product of two axes or listed one by one.
        vary: multiplies further by the values of any TorchTitan options.
    """

    name: str
    description: str
    recipes: tuple[Recipe, ...]
    pairs: tuple[Pair, ...]
    baseline: Pair | None = None
    settings: Settings = field(default_factory=dict)
    vary: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    """The keys of a sweep file."""

    description: Text
    recipes: Texts
    precision: Texts | None = None
    ep_backend: Texts | None = None
    cells: Mappings | None = None
    baseline: Unchecked | None = None
    options: Unchecked = field(default_factory=Unchecked)
    vary: Unchecked = field(default_factory=Unchecked)


def load_sweep(name: str) -> Sweep:
    """Read the sweep called `name`, or at the path `name`."""
    path = find_file("sweep", name)
    file = read_yaml(path)
    for key in file.content:
        if key.partition(".")[0] in sections():
            raise InputError(
                file.place(key),
                "is a TorchTitan option, not a key of a sweep",
                f"put {key} below `options`",
            )
    own = fill(_File, file)
    for key in ("recipes", "precision", "ep_backend", "cells"):
        if getattr(own, key) == ():
            raise InputError(file.place(key), "is empty: a sweep over nothing", "name at least one")
    pairs = _pairs(file, own)
    baseline = None
    if own.baseline is not None:
        baseline = _pair(file, own.baseline, ("baseline",))
        if pair_name(baseline) not in map(pair_name, pairs):
            raise unknown_name(
                file.place("baseline"),
                "cell of the sweep",
                pair_name(baseline),
                map(pair_name, pairs),
            )
    with named_at(file.place("recipes")):
        recipes = tuple(load_recipe(recipe) for recipe in own.recipes)
    return Sweep(
        name=path.stem,
        description=own.description,
        recipes=recipes,
        pairs=pairs,
        baseline=baseline,
        settings=read_options(file, mapping_at(file, "options"), ("options",)),
        vary=_vary(file, own.vary),
    )


def sweep_of_recipe(name: str) -> Sweep:
    """A single recipe as a sweep of one cell, with the recipe's own pair."""
    recipe = load_recipe(name)
    with named_at(shown_path(recipe.path)):
        pair = load_precision(recipe.precision), load_ep_backend(recipe.ep_backend)
    return Sweep(recipe.short_name, recipe.description, (recipe,), (pair,))


def is_sweep(name: str) -> bool:
    """Whether `name` names a sweep: one in the cookbook, or a file with a sweep's keys."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).is_file() and "recipes" in read_yaml(Path(name)).content
    return name in names_in("sweep")


def pair_name(pair: Pair) -> str:
    """`mxfp8+deepep`."""
    return f"{pair[0].name}+{pair[1].name}"


def _pairs(file: YamlFile, own: _File) -> tuple[Pair, ...]:
    if own.cells is not None:
        if own.precision or own.ep_backend:
            raise InputError(
                file.place("cells"),
                "stands beside `precision` or `ep_backend`",
                "keep one of the two",
            )
        return tuple(_pair(file, cell, ("cells",)) for cell in own.cells)
    return tuple(
        _pair(file, {"precision": precision, "ep_backend": ep_backend}, ())
        for precision, ep_backend in itertools.product(
            own.precision or ("bf16",), own.ep_backend or ("standard",)
        )
    )


def _pair(file: YamlFile, names: Mapping[str, object], within: tuple[str, ...]) -> Pair:
    for key in names:
        if key not in _KINDS:
            raise unknown_name(file.place(*within), "key", key, _KINDS)
    precision, ep_backend = (_overlay(file, names, kind, within) for kind in _KINDS)
    return precision, ep_backend


def _overlay(
    file: YamlFile, names: Mapping[str, object], kind: Kind, within: tuple[str, ...]
) -> Overlay:
    place = file.place(*within) if within else file.place(kind)
    name = names.get(kind)
    if name is None:
        raise InputError(f"{place}: {kind}", "is missing", "set it to a name")
    if not isinstance(name, str):
        raise InputError(f"{place}: {kind}", f"found {described(name)}, allowed: a name")
    with named_at(place):
        return load_overlay(kind, name)


def _vary(file: YamlFile, mapping: Unchecked) -> dict[str, tuple[Setting, ...]]:
    axes = {}
    for name, values in mapping.items():
        place = file.place("vary", name)
        option = load_stack().setting(place, name)
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            found = "an empty list, a sweep over nothing" if values == [] else described(values)
            raise InputError(place, f"found {found}, allowed: a list of at least one value")
        axes[name] = tuple(Setting(option.check(place, value), place) for value in values)
    return axes
