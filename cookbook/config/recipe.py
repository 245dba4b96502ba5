"""A recipe: a model, its layout on the cluster and its training options, from a YAML file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import SkipValidation

from cookbook.base.errors import named_at, unknown_name
from cookbook.base.schema import Count, Natural, Numbers, Text, fill
from cookbook.base.yamlfile import read_yaml, shown_path
from cookbook.config.names import check_name, find_file, names_in
from cookbook.config.options import Settings, read_sections, sections
from cookbook.config.overlay import Overlay, load_ep_backend, load_precision


@dataclass(frozen=True)
class Published:
    """Published throughput by pair (`bf16+deepep`), and its source."""

    source: Text
    tokens_per_second_per_gpu: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A model, its layout on the cluster and its training options.

    Attributes:
        name: of the file.
        short_name: begins the names of cells, jobs and W&B runs.
        stand_in: the recipe that `--cluster local` trains in its place.
        precision: of a cell that names none; so is `ep_backend`.
        spare_nodes: nodes that a job has beyond those that train, to take the place of bad ones.
        too_few_nodes: what a job does without enough healthy nodes: wait for them, or stop.
        max_restarts: restarts of a job after failures; None: as the cluster's profile says.
    """

    name: str
    description: Text
    nodes: Count
    settings: SkipValidation[Settings]
    path: Path
    short_name: Text = field(metadata={"key": "name"})
    stand_in: Text | None = None
    precision: Text = "bf16"
    ep_backend: Text = "standard"
    spare_nodes: Natural = 0
    too_few_nodes: Literal["wait", "stop"] = "wait"
    max_restarts: Natural | None = None
    published: Published | None = None

    @property
    def published_numbers(self) -> Mapping[str, float]:
        """Tokens/s/GPU by pair; empty where nothing was published."""
        return self.published.tokens_per_second_per_gpu if self.published else {}

    @property
    def pair(self) -> tuple[Overlay, Overlay]:
        """The recipe's own precision and EP backend."""
        with named_at(shown_path(self.path)):
            return load_precision(self.precision), load_ep_backend(self.ep_backend)


@functools.cache
def load_recipe(name: str) -> Recipe:
    """Read the recipe called `name`, or at the path `name`."""
    path = find_file("", name)
    file = read_yaml(path)
    settings = read_sections(file)
    recipe = fill(Recipe, file, beside=sections(), name=path.stem, settings=settings, path=path)
    check_name(file.place("name"), recipe.short_name)
    pairs = [f"{p}+{e}" for p in names_in("precision") for e in names_in("ep_backend")]
    for pair in recipe.published_numbers:
        if pair not in pairs:
            place = file.place("published", "tokens_per_second_per_gpu", pair)
            raise unknown_name(place, "pair", pair, pairs)
    if recipe.stand_in is not None:
        with named_at(file.place("stand_in")):
            find_file("", recipe.stand_in)
    return recipe
