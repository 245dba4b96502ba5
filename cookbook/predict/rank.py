"""The ranks of a cell and their pipeline schedule, counted without torch and without building them.

A test compares every description with TorchTitan's own build in the dry run. Torch's lists of a
schedule's actions come from one subprocess.
"""

import atexit
import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.family import Model
from cookbook.base.paths import ROOT
from cookbook.config.cell import LAYERS_KEPT, Cell
from cookbook.config.options import Layout
from cookbook.config.validate.layout import STAGES_PER_RANK, less_layers
from cookbook.predict.operators import (
    BYTES,
    Unit,
    embedding_operators,
    fsdp_units,
    head_operators,
    layer_operators,
)

# Stage, kind and microbatch. Kinds are F (forward), B (backward), I and W (a backward's halves, for
# inputs and weights).
Action = Sequence[Any]
_BACKWARDS = ("B", "I")


@dataclass(frozen=True)
class Actions:
    """Of every pipeline rank: its stages, its microbatches in flight and its actions, in order."""

    stages: tuple[list[int], ...]
    in_flight: tuple[list[list[int]], ...]
    actions: tuple[list[Action], ...]


@functools.cache
def actions_of(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    """Return torch's actions; InputError without torch, or where its class refuses the numbers."""
    process, line = _process(), ""
    assert process.stdin
    assert process.stdout
    request = {"name": schedule, "ranks": ranks, "per_rank": stages_per_rank}
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{json.dumps({**request, 'microbatches': microbatches})}\n")
        process.stdin.flush()
        line = process.stdout.readline()
    if not line.strip():
        _process.cache_clear()
        found = f"torch did not list the actions of {schedule} with {microbatches} microbatches"
        raise InputError(f"{_PP}_schedule", found, "is torch installed? bash setup.sh")
    return Actions(**{name: tuple(of_ranks) for name, of_ranks in json.loads(line).items()})


@functools.cache
def _process() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cookbook.titan.common.schedules"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.kill)
    return process


@dataclass(frozen=True)
class Played:
    """When all ranks were done, and how long each of them worked; milliseconds."""

    end_ms: float
    busy_ms: tuple[float, ...]

    @property
    def busiest(self) -> int:
        return max(range(len(self.busy_ms)), key=self.busy_ms.__getitem__)

    @property
    def bubble_ms(self) -> float:
        """Idle time of the busiest rank."""
        return self.end_ms - self.busy_ms[self.busiest]


def play(
    actions: Sequence[Sequence[Action]],
    times_ms: Mapping[tuple[int, str], float],
    last_stage: int,
    transfer_ms: float,
) -> Played:
    """Let every rank do its actions in order, each as soon as its input has arrived.

    `times_ms` are by stage and kind; during a transfer between two stages the sender goes on.
    """
    owner = {stage: rank for rank, own in enumerate(actions) for stage, _, _ in own}
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * len(actions)
    busy = [0.0] * len(actions)
    left = [iter(own) for own in actions]
    following = [next(own, None) for own in left]
    while any(following):
        advanced = False
        for rank, own in enumerate(left):
            while (action := following[rank]) is not None:
                stage, kind, microbatch = action
                needed, ready = None, 0.0
                # The neighbour's action that must be done before.
                if kind == "F" and stage:
                    needed = stage - 1, "F", microbatch
                elif kind in _BACKWARDS and stage < last_stage:
                    needed = stage + 1, "B", microbatch
                if needed is not None:
                    if needed not in done:
                        break
                    ready = done[needed] + (transfer_ms if owner[needed[0]] != rank else 0.0)
                time_ms = times_ms[stage, kind]
                clock[rank] = max(clock[rank], ready) + time_ms
                busy[rank] += time_ms
                # The next stage waits for a whole backward, or for its half for the inputs.
                done[stage, "B" if kind in _BACKWARDS else kind, microbatch] = clock[rank]
                following[rank] = next(own, None)
                advanced = True
        assert advanced, "the schedule waits for itself"
    return Played(max(clock), tuple(busy))


_PP = "parallelism.pipeline_parallel"


@dataclass(frozen=True)
class Layer:
    id: int
    moe: bool
    recomputed: bool


@dataclass(frozen=True)
class Part:
    """A pipeline stage's part of the model, with the embedding or the output layer at an end."""

    units: tuple[Unit, ...]
    layers: tuple[Layer, ...]
    embedding: bool
    head: bool

    @property
    def gathered(self) -> int:
        """Elements of all its parameters, unsharded."""
        return sum(unit.gathered for unit in self.units)

    def units_of(self, layer: Layer) -> list[Unit]:
        return [u for u in self.units if f"{u.name}.".startswith(f"layers.{layer.id}.")]


@dataclass(frozen=True)
class Rank:
    """The first rank of a pipeline rank, and facts that all ranks share."""

    rank: int  # its global number
    parts: tuple[Part, ...]  # of the model, one for each of its `stages`
    stages: Sequence[int]
    # Largest counts of microbatches in flight, a count for each stage; more than one where
    # different stages have most at different times.
    in_flight: Sequence[Sequence[int]]
    actions: Sequence[Action]  # its pipeline schedule; empty without a pipeline
    num_stages: int
    num_microbatches: int
    gradient_accumulation_steps: int
    mixed_precision: bool  # FSDP casts parameters
    groups: Mapping[str, int]  # sizes of its communicators, by TorchTitan's names
    model: Model
    parameters: int  # this and the next two: TorchTitan's counts of the whole model
    active_parameters: int
    flops_per_token: int

    @property
    def units(self) -> list[Unit]:
        return [unit for part in self.parts for unit in part.units]

    @property
    def layers(self) -> list[Layer]:
        return [layer for part in self.parts for layer in part.layers]

    @property
    def local_parameters(self) -> int:
        """Elements that the rank stores."""
        return sum(unit.local for unit in self.units)

    @property
    def stored_bytes(self) -> int:
        return sum(unit.size for unit in self.units)

    @property
    def neighbours(self) -> int:
        """Stages that its stages get hidden states or gradients from, and send theirs to."""
        return sum((stage > 0) + (stage < self.num_stages - 1) for stage in self.stages)


def model_of(cell: Cell) -> Model:
    """Return the model's sizes; InputError for a model whose layers are not counted here."""
    name, flavor = cell.options["model.name"], cell.options["model.flavor"]
    family, model = cell.options.family, cell.options.model
    if model is None:
        known = family.flavors if family else cell.options.stack.families
        place = cell.options.origin("model.flavor" if family else "model.name")
        found = f"the layers of {name} {flavor} are not counted"
        raise InputError(place, found, f"counted: {', '.join(known)}")
    return model


def describe_ranks(cell: Cell) -> tuple[Rank, ...]:
    """Return the first rank of every pipeline rank; InputError where these are not counted."""
    model, options, layout = model_of(cell), cell.options, cell.layout
    splits, batch = stage_layers(1, model.n_layers), options["training.local_batch_size"]
    actions, microbatches = Actions(([0],), ([[1]],), ([],)), 1
    if layout.pp > 1:
        by_module = "parallelism.module_fqns_per_model_part"
        if options[by_module]:
            found = "stages that are named module by module are not counted"
            raise InputError(options.origin(by_module), found, f"use {_PP}_layers_per_stage")
        schedule, ends = _schedule(cell), less_layers(options)
        num_stages = layout.pp * STAGES_PER_RANK[schedule]
        if per_stage := options[f"{_PP}_layers_per_stage"]:
            num_stages = math.ceil((model.n_layers + sum(ends)) / per_stage)
        splits = stage_layers(num_stages, model.n_layers, *ends)
        microbatches = batch // options[f"{_PP}_microbatch_size"]
        actions = actions_of(schedule, layout.pp, num_stages // layout.pp, microbatches)
    step = batch * layout.dp_replicate * layout.dp_shard
    total, active, flops = _counts(model, options["training.seq_len"])
    ranks = []
    for rank, stages in enumerate(actions.stages):
        recomputed = iter(_recomputed(cell, [len(splits[stage]) for stage in stages]))
        ranks.append(
            Rank(
                rank=rank * layout.stage_ranks,
                parts=tuple(_part(cell, model, splits, stage, recomputed) for stage in stages),
                stages=stages,
                in_flight=actions.in_flight[rank],
                actions=actions.actions[rank],
                num_stages=len(splits),
                num_microbatches=microbatches,
                gradient_accumulation_steps=max(options["training.global_batch_size"] // step, 1),
                mixed_precision=layout.dp_shard * layout.cp > 1 or layout.ep > 1,
                groups=_groups(layout),
                model=model,
                parameters=total,
                active_parameters=active,
                flops_per_token=flops,
            )
        )
    return tuple(ranks)


def stage_layers(
    num_stages: int, num_layers: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[int]]:
    """Return the layers of every stage, as TorchTitan's `generate_llm_fqn_per_model_part` does."""
    if num_stages == 1:
        return [list(range(num_layers))]
    each, extra = divmod(num_layers + input_weight + output_weight, num_stages)
    sizes = [each + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    layers = iter(range(num_layers))
    return [list(itertools.islice(layers, max(size, 0))) for size in sizes]


def _schedule(cell: Cell) -> str:
    """Return the schedule's name in PyTorch's spelling."""
    asked = cell.options[f"{_PP}_schedule"]
    known = {name.lower(): name for name in STAGES_PER_RANK}
    if cell.options[f"{_PP}_schedule_csv"] or asked.lower() not in known:
        place = cell.options.origin(f"{_PP}_schedule")
        raise InputError(place, f"the schedule {asked!r} is not simulated", "try Interleaved1F1B")
    return known[asked.lower()]


def _part(
    cell: Cell,
    model: Model,
    splits: Sequence[Sequence[int]],
    stage: int,
    recomputed: Iterator[bool],
) -> Part:
    layout, width = cell.layout, BYTES[cell.options["training.dtype"]]
    is_first, is_last = stage == 0, stage == len(splits) - 1
    units = fsdp_units(embedding_operators(model), layout, width=width) if is_first else []
    layers = [Layer(layer, model.is_moe(layer), next(recomputed)) for layer in splits[stage]]
    # Layers of a kind are cut alike: one of each is enough.
    alike = {
        moe: fsdp_units(layer_operators(model, moe), layout, 0, width=width)
        for moe in {layer.moe for layer in layers}
    }
    for layer in layers:
        name = f"layers.{layer.id}"
        units += [replace(u, name=u.name.replace("layers.0", name)) for u in alike[layer.moe]]
    if is_last:
        units += fsdp_units(head_operators(model), layout, width=width)
    return Part(tuple(units), tuple(layers), is_first, is_last)


def _recomputed(cell: Cell, sizes: Sequence[int]) -> list[bool]:
    """Return whether each layer is recomputed, for parts of `sizes` layers; every n-th of all."""
    mode = cell.options["activation_checkpoint.mode"]
    option = cell.options["activation_checkpoint.selective_ac_option"]
    flags = [mode in ("full", "selective")] * sum(sizes)
    if mode == "selective" and option != "op":
        every = int(option)
        flags = [every == 0 or (layer + 1) % every == 0 for layer in range(sum(sizes))]
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        kept = min(cell.options[LAYERS_KEPT], size)
        flags[end - kept : end] = [False] * kept
    return flags


def _groups(layout: Layout) -> dict[str, int]:
    """Return the sizes of communicators of more than one rank."""
    fsdp = layout.dp_shard * layout.cp
    sizes = {
        "pp": layout.pp,
        "batch": layout.dp_replicate * layout.dp_shard,
        "loss": layout.dp_replicate * fsdp,
        "dp_replicate": layout.dp_replicate,
        "fsdp": fsdp,
        "cp": layout.cp,
        "tp": layout.tp,
        "ep": layout.ep,
        "efsdp": fsdp * layout.tp // (layout.etp * layout.ep),
        "etp": layout.etp,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _counts(model: Model, seq_len: int) -> tuple[int, int, int]:
    """Return TorchTitan's counts: all and active parameters, and FLOPs of a token."""
    embedding = sum(one.numel for one in embedding_operators(model))
    moe = [model.is_moe(layer) for layer in range(model.n_layers)]
    others = [
        *head_operators(model),
        *(one for is_moe in moe for one in layer_operators(model, is_moe)),
    ]
    experts = sum(one.numel for one in others if one.is_expert)
    rest = sum(one.numel for one in others) - experts
    chosen = experts * model.top_k // model.num_experts
    width = model.nope + model.rope + model.v_head
    attention = model.n_layers * model.heads * width * seq_len
    return rest + embedding + experts, rest + embedding + chosen, 6 * (rest + chosen + attention)
