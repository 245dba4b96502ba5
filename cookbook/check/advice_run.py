"""What is known of a cell's run: nodes, pipeline, checkpoints, what its loss will be worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cookbook.base.pipelines import is_v_shaped
from cookbook.config.cell import Cell
from cookbook.config.finding import HINT, PIPELINING, TORCHTITAN, WARNING, Finding
from cookbook.config.options import DEGREES
from cookbook.config.validate.here import missing_files
from cookbook.config.validate.pipeline import microbatches

# Throughput runs are short; a longer run is there to learn something.
_LONG_RUN = 200


def paths_are_here(cell: Cell) -> Iterator[Finding]:
    """A path that was typed may have a slip; the recipes' own are made by setup.sh."""
    for finding in missing_files(cell):
        if cell.options.settings[finding.option].origin.startswith("--set"):
            yield replace(finding, level=WARNING, reason=f"{finding.reason}, seen from here")


def fewer_nodes(cell: Cell) -> Iterator[Finding]:
    """On a smaller cluster a recipe shrinks, and the global batch with it."""
    wanted, layout = cell.recipe.nodes, cell.layout
    if cell.nodes >= wanted or cell.stand_in_for is not None or cell.cluster.scheduler == "local":
        return
    consequence = ""
    if cell.options["training.global_batch_size"] < 0:
        local = cell.options["training.local_batch_size"]
        replicas = layout.dp_replicate * layout.dp_shard
        batch = local * replicas
        consequence = (
            f", and a step trains {batch:,} sequences "
            f"(local batch {local} x {replicas} data-parallel ranks)"
        )
    yield Finding(
        WARNING,
        "fewer_nodes",
        "",
        f"{cell.recipe.name} is made for {wanted} nodes and runs on {cell.nodes}{consequence}",
        "set training.global_batch_size to keep the batch, or --nodes",
        f"{TORCHTITAN}/train.py",
    )


def pipeline_bubble(cell: Cell) -> Iterator[Finding]:
    """Few microbatches leave pipeline ranks idle."""
    count, ranks = microbatches(cell), cell.layout.pp
    if count is None:
        return
    size = cell.options["parallelism.pipeline_parallel_microbatch_size"]

    def finding(level: str, reason: str, remedy: str) -> Finding:
        option = "training.local_batch_size"
        return Finding(level, "pipeline_bubble", option, reason, remedy, PIPELINING)

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


def loss_is_logged(cell: Cell) -> Iterator[Finding]:
    """Released TorchTitan knows of one V-shaped schedule, spelt in one way, where its loss is."""
    options, hooks = cell.options, cell.options.stack.hooks
    option = "parallelism.pipeline_parallel_schedule"
    schedule = options[option]
    is_written = options["metrics.enable_tensorboard"] or options["metrics.enable_wandb"]
    if cell.hooks == hooks or not is_written or options["metrics.save_for_all_ranks"]:
        return
    if cell.layout.pp > 1 and is_v_shaped(schedule) and schedule != "ZBVZeroBubble":
        yield Finding(
            WARNING,
            "loss_is_logged",
            option,
            f"without the cookbook's hooks TensorBoard and Weights & Biases get no loss: "
            f"TorchTitan writes that of the last pipeline rank, and {schedule} has it on the first",
            f"leave experimental.custom_import alone, or import {hooks} in "
            f"{cell.hooks or 'a module'!r}, or set metrics.save_for_all_ranks",
            f"{TORCHTITAN}/components/metrics.py",
        )


def checkpoints_resume(cell: Cell) -> Iterator[Finding]:
    """A long run should be able to go on after a lost node, and its last step too."""
    reference = f"{TORCHTITAN}/components/checkpoint.py"
    steps = cell.steps
    if not cell.options["checkpoint.enable"]:
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
    interval = cell.options["checkpoint.interval"]
    if cell.options["checkpoint.last_save_model_only"]:
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.last_save_model_only",
            "the last step is saved without optimizer and cannot be resumed",
            "set it to false where the run may be continued",
            reference,
        )
    if interval > steps and not cell.options["checkpoint.interval_minutes"]:
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.interval",
            f"{interval} is beyond the last step ({steps}): nothing is saved before the end",
            f"try {max(steps // 6, 1)}",
            reference,
        )
    if cell.options["checkpoint.load_only"]:
        yield Finding(
            WARNING,
            "checkpoints_resume",
            "checkpoint.load_only",
            "nothing is saved: a requeued job begins where this one did",
            "set it to false",
            reference,
        )
    left_out = {"optimizer", "lr_scheduler", "dataloader", "train_state"} & set(
        cell.options["checkpoint.exclude_from_loading"]
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
    if cell.options["debug.moe_force_load_balance"] and cell.steps > _LONG_RUN:
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


def replicas_are_summed(cell: Cell) -> Iterator[Finding]:
    """Replicas without shards are DDP's, which averages what FSDP, told so, sums."""
    layout_ = cell.layout
    if layout_.dp_replicate > 1 and layout_.dp_shard * layout_.cp == 1 and layout_.ep == 1:
        replicas = layout_.dp_replicate
        yield Finding(
            WARNING,
            "replicas_are_summed",
            DEGREES["dp_replicate"],
            f"without shards TorchTitan takes DDP, which averages the gradients of {replicas} "
            "replicas; the loss is divided by the tokens of all replicas already, so gradients are "
            f"{replicas} times too small where they are clipped",
            f"set it to 1 and {DEGREES['dp_shard']} to -1: FSDP sums",
            f"{TORCHTITAN}/models/llama3/infra/parallelize.py",
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
