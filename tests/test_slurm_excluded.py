"""The list of nodes to leave out, on a real Slurm cluster: what `submit.py` tells sbatch of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.base.errors import JobError
from cookbook.config.cell import Cell
from cookbook.launch.create import create_run
from cookbook.launch.submit import submit_run
from cookbook.run.excluded import exclude_nodes, read_excluded
from cookbook.run.run import Run
from cookbook.run.slurm import nodes_in, partition_nodes
from cookbook.run.states import cell_states
from tests.cells import Point
from tests.gpu_nodes import GpuNodes
from tests.recording_torchrun import read_records
from tests.slurm_cluster import Settings, SlurmCluster
from tests.slurm_installed import require_slurm

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = """
description: CPU nodes of the test cluster
scheduler: slurm
nodes: 4
ranks_per_node: 1
emulate: true
cpus_per_task: 2
exclude: [worker-3]
"""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    settings = Settings(requeue_delay=5, kill_wait=5)
    with SlurmCluster.start(tmp_path_factory.mktemp("s"), nodes=4, settings=settings) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _at_the_cluster(
    four: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    for name in ("SLURM_CONF", "PATH", "COOKBOOK_PREFLIGHT"):
        monkeypatch.setenv(name, four.env[name])
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    yield
    four.cancel_all()


def _cell(tmp_path: Path) -> Cell:
    profile = tmp_path / "nodes.yaml"
    profile.write_text(CLUSTER)
    return Point("debug", "bf16", "standard", str(profile)).cell()


def _submitted(cell: Cell, body: str = "sleep 100\n") -> Run:
    run = create_run("listed", [cell])
    run.cells[0].script.write_text(body)
    submit_run(run, [cell])
    return run


def _job(run: Run) -> str:
    (state,) = cell_states(run)
    assert state.job_id
    return state.job_id


def test_what_is_on_the_list_is_left_out_of_new_jobs(four: SlurmCluster, cell: Cell) -> None:
    # sbatch refuses a name that Slurm does not know.
    exclude_nodes({"worker-0": "GPU 3: 2 uncorrectable ECC error(s)", "gone-7": "gone"}, hours=1)
    run = _submitted(cell)
    job = _job(run)
    assert set(nodes_in(four.job_field(job, "ExcNodeList") or "")) == {"worker-0", "worker-3"}
    assert four.wait(job, {"RUNNING"}) == "RUNNING"
    assert "#SBATCH --exclude=worker-3,worker-0" in run.cells[0].submission.read_text()
    # The script that people read and sbatch says what the profile says.
    status = four.run(sys.executable, ROOT / "submit.py", "status", run.name).stdout
    assert "left out of new jobs: worker-0: GPU 3: 2 uncorrectable ECC error(s); left" in status
    assert "gone-7: gone" in status


@pytest.mark.parametrize("policy", ["wait", "stop"])
def test_too_few_nodes_at_submission(
    four: SlurmCluster, tmp_path: Path, policy: str, two_nodes: Cell
) -> None:
    recipe = tmp_path / "debug.yaml"
    text = (ROOT / "recipes/debug.yaml").read_text().replace("nodes: 1\n", "nodes: 2\n")
    recipe.write_text(f"too_few_nodes: {policy}\n{text}")
    cell = Point(str(recipe), "bf16", "standard", str(two_nodes.cluster.path)).cell()
    assert cell.nodes == 2
    exclude_nodes({"worker-0": "soon back"}, hours=1)
    exclude_nodes({"worker-1": "later", "worker-2": "much later"}, hours=24)
    soon = next(one.until for one in read_excluded() if one.node == "worker-1")
    if policy == "stop":
        with pytest.raises(JobError, match="not enough healthy nodes: 2 of 2 missing"):
            _submitted(cell)
        assert four.run("squeue", "-h").stdout == ""
        return
    run = _submitted(cell)
    start = four.job_field(_job(run), "StartTime")
    assert start is not None
    # The profile leaves worker-3 out for good, so both of the first two must be back.
    assert abs(time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - soon) < 2
    assert four.job_field(_job(run), "JobState") == "PENDING"


def test_the_nodes_of_a_partition(four: SlurmCluster) -> None:
    nodes = [f"worker-{number}" for number in range(4)]
    assert partition_nodes(None) == partition_nodes("main") == nodes
    assert partition_nodes("other,main") == nodes
    assert partition_nodes("other") == []
    four.run("scontrol update NodeName=worker-2 State=DRAIN Reason=test")
    try:
        assert partition_nodes("main") == nodes
    finally:
        four.run("scontrol update NodeName=worker-2 State=RESUME")


def test_a_supervised_job_goes_on_without_its_bad_node(
    four: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_nodes: Cell
) -> None:
    gpus = GpuNodes.install(tmp_path / "gpus", tmp_path / "venv/bin")
    about = tmp_path / "other/torch-9.9.9.dist-info/METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    gpus.before_python("worker-1", f"export PYTHONPATH={tmp_path}/other:$PYTHONPATH")
    monkeypatch.setenv("COOKBOOK_PREFLIGHT", "full")
    monkeypatch.setenv("TORCHRUN_RECORDS", str(tmp_path / "records"))
    with monkeypatch.context() as patch:
        # The job trains in the environment that submitted it.
        patch.setattr(sys, "prefix", str(tmp_path / "venv"))
        run = create_run("supervised", [two_nodes])
        (job,) = submit_run(run, [two_nodes])
    assert four.wait(job, timeout=120) == "COMPLETED"
    (state,) = cell_states(run)
    assert (state.state, state.attempt) == ("finished", 1)
    assert [r.node for r in read_records(tmp_path / "records")] == ["worker-0", "worker-2"]
    found = [json.loads(one.preflight.read_text()) for one in run.cells[0].attempts()]
    assert found[0]["nodes"] == [] and found[0]["excluded"].keys() == {"worker-1"}
    assert found[1]["nodes"] == ["worker-0", "worker-2"] and found[1]["excluded"] == {}


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return _cell(tmp_path)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Cell:
    """The debug recipe on two nodes."""
    recipe = tmp_path / "two.yaml"
    text = (ROOT / "recipes/debug.yaml").read_text().replace("nodes: 1\n", "nodes: 2\n")
    recipe.write_text(text)
    profile = _cell(tmp_path).cluster.path
    return Point(str(recipe), "bf16", "standard", str(profile)).cell()
