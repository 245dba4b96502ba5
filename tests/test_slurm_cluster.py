"""The test cluster is a real one, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.config.cluster import Cluster
from tests.slurm_cluster import Settings, SlurmCluster, SlurmError
from tests.slurm_conf import PORTS
from tests.slurm_installed import require_slurm

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).parents[1]
HEADER = """\
#!/bin/bash
#SBATCH --nodes=32 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=128
#SBATCH --exclusive --mem=0 --requeue --open-mode=append --signal=B:USR1@120 --time=01:00:00
"""


@pytest.fixture(autouse=True)
def _slurm_is_here() -> None:
    require_slurm()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[SlurmCluster]:
    settings = Settings(min_job_age=2, requeue_delay=5, kill_wait=1)
    with SlurmCluster.start(tmp_path / "slurm", nodes=2, settings=settings) as cluster:
        yield cluster


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + body)
    return path


def commands_that_name(folder: Path) -> list[str]:
    """Command lines of running processes in which `folder` appears."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def ports_of(cluster: SlurmCluster) -> list[int]:
    words = cluster.conf.read_text().split()
    return [int(w.partition("=")[2]) for w in words if w.startswith(("Port=", "SlurmctldPort="))]


def assert_free(port: int) -> None:
    with socket.socket() as probe:
        # Closed connections may linger in TIME_WAIT, which is not a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def test_32_idle_nodes_with_8_gpus_each(slurm: SlurmCluster) -> None:
    slurm.cancel_all()
    shown = slurm.run("sinfo", "-h", "-o", "%P %D %t %G %c %m").stdout.split()
    assert shown == ["main*", "32", "idle", "gpu:nvidia_b200:8", "128", "1792000"]
    assert list(slurm.node_states()) and set(slurm.node_states()) == set(slurm.node_names)


def test_a_node_failure_requeues_the_job(two_nodes: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "job.sh", "echo attempt ${SLURM_RESTART_COUNT:-0}\nsleep 300\n"
    )
    out = tmp_path / "out"

    def wait_for(text: str) -> list[str]:
        deadline = time.monotonic() + 30
        while not out.exists() or text not in (said := out.read_text()):
            assert time.monotonic() < deadline, f"no {text}"
            time.sleep(0.1)
        return [line for line in said.splitlines() if "attempt" in line]

    job = two_nodes.submit(script, options=["--nodes=2", f"--output={out}"])
    two_nodes.wait(job, {"RUNNING"})
    # A running job has not always started its script.
    assert wait_for("attempt 0\n") == ["attempt 0"]
    two_nodes.kill_node("worker-1")
    two_nodes.wait(job, {"PENDING"})
    assert two_nodes.node_states()["worker-1"].startswith("down")
    two_nodes.start_node("worker-1")
    two_nodes.wait(job, {"RUNNING"})
    assert two_nodes.job_field(job, "Restarts") == "1"
    assert wait_for("attempt 1\n") == ["attempt 0", "attempt 1"]


def test_a_finished_job_is_forgotten(two_nodes: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path / "job.sh", "true\n")
    job = two_nodes.submit(script, options=["--nodes=1", f"--output={tmp_path}/out"])
    assert two_nodes.wait(job) == "COMPLETED"
    deadline = time.monotonic() + 30
    while two_nodes.job_field(job, "JobState") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with pytest.raises(SlurmError, match=f"job {job} is gone"):
        two_nodes.wait(job)
    assert "accounting storage is disabled" in two_nodes.run("sacct", check=False).stderr


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    hosts = Path("/etc/hosts").read_bytes()
    with SlurmCluster.start(tmp_path / "slurm", nodes=3) as cluster:
        # A process that has left its step, its session and its parent.
        cluster.run(
            "srun", "sh", "-c", f"setsid -f tail -f {cluster.folder}/hosts > /dev/null 2>&1"
        )
        ports = ports_of(cluster)
        assert len(ports) == 4
        assert any("tail -f" in command for command in commands_that_name(cluster.folder))
    assert commands_that_name(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc/hosts").read_bytes() == hosts
    for port in ports:
        assert_free(port)


def test_no_process_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from tests.slurm_cluster import SlurmCluster\n"
        "with SlurmCluster.start(pathlib.Path(sys.argv[1]), nodes=2) as cluster:\n"
        "    job = cluster.submit(sys.argv[2], options=['--nodes=2'])\n"
        "    print(cluster.wait(job, {'RUNNING'}), flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = write_script(tmp_path / "job.sh", f"tail -f {tmp_path}/job.sh\n")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "slurm"), str(script)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"RUNNING\n"
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while left := commands_that_name(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_no_daemon_listens_where_jobs_meet(two_nodes: SlurmCluster) -> None:
    conf = two_nodes.conf.read_text()
    listening = {int(port) for port in re.findall(r"(?:Port|SlurmctldPort)=(\d+)", conf)}
    assert len(listening) == 3
    meeting = range(Cluster.rendezvous_port, Cluster.rendezvous_port + 1000)
    # Whichever of these a cluster takes.
    assert listening <= set(PORTS)
    assert not set(PORTS) & set(meeting)


def test_a_missing_slurm_is_a_skip_that_says_how_to_install_it_and_a_failure_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.slurm_installed.PROGRAMS", ("slurmd-of-no-one",))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"slurmd-of-no-one.*apt-get install slurmctld"):
        require_slurm()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="required in CI: no slurmd-of-no-one"):
        require_slurm()
