"""The test of the network before training, with torch and gloo on a real Slurm cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.run.excluded import read_excluded
from tests.gpu_nodes import GpuNodes
from tests.recording_torchrun import read_records
from tests.slurm_cluster import SlurmCluster
from tests.slurm_installed import require_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.titan]

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = """
description: CPU nodes of the test cluster
scheduler: slurm
nodes: 4
ranks_per_node: 1
emulate: true
cpus_per_task: 2
exclusive: true
"""


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    with SlurmCluster.start(tmp_path_factory.mktemp("s"), nodes=6) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _left_idle(six: SlurmCluster) -> Iterator[None]:
    yield
    six.cancel_all()


def _submit(six: SlurmCluster, tmp_path: Path, floor: float, nodes: int) -> str:
    profile, script = tmp_path / "nodes.yaml", tmp_path / "train.sh"
    profile.write_text(f"{CLUSTER}bandwidth: {{all_reduce: {floor}, all_to_all: {floor}}}\n")
    words = ("render", "debug", "--cluster", str(profile), "--nodes", str(nodes))
    six.run(sys.executable, ROOT / "submit.py", *words, "-o", script)
    environment = {
        "VENV": str(tmp_path / "venv"),
        "COOKBOOK_RUNS": str(tmp_path / "runs"),
        "TORCHRUN_RECORDS": str(tmp_path / "records"),
        "COOKBOOK_PREFLIGHT": "full",
    }
    return six.submit(script, cwd=tmp_path, env=environment)


def test_a_node_that_cannot_talk_is_found_and_left_out(six: SlurmCluster, tmp_path: Path) -> None:
    gpus = GpuNodes.install(tmp_path / "gpus", tmp_path / "venv/bin")
    # A network card that is not there.
    gpus.before_python("worker-2", "export GLOO_SOCKET_IFNAME=none0")
    job = _submit(six, tmp_path, floor=1e-6, nodes=4)
    log = tmp_path / f"debug-bf16-standard-{job}.log"
    assert six.wait(job, timeout=300) == "COMPLETED", log.read_text()
    (left,) = read_excluded(tmp_path / "runs")
    assert left.node == "worker-2"
    assert "the ranks cannot communicate (worker-2: local rank 0: " in left.reason
    assert "Unable to find address for: none0" in left.reason
    nodes = {record.node for record in read_records(tmp_path / "records")}
    assert len(nodes) == 4 and "worker-2" not in nodes
    (found,) = tmp_path.glob("runs/*/*/attempt-1/preflight.json")
    speeds = json.loads(found.read_text())["gb_per_s"]
    assert speeds.keys() == {"all_reduce", "all_to_all"} and min(speeds.values()) > 0
    assert "4 healthy node(s), all_reduce " in log.read_text()


def test_a_network_that_is_too_slow_is_no_fault_of_a_node(
    six: SlurmCluster, tmp_path: Path
) -> None:
    GpuNodes.install(tmp_path / "gpus", tmp_path / "venv/bin")
    job = _submit(six, tmp_path, floor=1e6, nodes=2)
    log = tmp_path / f"debug-bf16-standard-{job}.log"
    assert six.wait(job, timeout=300) == "FAILED", log.read_text()
    assert "the profile wants 1e+06; no fault of single nodes" in log.read_text()
    assert read_excluded(tmp_path / "runs") == []
    assert read_records(tmp_path / "records") == []
