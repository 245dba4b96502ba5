"""What a pipeline schedule demands of microbatches, stages and compilation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cookbook.base.pipelines import is_v_shaped
from cookbook.config.cell import Cell
from cookbook.config.finding import ERROR, PIPELINING, TORCHTITAN, Finding

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


def enough_microbatches(cell: Cell) -> Iterator[Finding]:
    """The schedules' own demands on the number of microbatches."""
    count, ranks = microbatches(cell), cell.layout.pp
    if count is None:
        return
    size, schedule = cell.options[_MICROBATCH], cell.options[_SCHEDULE]

    def refusal(reason: str, remedy: str) -> Finding:
        option = "training.local_batch_size"
        return Finding(ERROR, "enough_microbatches", option, reason, remedy, PIPELINING)

    needed = {"1f1b": ranks, "gpipe": ranks, "dualpipev": 2 * ranks}.get(schedule.lower(), 0)
    rounds = max(1, count // ranks)
    if count < needed:
        reason = (
            f"{count} microbatches are fewer than the {needed} stages, which {schedule} refuses"
        )
        yield refusal(reason, f"try {needed * size}")
    elif schedule.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        reason = f"{count} microbatches are not a multiple of the schedule's {rounds} rounds"
        yield refusal(reason, f"try {count // ranks * ranks * size}")


def splittable_backward(cell: Cell) -> Iterator[Finding]:
    """Schedules that run the backward in two halves cannot split a compiled layer's."""
    schedule = cell.options[_SCHEDULE]
    if cell.layout.pp > 1 and schedule.lower() in _SPLIT_BACKWARD and cell.is_compiled:
        yield Finding(
            ERROR,
            "splittable_backward",
            _SCHEDULE,
            f"{schedule} splits the backward, which compiled layers cannot do",
            "set compile.components loss, or take Interleaved1F1B",
            PIPELINING,
        )


def two_stages(cell: Cell) -> Iterator[Finding]:
    """V-shaped schedules need two stages on each rank."""
    ranks, per_stage = cell.layout.pp, cell.options[_PER_STAGE]
    schedule, model = cell.options[_SCHEDULE], cell.options.model
    if ranks == 1 or not is_v_shaped(schedule):
        return
    if not per_stage or model is None:
        return
    first = cell.options["parallelism.pipeline_parallel_first_stage_less_layers"]
    last = cell.options["parallelism.pipeline_parallel_last_stage_less_layers"]
    layers = model.n_layers + first + last
    stages = math.ceil(layers / per_stage)
    if stages != 2 * ranks:
        yield Finding(
            ERROR,
            "two_stages",
            _PER_STAGE,
            f"{per_stage} layers a stage make {stages} stages; {schedule} "
            f"needs two on each of {ranks} ranks",
            f"try {math.ceil(layers / (2 * ranks))}",
            PIPELINING,
        )


def dual_pipe_v_overlap(cell: Cell) -> Iterator[Finding]:
    """DualPipeV's hooks call TorchTitan's dispatch and combine; the corrected layer has its own.

    They fit the standard backend and `mxfp8_a2a`, whose classes have both. TorchTitan builds such a
    cell, and it stops in its first step.
    """
    is_corrected = cell.uses_deepep and cell.hooks == cell.options.stack.hooks
    is_overlapped = cell.options[_OVERLAP] and cell.options[_SCHEDULE].lower() == "dualpipev"
    if is_corrected and is_overlapped and cell.layout.pp > 1 and cell.layout.ep > 1:
        yield Finding(
            ERROR,
            "dual_pipe_v_overlap",
            _OVERLAP,
            "DualPipeV overlaps the exchanges of the standard backend, not those of DeepEP, which "
            "overlap with the shared experts already",
            "set it to false, or take EP backend standard",
            f"{TORCHTITAN}/distributed/dual_pipe_v.py",
        )
