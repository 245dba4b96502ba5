"""`submit.py` on a real Slurm cluster: TorchTitan, trained in its jobs on the CPU."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster import SlurmCluster, tail
from tests.waiting import until

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parent.parent
# Small steps: what is tested is the way around them.
SMALL = ("--set", "training.seq_len=64")


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path, two_nodes: Path) -> Any:
    """Calls `submit.py` on the test cluster, with a runs folder and a profile of its own."""
    profile = two_nodes
    with profile.open("a") as file:
        file.write('sbatch: {comment: "it\'s a test"}\n')
    environment = {"COOKBOOK_RUNS": str(tmp_path / "runs"), "VENV": sys.prefix}

    def call(*words: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        if words[0] in ("sweep", "run") and "--resume" not in words:
            words = (*words, *SMALL, "--cluster", str(profile), "--nodes", "2")
        command = (sys.executable, str(ROOT / "submit.py"), *words)
        done = slurm.run(*command, check=False, env=environment)
        if check is not None:
            logs = "\n".join(map(tail, sorted((tmp_path / "runs").glob("*/*/job/*.log"))))
            assert done.returncode == check, f"{done.stdout}\n{done.stderr}\n{logs}"
        return done

    call.runs = tmp_path / "runs"  # type: ignore[attr-defined]
    call.environment = environment  # type: ignore[attr-defined]
    call.profile = profile  # type: ignore[attr-defined]
    return call


def _newest(runs: Path) -> Path:
    (folder,) = runs.glob("[!.]*/run.json")
    return folder.parent


def test_a_sweep_trains_in_slurm_jobs_and_agrees_with_slurm(
    slurm: SlurmCluster, submit: Any
) -> None:
    submit("sweep", "smoke", "--set", "training.steps=3")
    report = json.loads(submit("report", "--format", "json").stdout)
    cells = {cell["name"]: cell for cell in report["cells"]}
    for name in ("debug-bf16-standard", "debug-mxfp8-standard"):
        cell = cells[name]
        assert (cell["status"], cell["steps"]) == ("finished", 3) and 5 < cell["final_loss"] < 9
        assert cell["active"]["precision"] == cell["precision"]
        job = json.loads((_newest(submit.runs) / name / "job.json").read_text())["job_id"]
        assert slurm.job_field(job, "JobState") == "COMPLETED"
        assert slurm.job_field(job, "NumNodes") == "2"
        assert job in submit("status").stdout
        # Both nodes trained: a rank's log of each.
        ranks = list((_newest(submit.runs) / name / "attempt-0" / "ranks").glob("*/*/0/stdout.log"))
        assert len(ranks) == 2


def test_the_job_runs_the_bytes_that_render_prints(slurm: SlurmCluster, submit: Any) -> None:
    words = ("debug", "--set", "training.steps=3", *SMALL, "--cluster", str(submit.profile))
    rendered = submit("render", *words, "--nodes", "2").stdout
    submit("run", "debug", "--set", "training.steps=3", "--detach")
    cell = _newest(submit.runs) / "debug-bf16-standard"
    assert (cell / "train.sh").read_text() == rendered
    # What submitit hands to sbatch says the same as the script's own header, but for the log.
    job = json.loads((cell / "job.json").read_text())["job_id"]
    submission = (cell.parent / f"job/{job}_submission.sh").read_text().splitlines()
    header = [line for line in rendered.splitlines() if line.startswith("#SBATCH")]
    submitted = [line for line in submission if line.startswith("#SBATCH")]
    here = re.compile("--(output|chdir)=")
    assert {line for line in header if not here.search(line)} == {
        line for line in submitted if not here.search(line)
    }
    assert slurm.job_field(job, "Comment") == "it's"
    submit("cancel")
    assert slurm.wait(job) == "CANCELLED"


def test_an_enclosing_jobs_variables_do_not_reach_the_new_job(
    slurm: SlurmCluster, submit: Any
) -> None:
    submit.environment |= {"SLURM_NTASKS": "7", "SBATCH_PARTITION": "nowhere"}
    submit("run", "debug", "--detach")
    job = json.loads((_newest(submit.runs) / "debug-bf16-standard" / "job.json").read_text())
    assert slurm.job_field(job["job_id"], "Partition") == "main"


TRAINED = "debug-bf16-standard"
RESUMABLE = (
    "--set=checkpoint.enable=true",
    "--set=checkpoint.last_save_model_only=false",
    "--set=lr_scheduler.decay_ratio=0",
)


def steps_of(runs: Path, attempt: int) -> list[int]:
    logs = list(runs.glob(f"*/{TRAINED}/attempt-{attempt}/train.log"))
    said = "".join(log.read_text() for log in logs)
    return [int(step) for step in re.findall(r"rank0.* step: +(\d+) +loss", said)]


@pytest.mark.nightly
def test_an_ended_run_goes_on_in_another_job(slurm: SlurmCluster, submit: Any) -> None:
    submit("run", "debug", "--set=training.steps=2", *RESUMABLE, "--detach")
    run = _newest(submit.runs)
    more = ("--resume", run.name, "--set", "training.steps=3")
    refused = submit("run", *more, check=2)
    assert re.search(rf"{TRAINED}: is (queued|running); wait for its end", refused.stderr)
    first = json.loads((run / TRAINED / "job.json").read_text())["job_id"]
    assert slurm.wait(first) == "COMPLETED"
    submit("run", *more)
    second = json.loads((run / TRAINED / "job.json").read_text())["job_id"]
    assert int(second) > int(first)
    assert slurm.job_field(second, "JobState") == "COMPLETED"
    assert f"{TRAINED}: attempt 1 continues after step 2" in submit("status").stdout
    (found,) = json.loads(submit("report", "--format", "json").stdout)["cells"]
    assert (found["status"], found["steps"]) == ("finished", 3)
    assert steps_of(submit.runs, 1) == [3]
    # The learning rate keeps the schedule of the steps that were asked for first.
    assert "lr_scheduler.total_steps: 2" in (run / TRAINED / "cell.yaml").read_text()
    assert "training.steps: 2" in (run / TRAINED / "attempt-0/cell.yaml").read_text()


@pytest.mark.nightly
def test_torchtitan_saves_when_slurm_tells_the_job_to_stop(
    slurm: SlurmCluster, submit: Any, tmp_path: Path
) -> None:
    clock = ("--set=checkpoint.interval_minutes=30", "--set=checkpoint.async_mode=async")
    words = ("debug", "--set=training.steps=5", *SMALL, *RESUMABLE, *clock, "--nodes=2")
    script = tmp_path / "mine.sh"
    submit("render", *words, "--cluster", str(submit.profile), "-o", str(script))
    job = slurm.submit(script, cwd=tmp_path, env=submit.environment)
    until(lambda: steps_of(submit.runs, 0))
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, {"COMPLETED", "FAILED"}) == "COMPLETED"
    # Nothing is made twice, and nothing is left out.
    before = steps_of(submit.runs, 0)
    assert len(before) < 5 and before + steps_of(submit.runs, 1) == [1, 2, 3, 4, 5]
    status = submit("status").stdout
    assert "finished" in status and f"attempt 1 continues after step {before[-1]}" in status
