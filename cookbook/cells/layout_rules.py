"""In: a cell's options and ranks. Out: what TorchTitan would refuse about their division.

The rules are those of `ParallelDims`, `pipeline_llm` and the DeepSeek-V3 model in TorchTitan; each
names the option to change and, where one exists, the nearest value that would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import nearest
from cookbook.cells.layout import DEGREES, Layout, layout_of
from cookbook.stack.stack import ModelSizes, Stack

# TorchTitan's default for each pipeline schedule; those with two take more if asked to.
_STAGES_PER_RANK = {
    "1F1B": 1,
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@dataclass(frozen=True)
class Problem:
    """Why an option's value cannot work, and what to do."""

    option: str
    found: str
    remedy: str


def layout_problems(stack: Stack, options: Mapping[str, Any], world: int) -> list[Problem]:
    """All that does not divide in a job of `world` ranks, the outermost degree first."""
    problems = list(_flavor(stack, options))
    for short, name in DEGREES.items():
        value = stack.value(options, name)
        if value < 1 and not (short == "dp_shard" and value == -1):
            allowed = "-1 or 1 and up" if short == "dp_shard" else "1 and up"
            problems.append(Problem(name, f"found {value}, allowed: {allowed}", ""))
    if problems:
        return problems
    layout = layout_of(stack, options, world)
    problems = list(_degrees(layout))
    if problems:
        return problems
    model = stack.model(options)
    if model is not None:
        problems += [*_model(layout, model), *_stages(stack, options, layout, model.n_layers)]
    return problems + list(_batch(stack, options, layout))


def _flavor(stack: Stack, options: Mapping[str, Any]) -> Iterator[Problem]:
    flavors = stack.models.get(stack.value(options, "model.name"), {})
    flavor = stack.value(options, "model.flavor")
    if flavors and flavor not in flavors:
        close = nearest(flavor.upper(), flavors) or nearest(flavor, flavors)
        yield Problem(
            "model.flavor",
            f"found {flavor!r}, allowed: {', '.join(flavors)}",
            f"did you mean {close[0]!r}?" if close else "",
        )


def _degrees(layout: Layout) -> Iterator[Problem]:
    product = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp
    if product != layout.world:
        for short in ("pp", "tp", "cp", "dp_replicate"):
            degree = getattr(layout, short)
            if layout.world % degree:
                yield Problem(
                    DEGREES[short],
                    f"{degree} does not divide {layout.world} ranks",
                    _try(degree, layout.world),
                )
                return
        yield Problem(
            DEGREES["dp_shard"],
            f"PP {layout.pp} x DP replicate {layout.dp_replicate} x DP shard {layout.dp_shard} x "
            f"CP {layout.cp} x TP {layout.tp} is {product} ranks, the job has {layout.world}",
            "set it to -1 (all ranks that are left), or change another degree",
        )
        return
    if layout.ep > 1 and layout.etp not in (1, layout.tp):
        yield Problem(
            DEGREES["etp"],
            f"found {layout.etp}, allowed: 1 or the tensor parallel degree ({layout.tp})",
            "",
        )
        return
    # TorchTitan takes EP from the data-parallel ranks, and from TP's as well where ETP is 1.
    ranks = layout.dp_shard * layout.cp * layout.tp
    if ranks % layout.etp:
        yield Problem(
            DEGREES["etp"],
            f"{layout.etp} does not divide {ranks} ranks of a stage",
            _try(layout.etp, ranks),
        )
    elif ranks // layout.etp % layout.ep:
        ranks //= layout.etp
        yield Problem(
            DEGREES["ep"],
            f"{layout.ep} does not divide {ranks} ranks of a stage",
            _try(layout.ep, ranks),
        )
    elif layout.ep > 1 and layout.dp_shard * layout.cp == 1:
        # apply_fsdp asks for the dense layers' FSDP mesh as soon as there is EP.
        yield Problem(
            DEGREES["dp_shard"],
            f"comes to {layout.dp_shard} with CP 1, allowed with EP above 1: 2 and up",
            f"use fewer TP or PP ranks, or set {DEGREES['ep']} 1",
        )


def _model(layout: Layout, model: ModelSizes) -> Iterator[Problem]:
    if model.num_experts % layout.ep:
        yield Problem(
            DEGREES["ep"],
            f"{layout.ep} does not divide {model.num_experts} experts",
            _try(layout.ep, model.num_experts),
        )
    if model.n_heads % layout.tp:
        yield Problem(
            DEGREES["tp"],
            f"{layout.tp} does not divide {model.n_heads} attention heads",
            _try(layout.tp, model.n_heads),
        )


def _stages(
    stack: Stack, options: Mapping[str, Any], layout: Layout, num_layers: int
) -> Iterator[Problem]:
    """What `pipeline_llm` would refuse: embedding and output count as layers of their stages."""
    by_hand = stack.value(options, "parallelism.module_fqns_per_model_part")
    from_file = stack.value(options, "parallelism.pipeline_parallel_schedule_csv")
    if layout.pp == 1 or by_hand or from_file:
        return
    schedule = stack.value(options, "parallelism.pipeline_parallel_schedule")
    known = {name.lower(): count for name, count in _STAGES_PER_RANK.items()}
    if schedule.lower() not in known:
        close = nearest(schedule, _STAGES_PER_RANK)
        yield Problem(
            "parallelism.pipeline_parallel_schedule",
            f"found {schedule!r}, allowed: {', '.join(_STAGES_PER_RANK)}",
            f"did you mean {close[0]!r}?" if close else "",
        )
        return
    first = stack.value(options, "parallelism.pipeline_parallel_first_stage_less_layers")
    last = stack.value(options, "parallelism.pipeline_parallel_last_stage_less_layers")
    per_stage_name = "parallelism.pipeline_parallel_layers_per_stage"
    per_stage = stack.value(options, per_stage_name)
    layers = num_layers + first + last
    at_least = known[schedule.lower()]
    stages = layout.pp * at_least
    if per_stage is not None:
        stages = math.ceil(layers / per_stage) if per_stage > 0 else 0
        per_rank, left = divmod(stages, layout.pp)
        if left or per_rank < at_least or (at_least == 1 and per_rank != 1):
            yield Problem(
                per_stage_name,
                f"{per_stage} layers a stage make {stages} stages of {num_layers} layers, which "
                f"{schedule} cannot divide among {layout.pp} pipeline ranks",
                f"try {math.ceil(layers / (layout.pp * at_least))}",
            )
            return
    if max(first, last, 1) > layers // stages:
        yield Problem(
            DEGREES["pp"],
            f"{layout.pp} pipeline ranks ({stages} stages of {schedule}) are too many for "
            f"{num_layers} layers",
            "lower it",
        )


def _batch(stack: Stack, options: Mapping[str, Any], layout: Layout) -> Iterator[Problem]:
    seq_len = stack.value(options, "training.seq_len")
    divisor = layout.tp * layout.cp * 2
    if seq_len < 1 or seq_len % divisor:
        yield Problem(
            "training.seq_len",
            f"{seq_len} is not a multiple of TP x CP x 2 = {divisor}",
            f"try {max(seq_len // divisor, 1) * divisor}",
        )
    local = stack.value(options, "training.local_batch_size")
    if local < 1:
        yield Problem("training.local_batch_size", f"found {local}, allowed: 1 and up", "")
        return
    replicas = layout.dp_replicate * layout.dp_shard
    total = stack.value(options, "training.global_batch_size")
    if total >= 0 and (total == 0 or total % (local * replicas)):
        yield Problem(
            "training.global_batch_size",
            f"{total} is not a multiple of local batch {local} x {replicas} data-parallel ranks",
            f"try {max(total // (local * replicas), 1) * local * replicas}",
        )
    microbatch = stack.value(options, "parallelism.pipeline_parallel_microbatch_size")
    if layout.pp > 1 and (microbatch < 1 or local % microbatch):
        yield Problem(
            "parallelism.pipeline_parallel_microbatch_size",
            f"{microbatch} does not divide the local batch of {local}",
            _try(microbatch, local),
        )


def _try(degree: int, total: int) -> str:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    below = [number for number in divisors if number <= degree]
    return f"try {max(below) if below else divisors[0]}"
