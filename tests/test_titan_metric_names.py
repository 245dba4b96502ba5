"""TensorBoard and Weights & Biases get the same metrics under the same names."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger, WandBLogger

pytestmark = pytest.mark.titan


def test_both_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, float] = {}
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **_: None  # type: ignore[attr-defined]
    wandb.log = lambda metrics, step: told.update(metrics)  # type: ignore[attr-defined]
    wandb.run = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config: Any = types.SimpleNamespace(to_dict=dict)
    loggers = LoggerContainer()
    folder = tmp_path / "smoke-1" / "cell" / "attempt-0" / "tb"
    loggers.add_logger(WandBLogger(str(folder), config))
    loggers.add_logger(TensorBoardLogger(str(folder)))
    metrics = {"loss_metrics/global_avg_loss": 3.0, "throughput(tps)": 859.0, "mfu(%)": 10.0}
    loggers.log(metrics, 1)
    loggers.close()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(told) == sorted(metrics)
