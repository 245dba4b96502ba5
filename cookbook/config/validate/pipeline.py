"""What a pipeline schedule demands of microbatches, stages and compilation."""

from __future__ import annotations

import math

from cookbook.base.pipelines import is_v_shaped
from cookbook.config.cell import Cell
from cookbook.config.finding import PIPELINING, TORCHTITAN, Problems, Rule, rule

RULES: list[Rule] = []
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"
_SPLIT_BACKWARD = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")


def microbatches(cell: Cell) -> int | None:
    """Microbatches of a step; None without a pipeline, or where the batch does not divide."""
    size, batch = cell.options[_MICROBATCH], cell.options["training.local_batch_size"]
    if cell.layout.pp == 1 or size < 1 or batch % size:
        return None
    return int(batch // size)


@rule(RULES, reference=PIPELINING)
def enough_microbatches(cell: Cell) -> Problems:
    """The schedules' own demands on the number of microbatches."""
    count, ranks = microbatches(cell), cell.layout.pp
    if count is None:
        return
    option, size = "training.local_batch_size", cell.options[_MICROBATCH]
    schedule = cell.options[_SCHEDULE]
    needed = {"1f1b": ranks, "gpipe": ranks, "dualpipev": 2 * ranks}.get(schedule.lower(), 0)
    rounds = max(1, count // ranks)
    if count < needed:
        reason = (
            f"{count} microbatches are fewer than the {needed} stages, which {schedule} refuses"
        )
        yield option, reason, f"try {needed * size}"
    elif schedule.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        reason = f"{count} microbatches are not a multiple of the schedule's {rounds} rounds"
        yield option, reason, f"try {count // ranks * ranks * size}"


@rule(RULES, reference=PIPELINING)
def splittable_backward(cell: Cell) -> Problems:
    """Schedules that run the backward in two halves cannot split a compiled layer's."""
    schedule = cell.options[_SCHEDULE]
    if cell.layout.pp > 1 and schedule.lower() in _SPLIT_BACKWARD and cell.is_compiled:
        reason = f"{schedule} splits the backward, which compiled layers cannot do"
        yield _SCHEDULE, reason, "set compile.components loss, or take Interleaved1F1B"


@rule(RULES, reference=PIPELINING)
def two_stages(cell: Cell) -> Problems:
    """V-shaped schedules need two stages on each rank."""
    ranks, per_stage = cell.layout.pp, cell.options[_PER_STAGE]
    schedule, model = cell.options[_SCHEDULE], cell.options.model
    if ranks == 1 or not is_v_shaped(schedule) or not per_stage or model is None:
        return
    first = cell.options["parallelism.pipeline_parallel_first_stage_less_layers"]
    last = cell.options["parallelism.pipeline_parallel_last_stage_less_layers"]
    layers = model.n_layers + first + last
    stages = math.ceil(layers / per_stage)
    if stages != 2 * ranks:
        yield (
            _PER_STAGE,
            f"{per_stage} layers a stage make {stages} stages; {schedule} "
            f"needs two on each of {ranks} ranks",
            f"try {math.ceil(layers / (2 * ranks))}",
        )


@rule(RULES, reference=f"{TORCHTITAN}/distributed/dual_pipe_v.py")
def dual_pipe_v_overlap(cell: Cell) -> Problems:
    """DualPipeV's hooks call TorchTitan's dispatch and combine; an own layer has its own.

    They fit the standard backend and `mxfp8_a2a`, whose classes have both. TorchTitan builds such a
    cell, and it stops in its first step.
    """
    is_own = cell.exchange.has_own_layer and cell.hooks == cell.options.stack.hooks
    is_overlapped = cell.options[_OVERLAP] and cell.options[_SCHEDULE].lower() == "dualpipev"
    if is_own and is_overlapped and cell.layout.pp > 1 and cell.layout.ep > 1:
        yield (
            _OVERLAP,
            "DualPipeV overlaps the exchanges of the standard backend, not those of "
            f"{cell.exchange.title}, which overlap with the shared experts already",
            "set it to false, or take EP backend standard",
        )
