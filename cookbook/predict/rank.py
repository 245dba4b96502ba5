"""The ranks of a cell and their pipeline schedule, counted without building the model.

A test compares every description with the model that TorchTitan builds in the dry run. A
subprocess with torch lists a schedule's actions, so that this process need not import torch.
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

# (stage, kind, microbatch). Kinds are F (forward), B (backward), and the halves of a backward: I
# (gradients of inputs) and W (gradients of weights).
Action = Sequence[Any]
_BACKWARDS = ("B", "I")


@dataclass(frozen=True)
class Actions:
    """A schedule, by pipeline rank: stages, microbatches in flight, and actions in order."""

    stages: tuple[list[int], ...]
    in_flight: tuple[list[list[int]], ...]
    actions: tuple[list[Action], ...]


@functools.cache
def actions_of(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    """Return a schedule's actions; raise InputError if torch is missing or rejects the numbers."""
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
        reason = f"torch did not list the actions of {schedule}"
        raise InputError(f"{_PP}_schedule", reason, "is torch installed? bash setup.sh")
    answer = json.loads(line)
    if "error" in answer:
        reason = f"torch rejects {schedule} with {microbatches} microbatches: {answer['error']}"
        raise InputError(f"{_PP}_schedule", reason, "name another schedule, or change the batch")
    return Actions(**{name: tuple(of_ranks) for name, of_ranks in answer.items()})


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
    """A simulated schedule: when the last rank finished, and every rank's busy time."""

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
    """Simulate the ranks: each runs its actions in order, as soon as their inputs have arrived.

    `times_ms` is keyed by (stage, kind). A transfer to another rank does not block its sender.
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
                # The action of the neighbouring stage that produces the input.
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
                # The previous stage needs the gradients of inputs only: B or I.
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
    """A pipeline stage's part of the model; an end stage has the embedding or the output layer."""

    units: tuple[Unit, ...]
    layers: tuple[Layer, ...]
    embedding: bool
    head: bool

    @property
    def gathered(self) -> int:
        """The number of elements of the part's unsharded parameters."""
        return sum(unit.gathered for unit in self.units)

    def units_of(self, layer: Layer) -> list[Unit]:
        return [u for u in self.units if f"{u.name}.".startswith(f"layers.{layer.id}.")]


@dataclass(frozen=True)
class Rank:
    """The first global rank of a pipeline rank, and facts that all ranks share."""

    rank: int  # global rank
    parts: tuple[Part, ...]  # the part of the model of each of `stages`
    stages: Sequence[int]
    # Counts of microbatches in flight per stage, at the peak. Several if different stages peak at
    # different times.
    in_flight: Sequence[Sequence[int]]
    actions: Sequence[Action]  # the rank's pipeline schedule; empty without a pipeline
    num_stages: int
    num_microbatches: int
    gradient_accumulation_steps: int
    mixed_precision: bool  # FSDP casts parameters
    groups: Mapping[str, int]  # sizes of the rank's communicators, by TorchTitan's names
    model: Model
    parameters: int  # all parameters of the model, as TorchTitan counts them
    active_parameters: int  # parameters of the model used per token, as TorchTitan counts them
    flops_per_token: int  # FLOPs of the model, as TorchTitan counts them

    @property
    def units(self) -> list[Unit]:
        return [unit for part in self.parts for unit in part.units]

    @property
    def layers(self) -> list[Layer]:
        return [layer for part in self.parts for layer in part.layers]

    @property
    def local_parameters(self) -> int:
        """The number of elements that the rank stores."""
        return sum(unit.local for unit in self.units)

    @property
    def stored_bytes(self) -> int:
        return sum(unit.size for unit in self.units)

    @property
    def neighbours(self) -> int:
        """The number of links between the rank's stages and their neighbouring stages."""
        return sum((stage > 0) + (stage < self.num_stages - 1) for stage in self.stages)


def model_of(cell: Cell) -> Model:
    """Return the model's sizes; raise InputError if the model's layers are not described."""
    name, flavor = cell.options["model.name"], cell.options["model.flavor"]
    family, model = cell.options.family, cell.options.model
    if model is None:
        known = family.flavors if family else cell.options.stack.families
        place = cell.options.origin("model.flavor" if family else "model.name")
        found = f"the layers of {name} {flavor} are not counted"
        raise InputError(place, found, f"counted: {', '.join(known)}")
    return model


def describe_ranks(cell: Cell) -> tuple[Rank, ...]:
    """Describe the first rank of every pipeline rank; raise InputError if it cannot be counted."""
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
    """Return the layers of every stage, as from TorchTitan's `generate_llm_fqn_per_model_part`."""
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
    # Layers of a kind are sharded equally, so one layer per kind is described and then renamed.
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
    """Return for each layer whether it is recomputed; `sizes`: the layers of the rank's parts."""
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
    """Return the sizes of all communicators with more than one rank, by name."""
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
    """Return TorchTitan's counts: parameters, active parameters and FLOPs per token."""
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
