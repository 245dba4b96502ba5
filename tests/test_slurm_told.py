"""Jobs that Slurm tells to stop: TorchTitan saves, the supervisor hands it on; all go on after."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.schema import Unchecked
from cookbook.launch.create import create_run
from cookbook.launch.submit import submit_run
from cookbook.run.record import read_record
from cookbook.run.states import cell_states
from cookbook.run.status import read_status
from tests.cells import Point
from tests.slurm_cluster import SlurmCluster
from tests.submit import ROOT

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def _left_idle(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.cancel_all()


PROFILE = """
description: two CPU nodes of the test cluster
scheduler: slurm
nodes: 2
ranks_per_node: 1
emulate: true
cpus_per_task: 2
exclusive: false
partition: main
environment: {OMP_NUM_THREADS: 1}
"""
SETTINGS = {
    "training.steps": 5,
    "training.seq_len": 64,
    "checkpoint.enable": "true",
    "checkpoint.interval_minutes": 30,
    "checkpoint.async_mode": "async",
    "checkpoint.last_save_model_only": "false",
    "lr_scheduler.decay_ratio": 0,
}


def test_torchtitan_saves_when_slurm_tells_the_job_to_stop(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    profile, runs = tmp_path / "two-nodes.yaml", tmp_path / "runs"
    profile.write_text(PROFILE)
    environment = {"COOKBOOK_RUNS": str(runs), "VENV": sys.prefix}

    def submit(*words: str) -> str:
        command = (sys.executable, str(ROOT / "submit.py"), *words)
        return slurm.run(*command, env=environment, timeout=200).stdout

    cell = ["debug", "--cluster", str(profile), "--nodes=2"]
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


# Stands for a cell's script: the first attempt saves when it is told to, or takes no notice.
BODY = """
attempt="${COOKBOOK_ATTEMPT_DIR}"
# Without a whole checkpoint a late job is not requeued.
mkdir -p "${CELL_DIR}/checkpoint/step-1" && touch "${CELL_DIR}/checkpoint/step-1/.metadata"
[[ "${attempt}" == */attempt-0 ]] || exit 0
touch "${CELL_DIR}/started"
until [[ -e "${attempt}/stop" ]]; do sleep 0.2; done
if [[ %s == "saves late" ]]; then sleep 8; fi
if [[ %s == saves* ]]; then echo "${SLURM_JOB_ID} 7" >"${attempt}/stopped"; exit 0; fi
sleep 300
"""


@pytest.mark.parametrize(
    ("requeue", "does"),
    [(True, "saves"), (False, "saves"), (False, "saves late"), (True, "takes too long")],
)
def test_the_supervisor_hands_it_on_and_has_the_job_requeued(
    slurm: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requeue: bool,
    does: str,
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.env[name])
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    profile = tmp_path / "one-node.yaml"
    profile.write_text(PROFILE + f"requeue: {str(requeue).lower()}\nseconds_to_stop: 60\n")
    cell = Point("debug", "bf16", "standard", str(profile)).cell()
    # So that the test need not wait.
    monkeypatch.setenv("COOKBOOK_LATE_S", "3")
    run = create_run("told", [cell])
    record = read_record(run.cells[0].record)
    options = Unchecked(record.options | {"checkpoint.enable": True})
    replace(record, options=options).write(run.cells[0].record)
    run.cells[0].script.write_text(BODY % (f"'{does}'", f"'{does}'"))
    (job,) = submit_run(run, [cell])
    until((run.cells[0].path / "started").exists, 60)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    if does == "saves late":
        # Nobody starts it again, so it may have all of its time.
        log = run.cells[0].job_files / f"{job}.log"
        until(lambda: "ended: too late: " in log.read_text(), 60)
        assert read_status(run.cells[0]).state == "running"
    ended = slurm.wait(job, {"COMPLETED", "FAILED"})
    (state,) = cell_states(run)
    if requeue:
        assert (ended, slurm.job_field(job, "Restarts")) == ("COMPLETED", "1")
        assert (state.state, state.attempt) == ("finished", 1)
    else:
        assert ended == "FAILED" and state.state == "failed"
        assert "it saved step 7 and ended; stopped: could not be requeued" in (state.reason or "")
        assert "to go on: python submit.py run --resume RUN" in (state.reason or "")


def until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
