"""A job whose Slurm controller, or munge, is away while the job begins, on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_jobs import Jobs
from tests.gpu_nodes import GpuNodes
from tests.slurm_cluster import Settings, SlurmCluster
from tests.slurm_installed import require_slurm
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]


@pytest.fixture
def jobs(
    tmp_path_factory: pytest.TempPathFactory, checkout: Path, tmp_path: Path
) -> Iterator[Jobs]:
    require_slurm()
    gpus = GpuNodes.install(tmp_path / "gpus", tmp_path / "venv" / "bin")
    folder = tmp_path_factory.mktemp("s")
    with SlurmCluster.start(folder, nodes=2, settings=Settings()) as cluster:
        yield Jobs(cluster, checkout, tmp_path, gpus)


@pytest.mark.parametrize("daemon", ["controller", "munge"])
def test_a_daemon_that_is_away_while_a_job_begins_costs_no_job(jobs: Jobs, daemon: str) -> None:
    """The script asks it where it was submitted, which nodes are drained, for a step."""
    begun, gone = jobs.folder / "begun", jobs.folder / "gone"
    script = jobs.checkout / "train_16b.sh"
    waits = f"touch '{begun}'\nuntil [[ -e '{gone}' ]]; do sleep 0.1; done\n"
    text = script.read_text().replace("set -euo pipefail\n", f"set -euo pipefail\n{waits}", 1)
    late = jobs.folder / "late.sh"
    late.write_text(text)
    job = jobs.submit("--nodes=2", script=late, COOKBOOK_ROOT=str(jobs.checkout))
    until(begun.exists)
    getattr(jobs.cluster, f"stop_{daemon}")()
    gone.touch()
    until(lambda: "preflight: waits for Slurm: scontrol show node: " in jobs.log(job))
    getattr(jobs.cluster, f"start_{daemon}")()
    assert jobs.cluster.wait(job, timeout=120) == "COMPLETED", jobs.log(job)
    assert jobs.trained_on() == [(0, "worker-0"), (0, "worker-1")]
    assert jobs.left_out() == {}
