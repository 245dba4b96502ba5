"""Metrics lines that anybody can read, and the root cause of a failed checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import LoggerContainer

from cookbook.observe.metrics import read_steps
from cookbook.run.folder import Attempt
from cookbook.titan.tt_0_2_2.checkpoint_errors import CheckpointFailedError, name_checkpoint_causes
from cookbook.titan.tt_0_2_2.metrics_log import with_json_lines

pytestmark = pytest.mark.titan


def test_each_logged_step_is_a_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = LoggerContainer()
    monkeypatch.delenv("COOKBOOK_ATTEMPT_DIR", raising=False)
    assert with_json_lines(empty, 3) is empty
    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", str(tmp_path))
    logger = with_json_lines(empty, 3)
    assert logger.number_of_loggers > 0
    metrics = {"loss_metrics/global_avg_loss": 2.5, "grad_norm": float("nan"), "lr": 1e-4}
    names = {"throughput(tps)": 100.0, "tflops": 9.0, "mfu(%)": 1.5, "n_tokens_seen": 4096}
    memory = {"memory/max_reserved(GiB)": 70.0, "memory/max_reserved(%)": 50.0}
    logger.log(metrics | names | memory | {"router_load/busiest_over_mean": 1.25}, 10)
    logger.log({"validation_metrics/loss": 2.75}, 10)
    logger.log({"loss_metrics/global_avg_loss": float("inf")}, 20)
    first, validation, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["rank"], first["grad_norm"]) == (10, 3, "nan")
    assert first["router_busiest_over_mean"] == 1.25 and first["tokens_seen"] == 4096
    assert validation["validation_loss"] == 2.75 and last["loss"] == "inf"
    ten, twenty = read_steps(Attempt(tmp_path, 0))
    assert (ten.loss, ten.lr, ten.tokens_per_second, ten.tflops) == (2.5, 1e-4, 100.0, 9.0)
    assert (ten.mfu, ten.memory_gib, ten.memory_percent) == (1.5, 70.0, 50.0)
    assert (ten.validation_loss, twenty.loss) == (2.75, float("inf"))


def test_a_failed_checkpoint_names_its_root_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'safetensors'")

    def load(manager: CheckpointManager) -> None:
        stack = StackSummary()
        raise CheckpointException("load", {1: (missing, stack), 0: (missing, stack)})

    for name in ("save", "maybe_wait_for_staging", "_async_wait", "close"):
        monkeypatch.setattr(CheckpointManager, name, getattr(CheckpointManager, name))
    monkeypatch.setattr(CheckpointManager, "load", load)
    name_checkpoint_causes()
    with pytest.raises(CheckpointFailedError) as error:
        CheckpointManager.load(None)
    assert str(error.value) == (
        "load failed on rank 0, 1: ModuleNotFoundError: No module named 'safetensors'"
    )
