"""The test of the network before training: on a real Slurm cluster, and on a clock of its own."""

import json
import sys
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from cookbook.run.excluded import read_excluded
from tests.gpu_nodes import GpuNodes
from tests.recording_torchrun import read_records
from tests.slurm_cluster import CPU_NODES, SlurmCluster
from tests.started import python
from tests.titan_ranks import free_port

pytestmark = pytest.mark.titan

NODES = 6


@pytest.mark.slurm
def test_a_node_that_cannot_talk_is_found_and_left_out(small: SlurmCluster, tmp_path: Path) -> None:
    gpus = GpuNodes.install(tmp_path / "gpus", tmp_path / "venv/bin")
    # A network card that is not there.
    gpus.before_python("worker-2", "export GLOO_SOCKET_IFNAME=none0")
    profile, script = tmp_path / "nodes.yaml", tmp_path / "train.sh"
    profile.write_text(
        f"{CPU_NODES}nodes: 4\nbandwidth: {{all_reduce: 1.0e-6, all_to_all: 1.0e-6}}\n"
    )
    words = ("render", "debug", "--cluster", str(profile), "--nodes", "4", "-o", script)
    small.run(sys.executable, ROOT / "submit.py", *words)
    environment = {
        "VENV": str(tmp_path / "venv"),
        "COOKBOOK_RUNS": str(tmp_path / "runs"),
        "TORCHRUN_RECORDS": str(tmp_path / "records"),
        "COOKBOOK_PREFLIGHT": "full",
    }
    job = small.submit(script, cwd=tmp_path, env=environment)
    log = tmp_path / f"debug-bf16-standard-{job}.log"
    assert small.wait(job) == "COMPLETED", log.read_text()
    (left,) = read_excluded(tmp_path / "runs")
    assert left.node == "worker-2"
    assert "the ranks cannot communicate (worker-2: RuntimeError: " in left.reason
    assert "Unable to find address for: none0" in left.reason
    nodes = {record.node for record in read_records(tmp_path / "records")}
    assert len(nodes) == 4 and "worker-2" not in nodes
    (found,) = tmp_path.glob("runs/*/*/attempt-1/preflight.json")
    speeds = json.loads(found.read_text())["gb_per_s"]
    assert speeds.keys() == {"all_reduce", "all_to_all"} and min(speeds.values()) > 0
    assert "4 healthy node(s), all_reduce " in log.read_text()


# Five ranks, forked from one that has imported torch. The first collective of a group makes its
# connections, and takes longer.
_RANKS = """
import json, os, sys
from types import SimpleNamespace
import torch.distributed as dist
from cookbook.titan.common import collectives

now, connected = [0.0], set()
def on_the_clock(collective):
    def timed(*tensors, group=None):
        now[0] += 1.0 if group in connected else 100.0
        connected.add(group)
        return collective(*tensors, group=group)
    return timed

for rank in range(5):
    if os.fork() == 0:
        os.environ["LOCAL_RANK"] = str(rank)
        dist.all_reduce = on_the_clock(dist.all_reduce)
        dist.all_to_all_single = on_the_clock(dist.all_to_all_single)
        collectives.time = SimpleNamespace(monotonic=lambda: now[0])
        collectives.main(**json.loads(sys.argv[1]))
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5)))
"""


def test_bandwidth_is_what_a_rank_must_send_in_the_time_of_one_collective() -> None:
    plan = {"device": "cpu", "num_bytes": 16000, "groups": [[0, 1], [2, 3, 4]], "timeout_s": 60.0}
    plan |= {"address": "localhost", "port": free_port(), "world": 5, "first_rank": 0}
    done = python("-c", _RANKS, json.dumps(plan))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.partition("cookbook-link ")[2] for line in done.stdout.splitlines()]
    said = sorted((json.loads(line) for line in lines if line), key=lambda one: one["ranks"])
    assert [(one["name"], one["ranks"]) for one in said] == [
        ("all_to_all", [0, 1]),
        ("all_reduce", [0, 4]),
        ("all_to_all", [2, 4]),
    ]
    # In a second each: a ring sends and receives 4/5 twice. Of an exchange, a rank's own part
    # stays; three do not divide 4,000 numbers.
    assert [one["gb_per_s"] * 1e9 for one in said] == pytest.approx([8000, 25600, 15996 * 2 / 3])
