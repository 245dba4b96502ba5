"""Merge recipe, overlays, cluster and command line into a cell, and validate it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, named_at
from cookbook.base.gpus import Gpu
from cookbook.base.yamlfile import Words
from cookbook.config.asked import ONCE, asked_options
from cookbook.config.cell import PARTS, Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.dialect.names import SET_BY_SCRIPTS, Names
from cookbook.config.options import Options, Setting, Settings
from cookbook.config.recipe import Overlay, Recipe, load_ep_backend, load_precision, load_recipe
from cookbook.config.stack import load_stack
from cookbook.config.validate import validation_errors
from cookbook.run.record import TOTAL_STEPS, CellRecord


def resolve_cell(cell: Cell, words: Sequence[str] = ()) -> Cell:
    """Validate `cell`, append `words` to its name, fill in its published speed, and return it.

    Raise InputError if the user's input is invalid. If it is valid but the cell cannot run, say why
    in the field `refused`.
    """
    name = "-".join([cell.name, *words])
    # A folder's name may have at most 255 bytes. Leave room for a new run's temporary name.
    if len(name) > 200:
        found = f"its name has {len(name)} characters, allowed: 200"
        raise InputError(f"cell {name[:40]}...", found, "vary less, or shorten the names")
    if (step := cell.facts.load_step) != -1 and cell.facts.checkpoints:
        remedy = f"to roll a run back, add --resume RUN/CELL --set {Names.load_step}={step}"
        raise InputError(cell.options.origin(Names.load_step), "a new run has no steps", remedy)
    return _judged(replace(cell, name=name, published=published_number(cell)))


def _judged(cell: Cell) -> Cell:
    findings = validation_errors(cell)
    for one in findings:
        if one.is_input:
            raise InputError(cell.options.origin(one.option), one.reason, one.remedy)
    return replace(cell, refused=str(findings[0])) if findings else cell


def merge_config(
    recipe: Recipe,
    precision: Overlay,
    ep_backend: Overlay,
    cluster: Cluster,
    nodes: int | None = None,
    *,
    of_sweep: Mapping[str, Setting] = {},
    overrides: Mapping[str, Setting] = {},
) -> Cell:
    """Merge the options of all arguments into a cell, without validating it.

    Each of these overrides the ones before it: recipe, EP backend, precision, cluster, `of_sweep`
    (options from the sweep's file), `overrides` (options from the command line).
    On a local cluster, if the recipe names a small `stand_in`, use that and ignore `of_sweep`.
    """
    stand_in_for, left_out, is_local = None, tuple[str, ...](), cluster.scheduler == "local"
    if is_local and recipe.stand_in is not None:
        stand_in_for, recipe = recipe.name, load_recipe(recipe.stand_in)
        left_out, of_sweep = tuple(of_sweep), {}
    options = Options(load_stack(), recipe.settings)
    if is_local and Names.ep in options and options.model:
        ranks = cluster.ranks_per_node
        degree = math.gcd(ranks, options.model.num_experts)
        origin = f"cluster {cluster.name} ({ranks} ranks)"
        options = options.override({Names.ep: Setting(degree, origin)})
    have = cluster.gpu.compute_capability if cluster.gpu else 0.0
    lacking = [one for one in (ep_backend, precision) if one.needs.compute_capability > have]
    emulated = [one.emulated for one in lacking if one.emulated is not None and cluster.emulate]
    options = options.override(ep_backend.settings, precision.settings, *emulated)
    options = options.override(cluster.settings, of_sweep, overrides)
    name = "-".join([recipe.short_name, precision.name, ep_backend.name])
    parts = (recipe, precision, ep_backend, cluster, _nodes(recipe, cluster, nodes))
    return Cell(name, *parts, options, bool(emulated), stand_in_for, left_out=left_out)


def published_number(cell: Cell) -> float | None:
    """Return the tokens/s/GPU published for exactly the cell's nodes and options, if any."""
    number = cell.recipe.published_on(cell.cluster.gpu, cell.world).get(cell.pair)
    if number is None or cell.nodes != cell.recipe.nodes or cell.stand_in_for is not None:
        return None
    as_published = merge_config(cell.recipe, cell.precision, cell.ep_backend, cell.cluster)
    names = {*cell.options.settings, *as_published.options.settings}
    # Do not compare what every job script sets itself (W&B: if there is a key).
    names -= {*SET_BY_SCRIPTS, Names.description, Names.is_wandb_on}
    same = all(cell.options[name] == as_published.options[name] for name in names)
    return number if same else None


def _nodes(recipe: Recipe, cluster: Cluster, asked: int | None) -> int:
    spare = recipe.spare_nodes if cluster.scheduler == "slurm" else 0
    most = cluster.nodes - spare
    nodes = asked if asked is not None else max(1, min(recipe.nodes, most))
    if not 1 <= nodes <= most:
        kept = f", where {spare} more are kept as spares" if spare else ""
        found = f"found {nodes}, allowed: 1 to {most} on cluster {cluster.name}{kept}"
        raise InputError("--nodes", found)
    return nodes


def cell_from_record(
    name: str, record: CellRecord, place: str, nodes: int | None, overrides: Settings
) -> Cell:
    """Rebuild a cell from its record, apply `overrides`, and validate it.

    The options come from the record, even if the recipe's file has changed since.
    """
    stack, anew = load_stack(), "start a new run"
    parts = {key: str(record.files.get(key) or getattr(record, key) or "") for key in PARTS}
    if missing := [key for key, part in parts.items() if not part]:
        raise InputError(place, f"does not say its {missing[0]}", anew)
    if record.stack != stack.name:
        raise InputError(f"{place}: stack", f"found {record.stack}, and this is {stack.name}", anew)
    settings = {
        option: Setting(stack.setting(place, option).check(place, value), f"{place}: {option}")
        for option, value in asked_options(record).items()
        if option not in ONCE
    }
    options = keep_schedule(Options(stack, settings).override(overrides), record, place)
    with named_at(place):
        recipe, cluster = load_recipe(parts["recipe"]), load_cluster(parts["cluster"])
        precision = load_precision(parts["precision"])
        ep_backend = load_ep_backend(parts["ep_backend"])
    if (here := cluster.ranks_per_node) != record.ranks_per_node:
        wrong = f"found {record.ranks_per_node}, and {cluster.name} has {here} here"
        raise InputError(f"{place}: ranks_per_node", wrong, anew)
    nodes = _nodes(recipe, cluster, nodes or record.nodes)
    kept = ("emulated", "stand_in_for", "baseline", "prediction")
    as_before = {key: getattr(record, key) for key in kept}
    merged = (recipe, precision, ep_backend, cluster, nodes, options)
    return _judged(Cell(name, *merged, **as_before))


def keep_schedule(options: Options, record: CellRecord, place: str) -> Options:
    """Return the options for resuming a run without changing its learning-rate schedule."""
    steps = record.schedule_steps
    if TOTAL_STEPS in options or steps in (None, options[Names.steps]):
        return options
    return options.override({TOTAL_STEPS: Setting(steps, f"{place}: {Names.steps}")})


def this_machine(
    ranks: int, gpu: Gpu | None, environment: Mapping[str, str] | None = None
) -> Cluster:
    """Return a one-node cluster with `ranks` GPUs or, if `gpu` is None, `ranks` CPU ranks."""
    return Cluster(
        name="this machine",
        description="the machine that this runs on",
        scheduler="slurm",  # if it were "local", `merge_config` would use small recipes instead
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
    """Merge a recipe, overlays and `options` into a cell on `cluster`, without validating it."""
    overlays = load_precision(precision), load_ep_backend(ep_backend)
    asked = {option: Setting(value, source) for option, value in options.items()}
    cell = merge_config(load_recipe(recipe), *overlays, cluster, overrides=asked)
    return replace(cell, name=name or cell.name)
