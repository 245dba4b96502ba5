"""Multiplies a sweep into its cells, with what the command line asks of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cookbook.base.errors import InputError, named_at
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster
from cookbook.config.options import Setting, Settings
from cookbook.config.overlay import load_ep_backend, load_precision
from cookbook.config.resolve import resolve_cell
from cookbook.config.stack import load_stack
from cookbook.config.sweep import Pair, Sweep, pair_name


@dataclass(frozen=True)
class CellRequest:
    """What the command line asks of every cell; None and empty leave the sweep's own choice."""

    cluster: Cluster
    precision: str | None = None
    ep_backend: str | None = None
    nodes: int | None = None
    overrides: Settings = field(default_factory=dict)


def expand_sweep(sweep: Sweep, request: CellRequest) -> list[Cell]:
    """The cells of `sweep` in order, none twice; raises where none is left."""
    cells: dict[str, Cell] = {}
    # Cells of one group differ in precision and EP backend alone, so they share a baseline.
    groups: dict[str, str] = {}
    baselines: dict[str, str] = {}
    pairs = _asked_pairs(sweep, request)
    for recipe, pair, varied in itertools.product(sweep.recipes, pairs, _varied(sweep, request)):
        cell = resolve_cell(
            recipe,
            *pair,
            request.cluster,
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
        values = [(name, setting.value) for name, setting in varied.items()]
        groups[cell.name] = f"{cell.recipe.name} {values}"
        if sweep.baseline and pair_name(pair) == pair_name(sweep.baseline):
            baselines[groups[cell.name]] = cell.name
    if not cells:
        raise InputError(sweep.name, "a sweep over nothing: no cell is left", "widen the options")
    return [replace(cell, baseline=baselines.get(groups[name])) for name, cell in cells.items()]


def in_rounds(cells: Sequence[Cell], num_repeats: int) -> list[Cell]:
    """Every cell `num_repeats` times, in the order to train them: A B, then B A, then A B, ...

    So each cell of a round is next to the others of it, and a machine that gets slower from run to
    run slows both sides of a comparison alike. Repeats are cells of their own: `<cell>-r2`, ...
    Cells that are refused are not repeated.
    """
    found = list(cells)
    taken = {cell.name for cell in cells}
    for repeat in range(2, num_repeats + 1):
        again = [cell for cell in cells if not cell.refused]
        for cell in again if repeat % 2 else reversed(again):
            name = f"{cell.name}-r{repeat}"
            if name in taken:
                raise InputError(f"--repeat {num_repeats}", f"the sweep has a cell {name} already")
            found.append(replace(cell, name=name, repeat_of=cell.name, repeat=repeat))
    return found


def _asked_pairs(sweep: Sweep, request: CellRequest) -> Iterable[Pair]:
    """The sweep's pairs, with the axis that the command line names held to that one value."""
    pairs: dict[str, Pair] = {}
    for precision, ep_backend in sweep.pairs:
        if request.precision is not None:
            with named_at("--precision"):
                precision = load_precision(request.precision, request.cluster.gpu)
        if request.ep_backend is not None:
            with named_at("--ep-backend"):
                ep_backend = load_ep_backend(request.ep_backend)
        pair = precision, ep_backend
        pairs.setdefault(pair_name(pair), pair)
    return pairs.values()


def _varied(sweep: Sweep, request: CellRequest) -> Iterator[Settings]:
    """Every combination of the axes; an option that the command line sets is held to its value."""
    axes = {name: axis for name, axis in sweep.vary.items() if name not in request.overrides}
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def command_line_settings(words: Sequence[str], flag: str = "--set") -> Settings:
    """SECTION.KEY=VALUE words as settings; errors name the `flag` that they stand after."""
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        place = f"{flag} {name}"
        if not equals:
            raise InputError(place, "has no value", f"write {flag} SECTION.KEY=VALUE")
        option = load_stack().setting(place, name)
        settings[name] = Setting(option.parse(place, text), place)
    return settings
