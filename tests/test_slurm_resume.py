"""`run --resume` on a real Slurm cluster: TorchTitan goes on in a job of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster
from tests.submit import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]

CELL = "debug-bf16-standard"
OPTIONS = {
    "training.steps": 2,
    "training.seq_len": 64,
    "checkpoint.enable": "true",
    "checkpoint.last_save_model_only": "false",
    "lr_scheduler.decay_ratio": 0,
}


def test_an_ended_run_goes_on_in_another_job(
    slurm: SlurmCluster, tmp_path: Path, two_nodes: Path
) -> None:
    runs = tmp_path / "runs"

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, str(ROOT / "submit.py"), *words)
        environment = {"COOKBOOK_RUNS": str(runs), "VENV": sys.prefix}
        return slurm.run(*command, check=False, env=environment, timeout=400)

    settings = [f"--set={name}={value}" for name, value in OPTIONS.items()]
    cell = ["run", "debug", *settings, "--cluster", str(two_nodes), "--nodes", "2"]
    started = submit(*cell, "--detach")
    assert started.returncode == 0, started.stderr
    (run,) = [path for path in runs.iterdir() if path.name[0] != "."]
    more = ["run", "--resume", run.name, "--set", "training.steps=3"]
    refused = submit(*more)
    assert refused.returncode == 2
    assert re.search(rf"{CELL}: is (queued|running); wait for its end", refused.stderr)

    first = json.loads((run / CELL / "job.json").read_text())["job_id"]
    assert slurm.wait(first, timeout=200) == "COMPLETED"
    resumed = submit(*more)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    second = json.loads((run / CELL / "job.json").read_text())["job_id"]
    assert int(second) > int(first)
    assert slurm.job_field(second, "JobState") == "COMPLETED"
    assert f"{CELL}: attempt 1 continues after step 2" in submit("status").stdout
    (found,) = json.loads(submit("report", "--format", "json").stdout)["cells"]
    assert (found["status"], found["steps"]) == ("finished", 3)
    log = (run / CELL / "attempt-1" / "train.log").read_text()
    assert set(re.findall(r"step: +(\d+) +loss:", log)) == {"3"}
