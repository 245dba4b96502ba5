"""In: a cell. Out: what is known of its run: the pipeline, the checkpoints, what its loss will be
worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from cookbook.cells.cell import Cell
from cookbook.cells.layout import DEGREES
from cookbook.check.facts import PIPELINING, TORCHTITAN, model_is_compiled, value
from cookbook.check.finding import ERROR, HINT, WARNING, Finding

# Throughput runs are short; a longer run is there to learn something.
_LONG_RUN = 200


def _microbatches(cell: Cell) -> int | None:
    """Microbatches of a step; None without a pipeline, or where the batch does not divide."""
    size = value(cell, "parallelism.pipeline_parallel_microbatch_size")
    batch = value(cell, "training.local_batch_size")
    if cell.layout.pp == 1 or size < 1 or batch % size:
        return None
    return int(batch // size)


def _schedule(cell: Cell) -> str:
    return str(value(cell, "parallelism.pipeline_parallel_schedule"))


def pipeline_microbatches(cell: Cell) -> Iterator[Finding]:
    """The schedules' own demands on the number of microbatches."""
    count, ranks = _microbatches(cell), cell.layout.pp
    if count is None:
        return
    size = value(cell, "parallelism.pipeline_parallel_microbatch_size")

    def finding(level: str, reason: str, remedy: str) -> Finding:
        option = "training.local_batch_size"
        return Finding(level, "pipeline_microbatches", option, reason, remedy, PIPELINING)

    schedule = _schedule(cell)
    needed = {"1f1b": ranks, "gpipe": ranks, "dualpipev": 2 * ranks}.get(schedule.lower(), 0)
    if count < needed:
        reason = (
            f"{count} microbatches are fewer than the {needed} stages, which {schedule} refuses"
        )
        yield finding(ERROR, reason, f"try {needed * size}")
        return
    rounds = max(1, count // ranks)
    if schedule.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        reason = f"{count} microbatches are not a multiple of the schedule's {rounds} rounds"
        yield finding(ERROR, reason, f"try {count // ranks * ranks * size}")
        return
    if count < ranks:
        reason = f"{count} microbatches cannot keep {ranks} pipeline ranks busy"
        yield finding(WARNING, reason, f"raise it to {4 * ranks * size} or more")
    elif count < 4 * ranks:
        idle = (ranks - 1) / (count + ranks - 1)
        reason = (
            f"with {count} microbatches for {ranks} pipeline ranks about {idle:.0%} of the time is "
            "bubble (less with an interleaved schedule)"
        )
        yield finding(HINT, reason, "raise it where memory allows")


def pipeline_schedule(cell: Cell) -> Iterator[Finding]:
    """What a schedule demands of the stages, beyond their number."""
    schedule, ranks = _schedule(cell).lower(), cell.layout.pp
    if ranks == 1:
        return
    split = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
    if schedule in split and model_is_compiled(cell):
        yield Finding(
            ERROR,
            "pipeline_schedule",
            "parallelism.pipeline_parallel_schedule",
            f"{_schedule(cell)} splits the backward, which compiled layers cannot do",
            "set compile.components loss, or take Interleaved1F1B",
            PIPELINING,
        )
    per_stage = value(cell, "parallelism.pipeline_parallel_layers_per_stage")
    model = cell.stack.model(cell.options)
    if schedule in ("zbvzerobubble", "dualpipev") and per_stage and model is not None:
        first = value(cell, "parallelism.pipeline_parallel_first_stage_less_layers")
        last = value(cell, "parallelism.pipeline_parallel_last_stage_less_layers")
        stages = math.ceil((model.n_layers + first + last) / per_stage)
        if stages != 2 * ranks:
            yield Finding(
                ERROR,
                "pipeline_schedule",
                "parallelism.pipeline_parallel_layers_per_stage",
                f"{per_stage} layers a stage make {stages} stages; {_schedule(cell)} "
                f"needs two on each of {ranks} ranks",
                f"try {math.ceil((model.n_layers + first + last) / (2 * ranks))}",
                PIPELINING,
            )


def checkpoints_resume(cell: Cell) -> Iterator[Finding]:
    """A long run should be able to go on after a lost node, and its last step too."""
    reference = f"{TORCHTITAN}/components/checkpoint.py"
    steps = cell.steps
    if not value(cell, "checkpoint.enable"):
        if steps > _LONG_RUN:
            yield Finding(
                WARNING,
                "checkpoints_resume",
                "checkpoint.enable",
                f"no checkpoint in {steps} steps: a lost node costs the whole run",
                "set checkpoint.enable true",
                reference,
            )
        return
    interval = value(cell, "checkpoint.interval")
    if value(cell, "checkpoint.last_save_model_only"):
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.last_save_model_only",
            "the last step is saved without optimizer and cannot be resumed",
            "set it to false where the run may be continued",
            reference,
        )
    if interval > steps:
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.interval",
            f"{interval} is beyond the last step ({steps}): nothing is saved before the end",
            f"try {max(steps // 6, 1)}",
            reference,
        )
    if value(cell, "checkpoint.keep_latest_k") == 1:
        yield Finding(
            ERROR,
            "checkpoints_resume",
            "checkpoint.keep_latest_k",
            "1 would leave none while the next is being written, and TorchTitan refuses it",
            "set it to 2, or to 0 to keep all",
            reference,
        )
    if value(cell, "checkpoint.load_only"):
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.load_only",
            "nothing is saved: a requeued job begins where this one did",
            "set it to false",
            reference,
        )
    left_out = {"optimizer", "lr_scheduler", "dataloader", "train_state"} & set(
        value(cell, "checkpoint.exclude_from_loading")
    )
    if left_out:
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.exclude_from_loading",
            f"{', '.join(sorted(left_out))} would start anew after every restart",
            "use it for the first start of a fine-tuning only",
            reference,
        )


def balance_is_real(cell: Cell) -> Iterator[Finding]:
    """Forced load balance makes throughput comparable and the loss meaningless."""
    if value(cell, "debug.moe_force_load_balance") and cell.steps > _LONG_RUN:
        yield Finding(
            WARNING,
            "balance_is_real",
            "debug.moe_force_load_balance",
            f"experts are dealt out round-robin for {cell.steps} steps: the loss says nothing "
            "about "
            "convergence",
            "set it to false for a run whose loss matters",
            f"{TORCHTITAN}/models/moe/moe.py",
        )


def parameters_are_sharded(cell: Cell) -> Iterator[Finding]:
    """Without FSDP, TorchTitan trains TP and PP models in FP32."""
    layout_ = cell.layout
    if layout_.dp_shard * layout_.cp == 1 and layout_.ep == 1 and layout_.tp * layout_.pp > 1:
        yield Finding(
            WARNING,
            "parameters_are_sharded",
            DEGREES["dp_shard"],
            "TP or PP without FSDP computes in FP32: mixed precision comes with FSDP",
            "leave at least 2 ranks to data-parallel shards",
            f"{TORCHTITAN}/distributed/utils.py",
        )


def tp_in_a_node(cell: Cell) -> Iterator[Finding]:
    """TP exchanges activations four times a layer: it belongs on NVLink."""
    degree, per_node = cell.layout.tp, cell.cluster.ranks_per_node
    if degree > per_node or per_node % degree:
        yield Finding(
            WARNING,
            "tp_in_a_node",
            DEGREES["tp"],
            f"{degree} ranks do not lie within one node of {per_node}",
            f"set it to a divisor of {per_node}",
            f"{TORCHTITAN}/distributed/parallel_dims.py",
        )
