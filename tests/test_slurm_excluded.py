"""The list of nodes to leave out, on a real Slurm cluster: what `submit.py` tells sbatch of it."""

import sys
import time
from pathlib import Path

import pytest

from cookbook.base.errors import JobError
from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.excluded import exclude_nodes, excluded_file, read_excluded
from cookbook.run.run import Run
from cookbook.run.slurm import nodes_in
from cookbook.run.states import cell_states
from tests.cells import Point
from tests.programs import set_command
from tests.slurm_cluster import CPU_NODES, SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parent.parent
NODES = 4


@pytest.fixture
def four(small: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster that this process is on."""
    for name in ("SLURM_CONF", "PATH", "COOKBOOK_PREFLIGHT"):
        monkeypatch.setenv(name, small.env[name])
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    return small


def _cell(tmp_path: Path, recipe: str = "debug") -> Cell:
    profile = tmp_path / "nodes.yaml"
    profile.write_text(f"{CPU_NODES}nodes: 4\nexclude: [worker-3]\n")
    return Point(recipe, "bf16", "standard", str(profile)).cell()


def _submitted(cell: Cell) -> Run:
    run = create_run("listed", [cell])
    set_command(run.cells[0], "sleep 100\n")
    submit_run(run, [cell])
    return run


def _job(run: Run) -> str:
    (state,) = cell_states(run)
    assert state.job_id
    return state.job_id


def test_what_is_on_the_list_is_left_out_of_new_jobs(
    four: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # sbatch refuses a name that Slurm does not know.
    exclude_nodes({"worker-0": "GPU 3: 2 uncorrectable ECC error(s)", "gone-7": "gone"}, hours=1)
    listed = excluded_file()
    listed.write_text(f"{listed.read_text()}worker-[1]: {{until: 2099-01-01 00:00}}\n")
    run = _submitted(_cell(tmp_path))
    said = capsys.readouterr().err
    assert "gone-7 is no node that Slurm has" in said and "worker-1" not in said
    job = _job(run)
    left_out = set(nodes_in(four.job_field(job, "ExcNodeList") or ""))
    assert left_out == {"worker-0", "worker-1", "worker-3"}
    assert four.wait(job, {"RUNNING"}) == "RUNNING"
    batch_file = run.folder / f"job/{job}_submission.sh"
    assert "#SBATCH --exclude=worker-3,worker-0" in batch_file.read_text()
    # The script that people read and sbatch says what the profile says.
    status = four.run(sys.executable, ROOT / "submit.py", "status", run.name).stdout
    assert "excluded from new jobs: worker-0: GPU 3: 2 uncorrectable ECC error(s); excl" in status
    assert "gone-7: gone" in status


@pytest.mark.parametrize("policy", ["wait", "stop"])
def test_too_few_nodes_at_submission(
    four: SlurmCluster, tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "debug.yaml"
    text = (ROOT / "recipes/debug.yaml").read_text().replace("nodes: 1\n", "nodes: 2\n")
    recipe.write_text(f"too_few_nodes: {policy}\n{text}")
    cell = _cell(tmp_path, str(recipe))
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
    # What it says starts it sooner.
    said = capsys.readouterr().err
    assert "2 healthy node(s) too few, so job" in said
    four.run(*said.rpartition("then: ")[2].split())
    assert four.wait(_job(run), {"RUNNING"}) == "RUNNING"
