"""Lays recipe, overlays, cluster and command line over one another, and judges the cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, named_at
from cookbook.base.gpus import Gpu
from cookbook.base.schema import Words
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.names import word_of
from cookbook.config.options import DEGREES, Options, Setting, Settings
from cookbook.config.overlay import Overlay, load_ep_backend, load_precision
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.stack import load_stack
from cookbook.config.validate import validation_errors
from cookbook.run.record import CellRecord

# A folder's name may have 255 bytes; a run adds to it while it is made.
_CELL_NAME_CHARACTERS = 200


def resolve_cell(
    recipe: Recipe,
    precision: Overlay,
    ep_backend: Overlay,
    cluster: Cluster,
    *,
    nodes: int | None = None,
    sweep_settings: Settings | None = None,
    varied: Settings | None = None,
    overrides: Settings | None = None,
) -> Cell:
    """Lay the parts over one another and judge the result.

    The later wins: recipe, EP backend, precision (emulated where the GPU needs it), cluster, sweep,
    what the sweep varies, the command line. On the `local` cluster the recipe's stand-in takes its
    place, and the sweep's own settings, made for the recipe's size, are left out.

    Raises:
        InputError: degrees that do not divide, or a node count that the cluster does not have.
    """
    cell = merge_config(
        recipe,
        precision,
        ep_backend,
        cluster,
        nodes=nodes,
        layers=(sweep_settings or {}, varied or {}, overrides or {}),
    )
    name = "-".join([cell.name, *_suffix(varied or {})])
    if len(name) > _CELL_NAME_CHARACTERS:
        raise InputError(
            f"cell {name[:40]}...",
            f"its name has {len(name)} characters, allowed: {_CELL_NAME_CHARACTERS}",
            "vary less, or shorten the names",
        )
    cell = replace(cell, name=name, published=published_number(cell))
    return _judged(cell)


def _judged(cell: Cell) -> Cell:
    """The cell with what the rules refuse it for; raises where the input is wrong."""
    findings = validation_errors(cell)
    for finding in findings:
        if finding.is_input:
            raise InputError(cell.options.origin(finding.option), finding.reason, finding.remedy)
    return replace(cell, refused=str(findings[0])) if findings else cell


def merge_config(
    recipe: Recipe,
    precision: Overlay,
    ep_backend: Overlay,
    cluster: Cluster,
    *,
    nodes: int | None = None,
    layers: tuple[Settings, Settings, Settings] = ({}, {}, {}),
) -> Cell:
    """The cell before anything is judged.

    Args:
        layers: settings of the sweep, what it varies, and settings of the command line.
    """
    stand_in_for = None
    left_out: tuple[str, ...] = ()
    of_sweep, varied, overrides = layers
    if cluster.scheduler == "local" and recipe.stand_in is not None:
        stand_in_for, recipe = recipe.name, load_recipe(recipe.stand_in)
        left_out, of_sweep = tuple(of_sweep), {}
    emulated = _is_emulated(precision, cluster)
    options = Options(load_stack(), {}).override(
        recipe.settings,
        _local_layout(recipe, cluster),
        ep_backend.settings,
        precision.settings,
        (precision.emulated or {}) if emulated else {},
        cluster.settings,
        of_sweep,
        varied,
        overrides,
    )
    return Cell(
        name="-".join([recipe.short_name, precision.name, ep_backend.name]),
        recipe=recipe,
        precision=precision,
        ep_backend=ep_backend,
        cluster=cluster,
        nodes=_nodes(recipe, cluster, nodes),
        options=options,
        hooks=load_stack().hooks,
        emulated=emulated,
        stand_in_for=stand_in_for,
        left_out=left_out,
    )


def published_number(cell: Cell) -> float | None:
    """Tokens/s/GPU that were published for this cell: with the recipe's own nodes and options."""
    number = cell.recipe.published_numbers.get(cell.pair)
    if number is None or cell.nodes != cell.recipe.nodes or cell.stand_in_for is not None:
        return None
    as_published = merge_config(cell.recipe, cell.precision, cell.ep_backend, cell.cluster)
    names = {*cell.options.settings, *as_published.options.settings}
    same = all(cell.options[name] == as_published.options[name] for name in names)
    return number if same else None


def _nodes(recipe: Recipe, cluster: Cluster, asked: int | None) -> int:
    spare = recipe.spare_nodes if cluster.scheduler == "slurm" else 0
    most = cluster.nodes - spare
    nodes = asked if asked is not None else max(1, min(recipe.nodes, most))
    if nodes < 1 or nodes > most:
        kept = f", where {spare} more are kept as spares" if spare else ""
        raise InputError(
            "--nodes", f"found {nodes}, allowed: 1 to {most} on cluster {cluster.name}{kept}"
        )
    return nodes


def _local_layout(recipe: Recipe, cluster: Cluster) -> Settings:
    """EP over all ranks of this machine that the experts can be divided among."""
    name = DEGREES["ep"]
    model = Options(load_stack(), recipe.settings).model
    if cluster.scheduler != "local" or name not in recipe.settings or model is None:
        return {}
    degree = math.gcd(cluster.ranks_per_node, model.num_experts)
    return {name: Setting(degree, f"cluster {cluster.name} ({cluster.ranks_per_node} ranks)")}


def _is_emulated(precision: Overlay, cluster: Cluster) -> bool:
    """Whether emulation takes the place of hardware that is not here."""
    needed = precision.needs.compute_capability
    has_it = cluster.gpu is not None and cluster.gpu.compute_capability >= needed
    return bool(needed and not has_it and cluster.emulate and precision.emulated is not None)


def _suffix(varied: Settings) -> list[str]:
    """`local_batch_size_16` for each varied option."""
    return [f"{name.rpartition('.')[2]}_{word_of(one.value)}" for name, one in varied.items()]


def cell_from_record(
    name: str, record: CellRecord, place: str, nodes: int | None, overrides: Settings
) -> Cell:
    """The cell of `record` as it was asked for most recently, under `overrides`, and judged.

    Its options are the recorded ones, whatever became of the recipe; what an overlay declares and
    what is exported come from the files as they are now.

    Args:
        name: of the cell's folder.
        place: what an error names as the record's place.
        nodes: None leaves them.

    Raises:
        InputError: the record names nothing that is here, or the cell cannot run.
    """
    newest = record.newest
    parts = []
    for key in ("recipe", "precision", "ep_backend", "cluster"):
        part = record.files.get(key) or getattr(record, key)
        if not part:
            raise InputError(place, f"does not say its {key}", "start a new run")
        parts.append(str(part))
    stack = load_stack()
    if record.stack != stack.name:
        raise InputError(
            f"{place}: stack", f"found {record.stack}, and this is {stack.name}", "start a new run"
        )
    settings = {
        option: Setting(stack.setting(place, option).check(place, value), f"{place}: {option}")
        for option, value in newest.asked_options.items()
    }
    with named_at(place):
        cluster = load_cluster(parts[3])
        cell = Cell(
            name=name,
            recipe=load_recipe(parts[0]),
            precision=load_precision(parts[1]),
            ep_backend=load_ep_backend(parts[2]),
            cluster=cluster,
            nodes=nodes or newest.nodes,
            options=Options(stack, settings).override(overrides),
            hooks=stack.hooks,
            emulated=record.emulated,
            stand_in_for=record.stand_in_for,
            baseline=record.baseline,
        )
    if not 1 <= cell.nodes <= cluster.nodes - cell.spare_nodes:
        allowed = f"1 to {cluster.nodes - cell.spare_nodes} on cluster {cluster.name}"
        raise InputError("--nodes", f"found {cell.nodes}, allowed: {allowed}")
    if cluster.ranks_per_node != record.ranks_per_node:
        raise InputError(
            f"{place}: ranks_per_node",
            f"found {record.ranks_per_node}, and {cluster.name} has {cluster.ranks_per_node} here",
            "start a new run",
        )
    return _judged(cell)


def this_machine(
    ranks: int, gpu: Gpu | None, environment: Mapping[str, str] | None = None
) -> Cluster:
    """One node with `ranks` GPUs of that kind, or CPU ranks, without any settings of its own."""
    return Cluster(
        name="this machine",
        description="the machine that this runs on",
        # Not `local`: there, large recipes have stand-ins.
        scheduler="slurm",
        settings={},
        path=Path(__file__),
        gpus_per_node=ranks if gpu else None,
        cpu_ranks_per_node=ranks,
        gpu=gpu,
        emulate=True,
        environment=Words(environment or {}),
    )


def cell_on(
    cluster: Cluster,
    recipe: str,
    precision: str,
    ep_backend: str,
    options: Mapping[str, Any],
    name: str = "",
    source: str = "bench",
) -> Cell:
    """A recipe with its overlays and `options` over them.

    It is not judged: one may ask for what the rules refuse or do not know.
    """
    cell = merge_config(
        load_recipe(recipe),
        load_precision(precision),
        load_ep_backend(ep_backend),
        cluster,
        layers=({}, {}, {name: Setting(value, source) for name, value in options.items()}),
    )
    return replace(cell, name=name or cell.name)
