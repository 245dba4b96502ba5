"""How far cells are, asked again and again while their logs grow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cookbook.cli.display import CellProgress
from cookbook.cli.watch import Watcher
from cookbook.run.run import read_run
from cookbook.run.submit_lock import take_submit_lock
from tests.test_results import Run, metrics_line

PP = {"parallelism.pipeline_parallel_degree": 2, "training.steps": 20}


def _watcher(run: Run) -> Watcher:
    content = {"run": "r", "scheduler": "local", "cells": run.cells}
    (run.folder / "run.json").write_text(json.dumps(content))
    return Watcher(read_run(run.folder))


def _only(watcher: Watcher) -> CellProgress:
    ((_, progress),) = watcher.look()
    return progress


def test_the_newest_attempt_on_the_rank_with_the_loss_counts(tmp_path: Path) -> None:
    first = "".join(metrics_line(step, loss="3.5") for step in (1, 2, 3))
    # Resumed from an earlier step; rank 1 has the loss, and is not the last to speak.
    second = metrics_line(2, rank=1, loss="2.5") + metrics_line(2, rank=0, loss="-4.0")
    run = Run(tmp_path)
    run.add("a", first, second, "no step yet\n", options=PP)
    found = _only(_watcher(run))
    assert (found.step, found.loss, found.total_steps) == (2, 2.5, 20)


def test_a_cell_without_a_log_or_a_record_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    folder = run.add("a", state="queued")
    (folder / "cell.yaml").write_text("[")
    take_submit_lock(run.folder)
    found = _only(_watcher(run))
    assert (found.state, found.step, found.total_steps, found.phase) == ("queued", None, None, None)


def test_what_a_running_cell_does_is_named_until_it_makes_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    log = run.add("a", "imports\n", state="running") / "attempt-1" / "train.log"
    watcher = _watcher(run)
    prefix = "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - "
    seen = []
    for line in (
        "Starting job: a",
        "Building deepseek_v3 16B",
        "Compiling each TransformerBlock with torch.compile",
        "Training starts at step 1",
    ):
        with log.open("a") as file:
            file.write(f"{prefix}{line}\n")
        seen.append(_only(watcher).phase)
    assert seen == ["loading", "building", "compiling", "first step"]
    with log.open("a") as file:
        file.write(metrics_line(1))
    assert _only(watcher).step == 1


def test_the_time_left_follows_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = Run(tmp_path)
    log = run.add("a", metrics_line(1), state="running") / "attempt-1" / "train.log"
    watcher = _watcher(run)
    # One step tells no pace; the first ones hold compilation anyway.
    assert _only(watcher).left is None
    for step, seconds, left in ((3, 4.0, 34.0), (11, 16.0, 18.0), (20, 9.0, 0.0)):
        now[0] += seconds
        with log.open("a") as file:
            file.write(metrics_line(step))
        assert _only(watcher).left == pytest.approx(left)
    # A new attempt begins with a pace of its own.
    (log.parent.parent / "attempt-2").mkdir()
    (log.parent.parent / "attempt-2" / "train.log").write_text(metrics_line(15))
    assert _only(watcher).left is None


def test_who_comes_later_sees_the_last_steps_and_the_time_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    options = {
        "training.steps": 100,
        "training.seq_len": 1000,
        "training.local_batch_size": 2,
        "parallelism.tensor_parallel_degree": 2,
    }
    speeds = [10, *[500] * 30, 250]
    lines = [metrics_line(step, tps=f"{speed}") for step, speed in enumerate(speeds, 1)]
    other = metrics_line(32, rank=1, tps="7")
    log = run.add("a", "".join(lines) + other, state="running", options=options)
    found = _only(_watcher(run))
    assert found.speeds == (500.0,) * 19 + (250.0,)
    # 68 steps of 1,000 tokens for each of two GPUs, at 500 tokens/s.
    assert found.left == pytest.approx(68 * 1000 / 500)
    watcher = _watcher(run)
    for _ in range(3):
        assert _only(watcher).speeds == found.speeds
    with (log / "attempt-1" / "train.log").open("a") as file:
        file.write(metrics_line(33, tps="600"))
    assert _only(watcher).speeds == (500.0,) * 18 + (250.0, 600.0)


def test_a_new_attempt_goes_on_with_the_sparkline(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = "".join(metrics_line(step, tps="500") for step in (1, 2))
    folder = run.add("a", first, state="running")
    watcher = _watcher(run)
    assert _only(watcher).speeds == (500.0, 500.0)
    (folder / "attempt-2").mkdir()
    (folder / "attempt-2" / "train.log").write_text(metrics_line(2, tps="400"))
    assert _only(watcher).speeds == (500.0, 500.0, 400.0)
