"""What is said of a job agrees with a real Slurm, and stays when Slurm has forgotten the job."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import Run
from cookbook.run.states import CellState, cancel_run, cell_states
from tests.cells import Point
from tests.slurm_cluster import Settings, SlurmCluster
from tests.slurm_installed import require_slurm
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = """
description: a CPU node of the test cluster
scheduler: slurm
nodes: 1
ranks_per_node: 2
emulate: true
cpus_per_task: 2
exclusive: false
partition: main
time: "00:10:00"
"""
_FORGET_S = 5


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes of a Slurm that forgets an ended job in seconds."""
    require_slurm()
    settings = Settings(min_job_age=_FORGET_S)
    with SlurmCluster.start(tmp_path_factory.mktemp("s"), nodes=2, settings=settings) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _at_the_cluster(
    small: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, small.env[name])
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    yield
    small.cancel_all()


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    profile = tmp_path / "one-node.yaml"
    profile.write_text(CLUSTER)
    return Point("debug", "bf16", "standard", str(profile)).cell()


def started(cell: Cell, *bodies: str) -> Run:
    """A run of a cell for each of `bodies`, which stand in for the cells' train.sh; submitted."""
    cells = [replace(cell, name=f"cell-{number}") for number in range(len(bodies))]
    run = create_run("truth", cells)
    for one, body in zip(run.cells, bodies, strict=True):
        one.script.write_text(body)
    submit_run(run, cells)
    return run


def only(run: Run) -> CellState:
    (state,) = cell_states(run)
    return state


def said(run: Run) -> tuple[str, str | None]:
    state = only(run)
    return state.state, state.reason


def job_of(run: Run) -> str:
    job = only(run).job_id
    assert job is not None
    return job


def test_a_requeue_is_no_end_to_those_who_follow(small: SlurmCluster, cell: Cell) -> None:
    # Trains for longer than a look takes, and takes its time to end.
    run = started(cell, "trap 'sleep 2; exit 1' TERM\nfor i in {1..300}; do sleep 0.2; done\n")
    until(lambda: only(run).state == "running", 30)
    words = [sys.executable, str(ROOT / "submit.py")]
    watching = [*words, "status", run.name, "--watch"], [*words, "logs", "-f", run.name]
    followers = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in watching
    ]
    try:
        time.sleep(2)
        job = job_of(run)
        small.run("scontrol", "requeue", job)
        states = []
        while small.job_field(job, "Restarts") != "1" or only(run).state != "running":
            states.append(only(run).state)
        assert set(states) <= {"queued", "running"}
        time.sleep(6)
        assert [follower.poll() for follower in followers] == [None, None]
        cancel_run(run)
        shown, _ = followers[0].communicate(timeout=60)
        followers[1].communicate(timeout=60)
        assert followers[0].returncode == 1 and "cell-0: cancelled" in shown
        # What `run` prints at its end, `status --watch` prints as well.
        assert f"# {run.name}" in shown
    finally:
        for follower in followers:
            follower.kill()
            follower.communicate()


def test_a_restart_of_slurmctld_ends_no_watcher_and_no_report(
    small: SlurmCluster, cell: Cell
) -> None:
    run = started(cell, 'touch "${CELL_DIR}/begun"; sleep 50\n')
    # Restarted, slurmctld 22.05 makes no further step in a job that asked for no memory, so the
    # preflight's must be over.
    until((run.cells[0].path / "begun").exists)
    words = [sys.executable, str(ROOT / "submit.py")]
    watcher = subprocess.Popen(
        [*words, "status", run.name, "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        small.stop_controller()
        try:
            found = only(run)
            assert (found.state, found.is_known) == ("running", False)
            report = subprocess.run([*words, "report", run.name], capture_output=True, text=True)
            assert report.returncode == 0 and "Slurm does not answer" in report.stdout
            assert watcher.poll() is None
        finally:
            small.start_controller()
        shown, _ = watcher.communicate(timeout=120)
        assert watcher.returncode == 0, shown
        assert "cell-0: finished" in shown and "Traceback" not in shown
    finally:
        watcher.kill()
        watcher.communicate()
