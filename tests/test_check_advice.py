"""What check says of a cell that runs and may be doubtful: just then, with the right numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from cookbook.config.finding import WARNING
from tests.check_cells import cell_of, findings

BIG, SMALL = "deepseek_v3_671b", "deepseek_v3_16b"
TP, EP = (f"parallelism.{word}_parallel_degree" for word in ("tensor", "expert"))
SCHEDULE = "parallelism.pipeline_parallel_schedule"
BATCH, STEPS = "training.local_batch_size", "training.steps"


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
    found = findings(cell_of(SMALL, options, nodes=1))
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
    found = [one for one in findings(cell) if one.rule == "loss_is_logged"]
    assert [(one.level, one.option) for one in found] == [(WARNING, SCHEDULE)] * told
