"""Ended runs that go on: real TorchTitan on the CPU, through `submit.py`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.saved import cut
from tests.submit import Answer, listing, submit

pytestmark = pytest.mark.titan

CELL = "debug-bf16-standard"
OPTIONS = {
    "training.seq_len": 64,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "checkpoint.last_save_model_only": "false",
    # A run's own number of steps must not bend its learning rate.
    "lr_scheduler.decay_ratio": 0,
}


def _submit(*words: str, runs: Path, timeout: float = 150) -> Answer:
    on_cpu = {"CUDA_VISIBLE_DEVICES": ""}
    return submit(*words, runs=runs, variables=on_cpu, timeout=timeout)


def _train(runs: Path, steps: int) -> Path:
    words = [f"--set={name}={value}" for name, value in OPTIONS.items()]
    words += ["--cluster", "local", f"--set=training.steps={steps}"]
    answer = _submit("run", "debug", *words, runs=runs)
    assert (answer.status, answer.stderr) == (0, ""), answer
    return next(runs.iterdir()) / CELL


def _losses(cell: Path, attempt: int) -> dict[int, str]:
    log = (cell / f"attempt-{attempt}" / "train.log").read_text()
    return {int(step): loss for step, loss in re.findall(r"step: +(\d+) +loss: +([0-9.]+)", log)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run of 6 steps."""
    losses = _losses(_train(tmp_path_factory.mktemp("undisturbed"), 6), 0)
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    return losses


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with one that ended after 4 steps, its newest checkpoint cut."""
    runs = tmp_path_factory.mktemp("ended")
    cell = _train(runs, 4)
    data = cell / "checkpoint" / "step-4" / "__1_0.distcp"
    cut(data, data.stat().st_size // 2)
    return runs


@pytest.mark.nightly
def test_more_steps_pass_over_a_cut_checkpoint_and_lose_nothing(
    ended: Path, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(ended, runs)
    (run,) = runs.iterdir()
    cell = run / CELL
    first = (cell / "cell.yaml").read_text()
    script = (cell / "train.sh").read_text()
    sizes = {path.name: path.stat().st_size for path in (cell / "checkpoint/step-4").iterdir()}

    more = ["run", "--resume", run.name, "--set", "training.steps=6"]
    before = listing(run)
    answer = _submit(*more, "--dry-run", runs=runs)
    assert answer.status == 0, answer
    assert f"{CELL} passes over step-4: __1_0.distcp has " in answer.stdout
    assert f"{CELL} continues after step 2 of 6" in answer.stdout
    assert listing(run) == before

    answer = _submit(*more, runs=runs)
    assert (answer.status, answer.stderr) == (0, ""), answer
    # The same numbers, to the last digit, as if nothing had happened; each step once.
    assert _losses(cell, 1) == {step: undisturbed[step] for step in (3, 4, 5, 6)}
    log = (cell / "attempt-1" / "train.log").read_text()
    assert "attempt 1 passed over step-4: __1_0.distcp has " in log
    assert f"Loading the checkpoint from {cell}/checkpoint/step-2" in log
    aside = cell / "checkpoint-damaged" / "step-4"
    assert {path.name: path.stat().st_size for path in aside.iterdir()} == sizes
    assert {path.name for path in (cell / "checkpoint").iterdir()} == {"step-2", "step-4", "step-6"}

    # The learning rate keeps the schedule of the steps that were asked for first.
    options = yaml.safe_load((cell / "cell.yaml").read_text())["options"]
    assert (options["training.steps"], options["lr_scheduler.total_steps"]) == (6, 4)
    assert (cell / "attempt-0" / "cell.yaml").read_text() == first
    assert (cell / "attempt-0" / "train.sh").read_text() == script
    assert "--training.steps=6" in (cell / "train.sh").read_text()

    status = _submit("status", runs=runs).stdout
    assert re.search(rf"{CELL} +finished .*step 6/6", status)
    assert f"{CELL}: attempt 1 passed over step-4: __1_0.distcp has " in status
    assert f"{CELL}: attempt 1 continues after step 2" in status
    (found,) = json.loads(_submit("report", "--format", "json", runs=runs).stdout)["cells"]
    assert (found["steps"], found["status"]) == (6, "finished")
    # The console prints five digits.
    assert round(found["final_loss"], 5) == float(undisturbed[6])

    # All is done, and nothing is written.
    before = listing(run)
    answer = _submit("run", "--resume", f"{run.name}/{CELL}", runs=runs)
    assert answer.status == 2
    assert "has made all of its 6 steps; ask for more: --set training.steps=12" in answer.stderr
    assert listing(run) == before
