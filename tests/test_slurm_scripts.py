"""The checked-in scripts on a real Slurm cluster: what reaches torchrun on 32 nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.config.options import argv_of
from cookbook.config.recipe import load_recipe
from cookbook.config.stack import load_stack
from tests.programs import PYTHON, write_program
from tests.recording_torchrun import TorchrunRecord, install_recording_torchrun, read_records
from tests.slurm_cluster import SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parent.parent
# The recipes' EP 32 does not divide the ranks of a few nodes.
EP_8 = "--parallelism.expert_parallel_degree=8"
FIRST_CELL = {"train_671b.sh": "671b-bf16-standard", "train_16b.sh": "16b-bf16-standard"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A virtual environment whose torchrun writes down how it was started, and folders."""
    binaries = tmp_path / "venv" / "bin"
    install_recording_torchrun(binaries)
    write_program(binaries / "python", PYTHON)
    return {
        "VENV": str(tmp_path / "venv"),
        "COOKBOOK_RUNS": str(tmp_path / "runs"),
        "TORCHRUN_RECORDS": str(tmp_path / "records"),
    }


@pytest.fixture(autouse=True)
def _left_idle(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.cancel_all()


def _records(environment: dict[str, str]) -> list[TorchrunRecord]:
    return read_records(Path(environment["TORCHRUN_RECORDS"]))


def _log(folder: Path, job_id: str) -> str:
    return "\n".join(path.read_text() for path in folder.glob(f"*{job_id}*.log"))


@pytest.mark.parametrize("script", FIRST_CELL)
def test_sbatch_gets_32_nodes_with_8_gpus_and_one_torchrun_each(
    slurm: SlurmCluster,
    environment: dict[str, str],
    tmp_path: Path,
    checkout: Path,
    script: str,
) -> None:
    # From another folder, as a user may: the log is there, the run where it belongs.
    job = slurm.submit(
        checkout / script,
        "--training.steps=5",
        "--job.description=a 'b' $(touch c)",
        cwd=tmp_path,
        env=environment,
    )
    assert slurm.wait(job) == "COMPLETED", _log(tmp_path, job)
    records = _records(environment)
    assert {record.node for record in records} == {f"worker-{number}" for number in range(32)}
    assert len(records) == 32
    for record in records:
        assert record.environment["SLURM_GPUS_ON_NODE"] == "8"
        assert record.environment["SLURM_NTASKS"] == "32"
        assert record.environment["SLURM_CPUS_PER_TASK"] == "128"
        assert record.cwd == str(checkout)
        assert str(checkout) in record.environment["PYTHONPATH"].split(":")
    # The same words on every node, and with them the same rendezvous.
    assert len({tuple(record.argv) for record in records}) == 1
    first = records[0]
    assert first.option("--nnodes") == "32"
    assert first.option("--nproc-per-node") == "8"
    assert first.option("--rdzv-backend") == "c10d"
    assert first.option("--rdzv-id") == f"{job}_attempt-0_{FIRST_CELL[script]}"
    host, _, port = first.option("--rdzv-endpoint").rpartition(":")
    assert host and 1024 < int(port) < 32768
    options = first.argv[first.argv.index("torchtitan.train") + 1 :]
    assert options[-2:] == ["--training.steps=5", "--job.description=a 'b' $(touch c)"]
    assert not (tmp_path / "c").exists() and not (checkout / "c").exists()
    # The recipe's own options are all there, before the user's.
    name = {"train_671b.sh": "deepseek_v3_671b", "train_16b.sh": "deepseek_v3_16b"}[script]
    settings = load_recipe(name).settings
    for word in argv_of(load_stack(), settings):
        assert word in options
    cell = tmp_path / "runs" / script[6:-3] / FIRST_CELL[script]
    assert f"--job.dump_folder={cell}" in options
    assert (cell / "attempt-0" / "train.log").is_file()
    # Started by hand, it is a run like any other.
    assert _submit_py(slurm, environment, "status").split()[:5] == [
        cell.parent.name,
        "(slurm)",
        cell.name,
        "finished",
        "job",
    ]
    (shown,) = json.loads(_submit_py(slurm, environment, "report", "--format", "json"))["cells"]
    assert shown["recipe"] == name and shown["published_tokens_per_second_per_gpu"] is None


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"PRECISION": "fp4"}, [], "PRECISION: found 'fp4', allowed: bf16, float8, mxfp8"),
        ({}, ["--training.step=5"], "has no option 'training.step'; nearest: training.steps"),
    ],
)
def test_wrong_input_ends_the_job_before_any_torchrun(
    slurm: SlurmCluster,
    environment: dict[str, str],
    tmp_path: Path,
    checkout: Path,
    changes: dict[str, str],
    arguments: list[str],
    message: str,
) -> None:
    job = slurm.submit(
        checkout / "train_671b.sh",
        *arguments,
        options=["--nodes=2"],
        cwd=tmp_path,
        env={**environment, **changes},
    )
    assert slurm.wait(job) == "FAILED"
    assert slurm.job_field(job, "ExitCode") == "2:0"
    log = _log(tmp_path, job)
    assert message in log and "Traceback" not in log
    assert _records(environment) == []
    assert not (tmp_path / "runs").exists()


def test_a_requeued_job_is_a_new_attempt_with_a_new_rendezvous_id(
    slurm: SlurmCluster, environment: dict[str, str], tmp_path: Path, checkout: Path
) -> None:
    job = slurm.submit(
        checkout / "train_16b.sh",
        EP_8,
        options=["--nodes=2"],
        cwd=tmp_path,
        env={**environment, "TORCHRUN_SECONDS": "120"},
    )
    _until_started(slurm, environment, 2)
    slurm.requeue(job)
    _until_started(slurm, environment, 4)
    records = _records(environment)
    assert [(record.attempt, record.option("--rdzv-id")) for record in records] == [
        (0, f"{job}_attempt-0_16b-bf16-standard"),
        (0, f"{job}_attempt-0_16b-bf16-standard"),
        (1, f"{job}_attempt-1_16b-bf16-standard"),
        (1, f"{job}_attempt-1_16b-bf16-standard"),
    ]
    # The checkpoints' folder stays, the attempt's is new.
    words = [[word for word in record.argv if "dump_folder" in word] for record in records]
    assert words[0] == words[3]
    assert "--metrics.save_tb_folder=attempt-0/tb" in records[0].argv
    assert "--metrics.save_tb_folder=attempt-1/tb" in records[3].argv


def test_a_job_that_gets_a_few_variables_hands_all_of_its_own_to_the_ranks(
    slurm: SlurmCluster, environment: dict[str, str], tmp_path: Path, checkout: Path
) -> None:
    needed = ("PATH", "SLURM_CONF", "COOKBOOK_PREFLIGHT")
    few = environment | {name: slurm.env[name] for name in needed}
    export = ",".join(f"{name}={value}" for name, value in few.items())
    options = ["--nodes=2", f"--export={export}"]
    job = slurm.submit(checkout / "train_16b.sh", EP_8, options=options, cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED", _log(tmp_path, job)
    records = _records(environment)
    assert ["COOKBOOK_ATTEMPT_DIR" in record.environment for record in records] == [True, True]


def _submit_py(slurm: SlurmCluster, environment: dict[str, str], *words: str) -> str:
    command = (sys.executable, str(ROOT / "submit.py"), *words)
    return slurm.run(*command, env={**environment, "VENV": sys.prefix}).stdout


def _until_started(slurm: SlurmCluster, environment: dict[str, str], count: int) -> None:
    until(lambda: len(_records(environment)) >= count, log=lambda: slurm.log_tail("slurmctld"))
