"""Jobs that Slurm tells to stop: TorchTitan saves, the supervisor hands it on; all go on after."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster
from tests.submit import ROOT
from tests.waiting import until

pytestmark = pytest.mark.slurm


SETTINGS = {
    "training.steps": 5,
    "training.seq_len": 64,
    "checkpoint.enable": "true",
    "checkpoint.interval_minutes": 30,
    "checkpoint.async_mode": "async",
    "checkpoint.last_save_model_only": "false",
    "lr_scheduler.decay_ratio": 0,
}


@pytest.mark.nightly
def test_torchtitan_saves_when_slurm_tells_the_job_to_stop(
    slurm: SlurmCluster, tmp_path: Path, two_nodes: Path
) -> None:
    runs = tmp_path / "runs"
    environment = {"COOKBOOK_RUNS": str(runs), "VENV": sys.prefix}

    def submit(*words: str) -> str:
        command = (sys.executable, str(ROOT / "submit.py"), *words)
        return slurm.run(*command, env=environment, timeout=200).stdout

    cell = ["debug", "--cluster", str(two_nodes), "--nodes=2"]
    cell += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    submit("render", *cell, "-o", str(tmp_path / "mine.sh"))
    job = slurm.submit(tmp_path / "mine.sh", cwd=tmp_path, env=environment)

    def steps(attempt: int) -> list[int]:
        logs = list(runs.glob(f"debug/debug-bf16-standard/attempt-{attempt}/train.log"))
        lines = re.findall(r"rank0.* step: +(\d+) +loss", "".join(log.read_text() for log in logs))
        return [int(step) for step in lines]

    until(lambda: steps(0), 90)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, {"COMPLETED", "FAILED"}, timeout=200) == "COMPLETED"
    # Nothing is made twice, and nothing is left out.
    assert len(steps(0)) < 5 and steps(0) + steps(1) == [1, 2, 3, 4, 5]
    status = submit("status")
    assert "finished" in status and f"attempt 1 continues after step {steps(0)[-1]}" in status
