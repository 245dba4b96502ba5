"""What check says of a cell that runs and may be doubtful: just then, with the right numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from cookbook.check.check import judge
from cookbook.config.finding import HINT, WARNING
from tests.check_cells import cell_of

BIG, SMALL = "deepseek_v3_671b", "deepseek_v3_16b"
TP, EP = (f"parallelism.{word}_parallel_degree" for word in ("tensor", "expert"))
SCHEDULE = "parallelism.pipeline_parallel_schedule"
NUM_SMS = "comm.num_sms"
BATCH, STEPS = "training.local_batch_size", "training.steps"
BALANCE = "debug.moe_force_load_balance"
BY_STEPS = {"checkpoint.interval_minutes": 0.0}


@pytest.mark.parametrize(
    ("recipe", "options", "where", "level", "option", "words"),
    [
        (BIG, {BATCH: 1}, {}, WARNING, BATCH, "1 microbatches cannot keep 2 pipeline ranks busy"),
        # Of 4 + 1 turns one is idle.
        (BIG, {BATCH: 4}, {}, HINT, BATCH, "about 20% of the time is bubble"),
        (SMALL, {"checkpoint.enable": False}, {}, WARNING, "checkpoint.enable", "in 1500 steps"),
        (
            SMALL,
            {"checkpoint.last_save_model_only": True},
            {},
            WARNING,
            "checkpoint.last_save_model_only",
            "cannot be resumed",
        ),
        (
            SMALL,
            {"checkpoint.interval": 9999, **BY_STEPS},
            {},
            WARNING,
            "checkpoint.interval",
            "9999 is beyond the last step (1500)",
        ),
        (
            SMALL,
            {"checkpoint.load_only": True},
            {},
            WARNING,
            "checkpoint.load_only",
            "nothing is saved",
        ),
        (
            SMALL,
            {"checkpoint.exclude_from_loading": ["optimizer", "mine"]},
            {},
            WARNING,
            "checkpoint.exclude_from_loading",
            "optimizer would start anew",
        ),
        (SMALL, {BALANCE: True, STEPS: 201}, {}, WARNING, BALANCE, "round-robin for 201 steps"),
        (
            SMALL,
            {TP: 8, EP: 1},
            {"nodes": 1},
            WARNING,
            "parallelism.data_parallel_shard_degree",
            "computes in FP32",
        ),
        (BIG, {TP: 16}, {}, WARNING, TP, "16 ranks do not lie within one node of 8"),
        # 32 ranks, each with its own 16 sequences.
        (SMALL, {EP: 8}, {"nodes": 4}, WARNING, "", "trains 512 sequences (local batch 16 x 32"),
        (
            SMALL,
            {EP: 8, "parallelism.data_parallel_replicate_degree": 2},
            {"nodes": 4},
            WARNING,
            "",
            "trains 512 sequences (local batch 16 x 32",
        ),
        (
            BIG,
            {NUM_SMS: 24},
            {},
            HINT,
            NUM_SMS,
            "24 limits TP's exchanges and the all-to-all of EP too, which nothing hides",
        ),
        (BIG, {NUM_SMS: 24}, {"ep_backend": "deepep"}, HINT, NUM_SMS, "limits TP's exchanges too"),
        (SMALL, {NUM_SMS: 24}, {}, HINT, NUM_SMS, "limits the all-to-all of EP too, "),
        (
            SMALL,
            {"training.dataset_path": "/nope"},
            {},
            WARNING,
            "training.dataset_path",
            "/nope is not there, seen from here",
        ),
        (
            SMALL,
            {EP: 8},
            {"precision": "mxfp8", "cluster": "h200-node"},
            HINT,
            "",
            "mxfp8 is emulated here",
        ),
    ],
)
def test_what_is_doubtful_is_told_with_its_numbers(
    recipe: str,
    options: dict[str, Any],
    where: dict[str, Any],
    level: str,
    option: str,
    words: str,
) -> None:
    found = judge(cell_of(recipe, options, **where))
    told = [one.reason for one in found if (one.level, one.option) == (level, option)]
    assert any(words in reason for reason in told), found


@pytest.mark.parametrize(
    ("recipe", "options", "where"),
    [
        (BIG, {}, {}),
        (SMALL, {}, {}),
        # Four microbatches a rank are enough.
        (BIG, {BATCH: 8}, {}),
        (SMALL, {BALANCE: True, STEPS: 200}, {}),
        (SMALL, {"checkpoint.enable": False, STEPS: 200}, {}),
        (SMALL, {"checkpoint.interval": 9999, "checkpoint.interval_minutes": 5.0}, {}),
        (SMALL, {"checkpoint.exclude_from_loading": ["mine"]}, {}),
        (BIG, {TP: 8}, {}),
        (SMALL, {TP: 8}, {}),
        # What NCCL sends then is FSDP's, beside compute.
        (SMALL, {NUM_SMS: 24, EP: 1}, {}),
        (SMALL, {NUM_SMS: 24}, {"ep_backend": "deepep"}),
        ("debug", {NUM_SMS: 24, EP: 2}, {"cluster": "local"}),
    ],
)
def test_nothing_is_said_at_the_other_side_of_each_edge(
    recipe: str, options: dict[str, Any], where: dict[str, Any]
) -> None:
    found = judge(cell_of(recipe, options, **where))
    # How often to save is told of by itself.
    assert [one for one in found if one.rule != "saving"] == []


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ((2, 1, 1, 1), "averages the gradients of 2 replicas"),
        # With shards, of sequences too, the replicas are HSDP's.
        ((2, 2, 1, 1), ""),
        ((2, 1, 2, 1), ""),
        ((1, 4, 1, 1), ""),
        ((2, 2, 1, 2), ""),
    ],
)
def test_replicas_without_shards_are_told_of(
    degrees: tuple[int, int, int, int], words: str
) -> None:
    """DDP averages; tests/test_titan_train.py trains with it."""
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    options = {f"parallelism.{name}_degree": n for name, n in zip(names, degrees, strict=False)}
    options |= {EP: degrees[-1], TP: 8 // math.prod(degrees[:3]), "compile.enable": False}
    found = judge(cell_of(SMALL, options, nodes=1))
    assert not [one for one in found if one.rule == "layout"], found
    said = [one.reason for one in found if one.rule == "replicas_are_summed"]
    assert len(said) == bool(words) and all(words in reason for reason in said)


@pytest.mark.parametrize(
    ("schedule", "changes", "hooks", "told"),
    [
        ("DualPipeV", {}, "none", True),
        ("zbvzerobubble", {}, "none", True),
        ("zbvzerobubble", {"metrics.enable_tensorboard": False}, "none", False),
        ("DualPipeV", {"metrics.save_for_all_ranks": True}, "none", False),
        # TorchTitan knows this name.
        ("ZBVZeroBubble", {}, "none", False),
        ("1F1B", {}, "none", False),
        ("DualPipeV", {}, None, False),
    ],
)
def test_a_loss_that_is_written_nowhere_is_told_of(
    schedule: str, changes: dict[str, Any], hooks: str | None, told: bool
) -> None:
    options = {SCHEDULE: schedule, "compile.components": ["loss"], **changes}
    cell = cell_of(BIG, options)
    cell = dataclasses.replace(cell, hooks=hooks) if hooks else cell
    found = [one for one in judge(cell) if one.rule == "loss_is_logged"]
    assert [(one.level, one.option) for one in found] == [(WARNING, SCHEDULE)] * told
