"""The checked-in scripts on a real Slurm cluster: what reaches torchrun on 32 nodes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.config.dialect.argv import argv_of
from cookbook.config.recipe import load_recipe
from cookbook.config.stack import load_stack
from tests.gpu_nodes import EP_8, GpuNodes, Jobs
from tests.slurm_cluster import SlurmCluster
from tests.submit import ROOT

pytestmark = pytest.mark.slurm

RECIPES = {"train_671b.sh": "deepseek_v3_671b", "train_16b.sh": "deepseek_v3_16b"}


@pytest.fixture
def jobs(slurm: SlurmCluster, checkout: Path, tmp_path: Path) -> Iterator[Jobs]:
    yield Jobs(
        slurm, checkout, tmp_path, GpuNodes.install(tmp_path / "gpus", tmp_path / "venv/bin")
    )
    slurm.cancel_all()


@pytest.mark.parametrize("script", RECIPES)
def test_sbatch_gets_32_nodes_with_8_gpus_and_one_torchrun_each(
    jobs: Jobs, tmp_path: Path, script: str
) -> None:
    # From another folder, as a user may: the log is there, the run where it belongs.
    words = ("--training.steps=5", "--job.description=a 'b' $(touch c)")
    submitted = jobs.checkout / script
    job = jobs.cluster.submit(submitted, *words, cwd=tmp_path, env=jobs.environment)
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    assert "cookbook: preflight: 32 healthy node(s) (" in jobs.log(job)
    records = jobs.records()
    assert {record.node for record in records} == {f"worker-{number}" for number in range(32)}
    assert len(records) == 32
    for record in records:
        assert record.environment["SLURM_GPUS_ON_NODE"] == "8"
        assert record.environment["SLURM_NTASKS"] == "32"
        assert record.environment["SLURM_CPUS_PER_TASK"] == "128"
        assert record.cwd == str(jobs.checkout)
        # What the run's folder carries.
        assert f"{tmp_path}/runs/{script[6:-3]}/code/" in record.environment["PYTHONPATH"]
    # The same words on every node, and with them the same rendezvous.
    assert len({tuple(record.argv) for record in records}) == 1
    first = records[0]
    size = script[6:-3]
    assert (first.option("--nnodes"), first.option("--nproc-per-node")) == ("32", "8")
    assert first.option("--rdzv-id") == f"{job}_attempt-0_{size}-bf16-standard"
    options = first.argv[first.argv.index("torchtitan.train") + 1 :]
    assert set(words) <= set(options)
    assert not (tmp_path / "c").exists() and not (jobs.checkout / "c").exists()
    # The recipe's own options are all there, but for what the user's replace.
    own = set(argv_of(load_stack(), load_recipe(RECIPES[script]).settings))
    assert {word.partition("=")[0] for word in own - set(options)} <= {"--training.steps"}
    cell = tmp_path / "runs" / size / f"{size}-bf16-standard"
    assert f"--job.dump_folder={cell}" in options
    assert (cell / "attempt-0" / "train.log").is_file()

    def submit(*words: str) -> str:
        environment = {**jobs.environment, "VENV": sys.prefix}
        return jobs.cluster.run(sys.executable, ROOT / "submit.py", *words, env=environment).stdout

    # Started by hand, it is a run like any other.
    assert submit("status").split()[:4] == [size, "(slurm)", cell.name, "finished"]
    (shown,) = json.loads(submit("report", "--format", "json"))["cells"]
    assert shown["recipe"] == RECIPES[script]
    assert shown["published_tokens_per_second_per_gpu"] is None


def test_a_job_that_gets_a_few_variables_hands_all_of_its_own_to_the_ranks(
    jobs: Jobs, tmp_path: Path
) -> None:
    few = {name: jobs.cluster.env[name] for name in ("PATH", "SLURM_CONF")} | jobs.environment
    # Of the job that the calling shell is in; each ends the step, or starves it.
    few |= {"SLURM_MEM_PER_CPU": "1", "SLURM_NTASKS_PER_GPU": "3", "SQUEUE_STATES": "PENDING"}
    export = ",".join(f"{name}={value}" for name, value in few.items())
    options = ["--nodes=2", f"--export={export}"]
    script = jobs.checkout / "train_16b.sh"
    job = jobs.cluster.submit(script, EP_8, options=options, cwd=tmp_path)
    assert jobs.cluster.wait(job) == "COMPLETED", jobs.log(job)
    assert ["COOKBOOK_ATTEMPT_DIR" in one.environment for one in jobs.records()] == [True, True]
