"""The look at a job's nodes before training, on a real Slurm cluster whose nodes have faults."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cookbook.run.excluded import read_excluded
from tests.gpu_nodes import EP_8, GpuNodes, Jobs
from tests.slurm_cluster import SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm


NODES = 16


@pytest.fixture
def jobs(small: SlurmCluster, checkout: Path, tmp_path: Path) -> Jobs:
    gpus = GpuNodes.install(tmp_path / "gpus", tmp_path / "venv" / "bin")
    return Jobs(small, checkout, tmp_path, gpus)


def test_three_bad_nodes_of_eight_are_left_out_of_the_next_attempt(jobs: Jobs) -> None:
    jobs.gpus.hang("worker-1")
    jobs.gpus.lose_gpu("worker-4")
    jobs.gpus.ecc_error("worker-6")
    job = jobs.submit("--nodes=8")
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    trained = jobs.trained_on()
    assert {restart for restart, _ in trained} == {1}
    found, nodes = jobs.left_out(), {node for _, node in trained}
    assert found.keys() == {"worker-1", "worker-4", "worker-6"}
    assert len(nodes) == 8 and nodes.isdisjoint(found)
    assert "NVML: no answer in 15 s" in found["worker-1"]
    assert "7 x NVIDIA B200" in found["worker-4"] and "has 8 x B200" in found["worker-4"]
    assert found["worker-6"] == "GPU 3: 2 uncorrectable ECC error(s)"
    for node, reason in found.items():
        assert f"cookbook: preflight: {node}: {reason}; excluded for 24 h" in jobs.log(job)
    assert jobs.status()["state"] == "finished" and jobs.status()["restarts"] == 1


def test_a_node_on_the_list_is_left_out_without_a_look(jobs: Jobs) -> None:
    (jobs.folder / "runs").mkdir()
    # By hand, as people do it.
    (jobs.folder / "runs/excluded.yaml").write_text(
        "worker-0:\n  until: 2999-01-01\n  reason: it smells\n"
    )
    job = jobs.submit("--nodes=2")
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    assert "worker-0: it smells; excluded until 2999-01-01 00:00 UTC" in jobs.log(job)
    assert [node for _, node in jobs.trained_on()] == ["worker-1", "worker-2"]
    # A mistake in the list is named and costs no job.
    (jobs.folder / "runs/excluded.yaml").write_text("worker-0: [\n")
    job = jobs.submit("--nodes=1")
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    assert "the exclusion list is ignored: " in jobs.log(job)


def test_a_spare_node_takes_the_place_of_a_bad_one_in_the_same_attempt(jobs: Jobs) -> None:
    recipe = jobs.folder / "with-spare.yaml"
    text = (jobs.checkout / "recipes/deepseek_v3_16b.yaml").read_text()
    recipe.write_text("spare_nodes: 2\n" + text)
    script = jobs.folder / "train.sh"
    words = (str(recipe), "--cluster", "soperator-b200", "--nodes", "3", "-o", str(script))
    jobs.cluster.run(
        *(sys.executable, jobs.checkout / "submit.py", "render", *words), "--set", EP_8[2:]
    )
    assert "#SBATCH --nodes=5\n" in script.read_text()
    jobs.gpus.ecc_error("worker-0")
    job = jobs.submit(script=script)
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    # The batch step's own node is the bad one: another one hosts the rendezvous.
    assert jobs.trained_on() == [(0, "worker-1"), (0, "worker-2"), (0, "worker-3")]
    assert {record.option("--nnodes") for record in jobs.records()} == {"3"}
    address = jobs.cluster.run("scontrol", "show", "node", "worker-1", "--oneliner").stdout
    host = jobs.records()[0].option("--rdzv-endpoint").partition(":")[0]
    assert f"NodeAddr={host} " in address
    (line,) = [line for line in jobs.log(job).splitlines() if "healthy" in line]
    assert "preflight: 3 healthy node(s), 1 spare" in line
    # It is in the attempt's own log, too.
    (log,) = jobs.folder.glob("runs/*/*/attempt-0/train.log")
    assert line in log.read_text()
    assert jobs.left_out().keys() == {"worker-0"}


@pytest.mark.parametrize("policy", ["wait", "stop"])
def test_too_few_nodes_wait_or_stop_as_the_recipe_says(jobs: Jobs, policy: str) -> None:
    script, text = jobs.folder / "mine.sh", (jobs.checkout / "train_16b.sh").read_text()
    own = f"    name: 16b\n    too_few_nodes: {policy}\n"
    script.write_text(text.replace("    name: 16b\n", own, 1))
    jobs.gpus.ecc_error("worker-5")
    job = jobs.submit("--nodes=16", script=script, COOKBOOK_ROOT=str(jobs.checkout))
    if policy == "stop":
        assert jobs.cluster.wait(job) == "FAILED", jobs.log(job)
        reason = jobs.status()["reason"]
        assert "not enough healthy nodes, 1 missing (too_few_nodes: stop)" in reason
        assert "worker-5: GPU 3: 2 uncorrectable ECC error(s)" in reason
        assert reason in jobs.log(job) and "Traceback" not in jobs.log(job)
    else:
        jobs.cluster.wait(job, {"PENDING"})
        until(lambda: jobs.cluster.job_field(job, "Restarts") == "1")
        (listed,) = read_excluded(jobs.folder / "runs")
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(listed.until))
        until(lambda: jobs.cluster.job_field(job, "StartTime") == start)
        assert "waits in the queue until " in jobs.log(job)
        # What the message says to do starts it, when the node is well again.
        jobs.gpus.repair("worker-5")
        (jobs.folder / "runs/excluded.yaml").unlink()
        command = f"scontrol update JobId={job} StartTime=now ExcNodeList="
        assert command in jobs.log(job)
        until(lambda: jobs.cluster.job_field(job, "JobState") == "PENDING")
        # Slurm keeps a requeued job back until the nodes have forgotten its last start; one that is
        # told to start sooner may fail at once. A user is slower than that.
        time.sleep(jobs.cluster.settings.requeue_delay + 1)
        jobs.cluster.run(command)
        assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    assert all(restart == 1 for restart, _ in jobs.trained_on())


@pytest.mark.nightly
def test_a_node_that_does_not_answer_is_a_failed_node(jobs: Jobs) -> None:
    pid = jobs.cluster.pid("worker-2")
    (slurmd,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    # The task on worker-1 never ends.
    jobs.gpus.before_python("worker-1", 'case "$*" in *node_report*) sleep 1000 ;; esac')
    job = jobs.submit("--nodes=5", "--exclude=worker-0")
    jobs.cluster.wait(job, {"RUNNING"})
    os.kill(slurmd, signal.SIGSTOP)
    try:
        until(lambda: len(jobs.left_out()) == 2)
        until(lambda: jobs.cluster.job_field(job, "Restarts") == "1")
    finally:
        # Slurm 22.05 forgets the GPUs of a job that starts again while such a node still ends it.
        os.kill(slurmd, signal.SIGCONT)
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    found = jobs.left_out()
    assert "no answer in 30 s" in found["worker-1"]
    assert "Socket timed out" in found["worker-2"]
    nodes = [f"worker-{number}" for number in range(3, 8)]
    assert [node for _, node in jobs.trained_on()] == nodes


def test_a_node_with_other_packages_or_no_shared_folder(jobs: Jobs) -> None:
    other = jobs.folder / "other"
    about = other / "torch-9.9.9.dist-info/METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    jobs.gpus.before_python("worker-1", f"export PYTHONPATH={other}:$PYTHONPATH")
    runs = jobs.folder / "runs"
    runs.mkdir()
    inside = ["nsenter", f"--target={jobs.cluster.pid('worker-5')}", "--mount"]
    mount = ["mount", "-o", "bind,ro", str(runs), str(runs)]
    subprocess.run([*inside, *mount], check=True)
    try:
        job = jobs.submit("--nodes=8")
        assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    finally:
        subprocess.run([*inside, "umount", str(runs)], check=True)
    found = jobs.left_out()
    assert found.keys() == {"worker-1", "worker-5"}
    assert found["worker-1"].startswith("torch is 9.9.9, elsewhere ")
    assert "cannot write to " in found["worker-5"]
    assert "excluded for 1 h" in jobs.log(job)


def test_a_node_that_slurm_drains_meanwhile_is_left_out(jobs: Jobs) -> None:
    # As Soperator's health check does while a job starts.
    drain = "scontrol update NodeName=worker-1 State=DRAIN Reason='[node_problem] hc_xid 79'"
    jobs.gpus.before_python("worker-0", f'case "$*" in *cookbook.supervise\\ *) {drain} ;; esac')
    job = jobs.submit("--nodes=2")
    try:
        assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    finally:
        jobs.cluster.run("scontrol update NodeName=worker-1 State=RESUME")
    assert "worker-1: Slurm: " in jobs.log(job) and "[node_problem] hc_xid 79" in jobs.log(job)
    assert "worker-1" not in {node for _, node in jobs.trained_on()}
    # Slurm knows it by itself.
    assert jobs.left_out() == {}


@pytest.mark.nightly
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
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    assert jobs.trained_on() == [(0, "worker-0"), (0, "worker-1")]
    assert jobs.left_out() == {}
