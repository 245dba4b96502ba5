"""Verbs beside a real Slurm: an sbatch line is validated, waiting and orphaned jobs are found."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.base.yamlfile import Words
from cookbook.cli.main import main
from cookbook.config.cell import Cell
from cookbook.launch.submit import create_run, submit_run
from cookbook.run.run import release_submit_locks
from cookbook.run.status import FAILED, Status, write_status
from tests.saved import save
from tests.slurm_cluster import SlurmCluster
from tests.slurm_states import one_node_cell
from tests.submit import ROOT
from tests.test_check_line import check_line
from tests.waiting import HANG_S

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("two_nodes")]


def held_cell(folder: Path) -> Cell:
    cell = one_node_cell(folder)
    return replace(cell, cluster=replace(cell.cluster, sbatch=Words({"hold": True})))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ([], ""),
        (["--nodes=64"], "configuration is not available"),
        (["--partition=nowhere"], "invalid partition"),
    ],
)
def test_check_line_asks_slurm(
    slurm: SlurmCluster, checkout: Path, options: list[str], refusal: str
) -> None:
    done = check_line(checkout, "sbatch", *options, "train_671b.sh")
    assert done.returncode == (1 if refusal else 0), done.stderr
    assert ("sbatch refuses it: " in done.stderr) == bool(refusal) and refusal in done.stderr
    assert refusal or "checked: the rules, this environment, Slurm" in done.stderr
    assert not slurm.run("squeue", "--noheader").stdout


def test_status_shows_what_waits_for_plain_sbatch(
    slurm: SlurmCluster, checkout: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = checkout / "train_16b.sh"
    job = slurm.submit(script, "--training.steps=5", options=["--hold"], cwd=tmp_path)
    slurm.run("sbatch", "--hold", "--wrap=sleep 9", cwd=tmp_path)
    assert main(["status"]) == 0
    expected = f"pending, submitted by sbatch {script} --training.steps=5: job {job}: JobHeldUser\n"
    assert capsys.readouterr().out == expected


def test_a_job_whose_run_was_deleted_is_cancelled(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = held_cell(tmp_path)
    runs = [create_run("lost", [held]) for _ in range(2)]
    jobs = [submit_run(run, [held])[0] for run in runs]
    shutil.rmtree(runs[0].folder)
    assert main(["cancel", runs[0].name]) == 0
    assert "its folder was deleted" in capsys.readouterr().out
    slurm.wait(jobs[0], {"CANCELLED"})
    assert slurm.job_field(jobs[1], "JobState") == "PENDING"


def test_of_several_resumes_at_the_same_moment_one_submits(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    run = create_run("mine", [held_cell(tmp_path)])
    release_submit_locks()
    write_status(run.cells[0], Status(FAILED, 0, "a node was lost", 1))
    save(run.cells[0].path / "checkpoint", 4, readers=1)
    words = [sys.executable, str(ROOT / "submit.py"), "run", "--resume", run.name, "--detach"]
    words.append("--set=checkpoint.enable=true")
    resumes = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    refusals = [resume.communicate(timeout=HANG_S)[1] for resume in resumes]
    assert sorted(resume.returncode for resume in resumes) == [0, 2, 2], refusals
    said = "submits its cells; wait until it is done\n", "is queued; wait for its end, or: "
    assert sum(any(words in text for words in said) for text in refusals) == 2, refusals
    assert len(slurm.run("squeue", "--noheader").stdout.splitlines()) == 1
