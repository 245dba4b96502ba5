"""In: a recipe, a precision, an EP backend, a cluster, settings. Out: the fully resolved cell."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from cookbook.base.errors import InputError
from cookbook.cells.cluster import Cluster
from cookbook.cells.layout import DEGREES, Layout, layout_of
from cookbook.cells.layout_rules import layout_problems
from cookbook.cells.recipe import Overlay, Recipe, Setting, load_recipe
from cookbook.stack.stack import Stack


@dataclass(frozen=True)
class Cell:
    """One point of recipe x precision x EP backend on a cluster.

    `settings` are TorchTitan's options with the place that set each. `refused` says why the cell
    cannot run on this cluster; `emulated` that its precision is computed, not accelerated, there.
    """

    name: str
    recipe: Recipe
    precision: Overlay
    ep_backend: Overlay
    cluster: Cluster
    stack: Stack
    nodes: int
    settings: Mapping[str, Setting]
    emulated: bool
    stand_in_for: str | None = None
    refused: str | None = None
    published: float | None = None
    baseline: str | None = None
    left_out: tuple[str, ...] = field(default=())

    @property
    def options(self) -> dict[str, Any]:
        """TorchTitan's options by dotted name."""
        return {name: setting.value for name, setting in self.settings.items()}

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.cluster.ranks_per_node

    @property
    def layout(self) -> Layout:
        """How the ranks are divided."""
        return layout_of(self.stack, self.options, self.world)

    @property
    def steps(self) -> int:
        """Training steps that the cell is to make."""
        return int(self.stack.value(self.options, "training.steps"))

    @property
    def environment(self) -> dict[str, str]:
        """What the job exports, the more particular last: cluster, EP backend, precision."""
        return {
            **self.cluster.environment,
            **self.ep_backend.environment,
            **self.precision.environment,
        }

    def as_mapping(self, origins: bool = False) -> dict[str, Any]:
        """The content of `cell.yaml`; with `origins`, each option with the place that set it."""
        return {
            "name": self.name,
            "recipe": self.recipe.name,
            "precision": self.precision.name,
            "ep_backend": self.ep_backend.name,
            "cluster": self.cluster.name,
            "stack": self.stack.name,
            "nodes": self.nodes,
            "ranks_per_node": self.cluster.ranks_per_node,
            "device": self.cluster.device,
            "emulated": self.emulated,
            "stand_in_for": self.stand_in_for,
            "refused": self.refused,
            "published_tokens_per_second_per_gpu": self.published,
            "published_source": self.recipe.published_source if self.published else None,
            "baseline": self.baseline,
            "environment": self.environment,
            "options": {
                name: {"value": setting.value, "from": setting.place} if origins else setting.value
                for name, setting in self.settings.items()
            },
        }

    def as_yaml(self, origins: bool = False) -> str:
        """`as_mapping` as YAML."""
        text: str = yaml.safe_dump(
            self.as_mapping(origins), sort_keys=False, allow_unicode=True, width=100
        )
        return text


def resolve_cell(
    recipe: Recipe,
    precision: Overlay,
    ep_backend: Overlay,
    cluster: Cluster,
    stack: Stack,
    *,
    nodes: int | None = None,
    sweep_settings: Mapping[str, Setting] | None = None,
    varied: Mapping[str, Setting] | None = None,
    overrides: Mapping[str, Setting] | None = None,
) -> Cell:
    """Lay the parts over one another and check the result.

    The later wins: recipe, EP backend, precision (emulated where the GPU needs it), cluster, sweep,
    what the sweep varies, the command line. On the `local` cluster the recipe's stand-in takes its
    place, and the sweep's own settings, made for the recipe's size, are left out.

    Raises:
        InputError: degrees that do not divide, or a node count that the cluster does not have.
    """
    stand_in_for = None
    left_out: tuple[str, ...] = ()
    original = recipe
    if cluster.scheduler == "local" and recipe.stand_in is not None:
        stand_in_for, recipe = recipe.name, load_recipe(recipe.stand_in, stack)
        left_out = tuple(sweep_settings or ())
        sweep_settings = None
    nodes = _nodes(recipe, cluster, nodes)
    refused, emulated = _capability(precision, cluster)
    settings: dict[str, Setting] = {**recipe.settings}
    if cluster.scheduler == "local" and "parallelism.expert_parallel_degree" in settings:
        settings.update(_local_layout(recipe, cluster, stack))
    settings.update(ep_backend.settings)
    settings.update(precision.settings)
    if emulated:
        settings.update(precision.emulated or {})
    settings.update(cluster.settings)
    settings.update(sweep_settings or {})
    settings.update(varied or {})
    settings.update(overrides or {})
    options = {name: setting.value for name, setting in settings.items()}
    for problem in layout_problems(stack, options, nodes * cluster.ranks_per_node):
        place = settings[problem.option].place if problem.option in settings else problem.option
        if not place.endswith(problem.option):
            place = f"{place}: {problem.option}"
        raise InputError(place, problem.found, problem.remedy)
    pair = f"{precision.name}+{ep_backend.name}"
    as_published = (
        not (varied or overrides or sweep_settings)
        and nodes == original.nodes
        and stand_in_for is None
    )
    return Cell(
        name="-".join([recipe.short_name, precision.name, ep_backend.name, *_suffix(varied or {})]),
        recipe=recipe,
        precision=precision,
        ep_backend=ep_backend,
        cluster=cluster,
        stack=stack,
        nodes=nodes,
        settings=settings,
        emulated=emulated,
        stand_in_for=stand_in_for,
        refused=refused
        or _overlay_needs(precision, precision, cluster, stack, options)
        or _overlay_needs(ep_backend, precision, cluster, stack, options)
        or (None if emulated else _converter_conflict(stack, options)),
        published=recipe.published.get(pair) if as_published else None,
        left_out=left_out,
    )


def _nodes(recipe: Recipe, cluster: Cluster, asked: int | None) -> int:
    nodes = asked if asked is not None else min(recipe.nodes, cluster.nodes)
    if nodes < 1 or nodes > cluster.nodes:
        raise InputError(
            "--nodes", f"found {nodes}, allowed: 1 to {cluster.nodes} on cluster {cluster.name}"
        )
    return nodes


def _local_layout(recipe: Recipe, cluster: Cluster, stack: Stack) -> dict[str, Setting]:
    """EP over all ranks of this machine that the experts can be divided among."""
    model = stack.model({name: setting.value for name, setting in recipe.settings.items()})
    if model is None:
        return {}
    degree = math.gcd(cluster.ranks_per_node, model.num_experts)
    place = f"cluster {cluster.name} ({cluster.ranks_per_node} ranks)"
    return {DEGREES["ep"]: Setting(degree, place)}


def _capability(precision: Overlay, cluster: Cluster) -> tuple[str | None, bool]:
    """Why the precision's hardware is not here, and whether emulation takes its place."""
    needed = precision.needs.compute_capability
    if not needed or (cluster.gpu and cluster.gpu.compute_capability >= needed):
        return None, False
    if cluster.emulate and precision.emulated is not None:
        return None, True
    have = (
        f"{cluster.gpu.name} has {cluster.gpu.compute_capability}"
        if cluster.gpu
        else "there is no CUDA GPU"
    )
    return f"{precision.name} needs a GPU of compute capability {needed}, {have}", False


def _overlay_needs(
    overlay: Overlay, precision: Overlay, cluster: Cluster, stack: Stack, options: Mapping[str, Any]
) -> str | None:
    needs = overlay.needs
    if needs.device == "cuda" and cluster.gpu is None:
        return f"{overlay.name} needs CUDA GPUs, cluster {cluster.name} runs on the CPU"
    if needs.expert_parallel and stack.value(options, DEGREES["ep"]) < 2:
        return f"{overlay.name} needs {DEGREES['ep']} above 1"
    if needs.precision and precision.name not in needs.precision:
        return f"{overlay.name} needs a precision of {', '.join(needs.precision)}"
    for name, setting in (needs.settings or {}).items():
        value = stack.value(options, name)
        if value != setting.value:
            return f"{overlay.name} needs {name} {setting.value}, found {value}"
    return None


def _converter_conflict(stack: Stack, options: Mapping[str, Any]) -> str | None:
    """What TorchTitan's converters refuse of the cell as a whole; emulated, it works (on H200)."""
    converters = stack.value(options, "model.converters")
    compiled = stack.value(options, "compile.enable") and "model" in stack.value(
        options, "compile.components"
    )
    if "quantize.linear.mx" in converters and compiled and stack.value(options, DEGREES["tp"]) > 1:
        return (
            "MXFP8 linear layers with tensor parallelism and a compiled model: torch.compile does "
            f"not support it yet; set {DEGREES['tp']} 1, or compile.components loss"
        )
    return None


def missing_packages(*overlays: Overlay) -> list[str]:
    """The packages that the overlays need and this Python environment lacks."""
    needed = {package for overlay in overlays for package in overlay.needs.packages}
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)


def _suffix(varied: Mapping[str, Setting]) -> Iterable[str]:
    """`local_batch_size_16` for each varied option; only letters that a file and a job may have."""
    for name, setting in varied.items():
        key, value = name.rpartition(".")[2], setting.value
        text = f"{key}_{'+'.join(value) if isinstance(value, list) else value}"
        yield "".join(letter if letter.isalnum() or letter in "_.+" else "_" for letter in text)
