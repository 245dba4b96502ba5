"""Describe each rank of a cell, its layers and its pipeline schedule without building the model.

A test compares these descriptions with the models that TorchTitan builds in the dry run. A
subprocess imports torch and lists the actions of a schedule, so this process need not import torch.
"""

import atexit
import collections
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cookbook.base.errors import InputError
from cookbook.base.family import Model
from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell
from cookbook.config.facts import Facts
from cookbook.predict import operators

# An action is (stage, kind, microbatch). Kinds are F (forward), B (backward), and the halves of a
# backward: I (gradients of inputs) and W (gradients of weights).
Action = Sequence[Any]
_BACKWARDS = ("B", "I")


@functools.cache
def schedule_of(
    name: str, ranks: int, stages_per_rank: int, microbatches: int
) -> list[dict[str, Any]]:
    """Return the `stages`, `in_flight` and `actions` of every pipeline rank, as defined in Rank.

    Raise InputError if torch is missing or rejects these arguments.
    """
    process, line = _process(), ""
    assert process.stdin
    assert process.stdout
    request = {"name": name, "ranks": ranks, "per_rank": stages_per_rank}
    request["microbatches"] = microbatches
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(request), file=process.stdin, flush=True)
        line = process.stdout.readline()
    if not line.strip():
        _process.cache_clear()
        reason = f"torch did not list the actions of {name}"
        raise InputError(Facts.schedule, reason, "is torch installed? bash setup.sh")
    answer: Any = json.loads(line)
    if isinstance(answer, str):
        reason = f"torch rejects {name} with {microbatches} microbatches: {answer}"
        raise InputError(Facts.schedule, reason, "name another schedule, or change the batch")
    return list(answer)


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


class Played(NamedTuple):
    """A simulated schedule: when the last rank finished, and every rank's busy time."""

    end_ms: float
    busy_ms: list[float]


def play(
    actions: Sequence[Sequence[Action]],
    times_ms: Mapping[tuple[int, str], float],
    transfer_ms: float,
) -> Played:
    """Simulate the ranks: each runs its actions in order, as soon as their inputs have arrived.

    `times_ms` is keyed by (stage, kind). A transfer to another rank does not block its sender.
    """
    owner = {stage: rank for rank, own in enumerate(actions) for stage, _, _ in own}
    last_stage, done = max(owner), dict[tuple[int, str, int], float]()
    clock, busy = [0.0] * len(actions), [0.0] * len(actions)
    queues = [collections.deque(own) for own in actions]
    while left := sum(map(len, queues)):
        for rank, queue in enumerate(queues):
            while queue:
                stage, kind, microbatch = queue[0]
                needed, ready = None, 0.0
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
                # Record a full backward (B) and a backward for inputs only (I) alike: both produce
                # the gradient for which the previous stage waits.
                done[stage, "B" if kind in _BACKWARDS else kind, microbatch] = clock[rank]
                queue.popleft()
        assert sum(map(len, queues)) < left, "the schedule waits for itself"
    return Played(max(clock), busy)


@dataclass(frozen=True)
class Layer:
    id: int
    moe: bool
    recomputed: bool
    units: tuple[operators.Unit, ...] = ()


@dataclass(frozen=True)
class ModelPart:
    """The part of the model on a pipeline stage; the first has the embedding, the last the head."""

    layers: tuple[Layer, ...]
    embedding: tuple[operators.Unit, ...] = ()
    head: tuple[operators.Unit, ...] = ()

    @property
    def units(self) -> list[operators.Unit]:
        in_layers = (unit for layer in self.layers for unit in layer.units)
        return [*self.embedding, *in_layers, *self.head]

    @property
    def gathered(self) -> int:
        """The number of elements of the part's parameters after FSDP has gathered them."""
        return sum(unit.gathered for unit in self.units)


@dataclass(frozen=True)
class Rank:
    """The lowest global rank at one pipeline position; the other ranks there do the same work."""

    rank: int  # global rank
    parts: tuple[ModelPart, ...]  # the part of the model on each of `stages`
    stages: Sequence[int]
    # For each moment when memory may peak: the number of microbatches in flight on each stage.
    in_flight: Sequence[Sequence[int]]
    actions: Sequence[Action]  # the rank's pipeline schedule; empty without a pipeline
    num_stages: int
    num_microbatches: int
    gradient_accumulation_steps: int

    @property
    def units(self) -> list[operators.Unit]:
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
    """Return the dimensions of the cell's model; raise InputError if they are unknown."""
    facts, family, model = cell.facts, cell.options.family, cell.options.model
    if model is None:
        known = family.flavors if family else cell.options.stack.families
        place = cell.options.origin(Facts.flavor if family else Facts.model_name)
        found = f"the layers of {facts.model_name} {facts.flavor} are not counted"
        raise InputError(place, found, f"counted: {', '.join(known)}")
    return model


def describe_ranks(cell: Cell) -> tuple[Rank, ...]:
    """Return a Rank per pipeline position; raise InputError if the cell cannot be predicted."""
    model, facts, pp = model_of(cell), cell.facts, cell.layout.pp
    splits = stage_layers(1, model.n_layers)
    ranks: list[dict[str, Any]] = [{"stages": [0], "in_flight": [[1]], "actions": []}]
    microbatches = 1
    if pp > 1:
        if (name := facts.known_schedule) is None:
            found = f"the schedule {facts.schedule!r} is not simulated"
            place = facts.options.origin(Facts.schedule)
            raise InputError(place, found, "try Interleaved1F1B")
        num_stages = facts.num_stages(model.n_layers)
        splits = stage_layers(num_stages, model.n_layers, *facts.less_layers)
        microbatches = facts.local_batch // facts.microbatch
        ranks = schedule_of(name, pp, num_stages // pp, microbatches)
    return tuple(
        Rank(
            rank=index * cell.layout.stage_ranks,
            parts=_parts(cell, splits, own["stages"]),
            num_stages=len(splits),
            num_microbatches=microbatches,
            gradient_accumulation_steps=facts.accumulation_steps,
            **own,
        )
        for index, own in enumerate(ranks)
    )


def stage_layers(
    num_stages: int, num_layers: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[int]]:
    """Divide layers among stages as TorchTitan's `generate_llm_fqn_per_model_part` does."""
    each, extra = divmod(num_layers + input_weight + output_weight, num_stages)
    sizes = [each + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    layers = iter(range(num_layers))
    return [list(itertools.islice(layers, max(size, 0))) for size in sizes]


def _parts(
    cell: Cell, splits: Sequence[Sequence[int]], stages: Sequence[int]
) -> tuple[ModelPart, ...]:
    model, width = model_of(cell), operators.BYTES[cell.facts.dtype]
    units = functools.partial(operators.fsdp_units, layout=cell.layout, width=width)
    of_layer = [units(operators.layer(model, moe), in_layer=True) for moe in (False, True)]
    numbers, parts = itertools.count(1), []
    for stage in stages:
        indices, layers = splits[stage], []
        for place, (index, number) in enumerate(zip(indices, numbers, strict=False)):
            recomputed = cell.facts.recomputes(place, len(indices), number)
            moe = model.is_moe(index)
            layers.append(Layer(index, moe, recomputed, of_layer[moe]))
        embedding = units(operators.embedding(model)) if stage == 0 else ()
        head = units(operators.head(model)) if stage == len(splits) - 1 else ()
        parts.append(ModelPart(tuple(layers), embedding, head))
    return tuple(parts)


def count_parameters(model: Model) -> tuple[int, int]:
    """Return the number of parameters of the model, and the number that each token uses."""
    every = [*operators.embedding(model), *operators.head(model)]
    for layer in range(model.n_layers):
        every += operators.layer(model, model.is_moe(layer))
    total = sum(one.numel for one in every)
    experts = sum(one.numel for one in every if one.is_expert)
    return total, total - experts + experts * model.top_k // model.num_experts


@dataclass(frozen=True)
class Work:
    """The parameters of the model, and the work of an optimizer step."""

    parameters: int
    active_parameters: int
    flops_per_token: int
    tokens_per_step: int
    flops_per_gpu_step: float


def count_work(cell: Cell, ranks: Sequence[Rank]) -> Work:
    """Return the parameters, and the FLOPs of a token and of a step."""
    model, seq_len = model_of(cell), cell.facts.seq_len
    batch = cell.facts.local_batch * ranks[0].gradient_accumulation_steps
    tokens = batch * cell.layout.replicas * seq_len
    parameters, active = count_parameters(model)
    # Count FLOPs as TorchTitan does: no embedding, and attention over the whole sequence.
    scores = model.n_layers * model.heads * (model.nope + model.rope + model.v_head) * seq_len
    flops = 6 * (active - model.vocab * model.dim + scores)
    return Work(
        parameters=parameters,
        active_parameters=active,
        flops_per_token=flops,
        tokens_per_step=tokens,
        flops_per_gpu_step=flops * tokens / cell.world,
    )
