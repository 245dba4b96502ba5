"""The state of a cell from its files and its processes, or a stand-in for Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cookbook.base.errors import JobError
from cookbook.base.paths import ROOT
from cookbook.cli import follow as watching
from cookbook.cli.main import main
from cookbook.run.run import Run, read_run
from cookbook.run.states import (
    RUN_VARIABLE,
    CellState,
    cancel_run,
    cell_states,
    is_alive,
    process_job,
)
from cookbook.run.status import (
    FAILED,
    QUEUED,
    RUNNING,
    Job,
    Status,
    read_job,
    write_job,
    write_status,
)
from cookbook.supervise.exits import stop_reason
from tests.programs import write_program

# As squeue behaves: it shows the jobs of all users but with --me; one unknown id alone is an error.
_SQUEUE = """\
#!/bin/bash
if [[ ! -e "{jobs}" ]]; then
  echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
[[ " $* " != *" --me "* ]] || exit 0
if [[ " $* " == *" --jobs=4711 "* && ! -s "{jobs}" ]]; then
  echo "slurm_load_jobs error: Invalid job id specified" >&2
  exit 1
fi
cat "{jobs}"
"""


class Slurm:
    """A stand-in for squeue, which says of job 4711 what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.jobs = folder / "jobs"
        program = folder / "bin" / "squeue"
        write_program(program, _SQUEUE.format(jobs=self.jobs))
        self.path = str(program.parent)

    def says(self, state: str, reason: str = "None", restarts: int = 0) -> None:
        self.jobs.write_text(f"{'4711':64}|{state:64}|{reason:64}|{restarts:<64}|\n")

    def forgets(self) -> None:
        self.jobs.write_text("")

    def is_away(self) -> None:
        self.jobs.unlink(missing_ok=True)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{slurm.path}:/usr/bin:/bin")
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of one cell, whose job is 4711."""
    return _run(tmp_path, "slurm", Status(RUNNING, started=1.0))


def _run(tmp_path: Path, scheduler: str, status: Status, job: str | None = "4711") -> Run:
    folder = tmp_path / "runs" / "r-20261121-120000"
    (folder / "a").mkdir(parents=True)
    record = {"run": folder.name, "scheduler": scheduler, "cells": ["a"]}
    (folder / "run.json").write_text(json.dumps(record))
    run = read_run(folder)
    write_status(run.cells[0], status)
    if job:
        write_job(run.cells[0], job)
    return run


def only(run: Run) -> CellState:
    (state,) = cell_states(run)
    return state


@pytest.mark.parametrize(
    ("word", "said", "expected"),
    [
        # What the job wrote and after how many requeues; Slurm's state, reason and count.
        (("queued", 0), ("PENDING", "Resources", 0), ("queued", "Resources")),
        (("queued", 0), ("RUNNING", "None", 0), ("running", None)),
        (("running", 0), ("RUNNING", "None", 0), ("running", None)),
        # They wait to be released.
        (("failed", 0), ("SPECIAL_EXIT", "JobHeldUser", 1), ("queued", "JobHeldUser")),
        (("queued", 0), ("RESV_DEL_HOLD", "Reservation", 0), ("queued", "Reservation")),
        (("cancelled", 0), ("COMPLETING", "None", 0), ("running", "Slurm: COMPLETING")),
        (("cancelled", 0), ("COMPLETING", "None", 1), ("queued", "requeued")),
        (("failed", 0), ("RUNNING", "None", 1), ("running", None)),
        (("failed", 0), ("FAILED", "NonZeroExitCode", 0), ("failed", "its own words")),
        (("failed", 0), ("FAILED", "NonZeroExitCode", 1), ("failed", "Slurm: FAILED NonZero")),
        (("failed", 0), ("TIMEOUT", "TimeLimit", 0), ("failed", "Slurm: TIMEOUT TimeLimit")),
        (("running", 0), ("NODE_FAIL", "None", 0), ("failed", "Slurm: NODE_FAIL")),
        # A disk that is full when the supervisor ends makes Slurm's exit status a lie.
        (("finished", 0), ("FAILED", "NonZeroExitCode", 0), ("finished", "its own words")),
    ],
)
def test_a_state_follows_from_both_and_stays_when_slurm_forgets(
    slurm: Slurm,
    run: Run,
    word: tuple[str, int],
    said: tuple[str, str, int],
    expected: tuple[str, str | None],
) -> None:
    state, restarts = word
    reason = "its own words" if state in ("failed", "finished") else None
    write_status(run.cells[0], Status(state, reason=reason, restarts=restarts))
    slurm.says(*said)
    found = only(run)
    assert found.state == expected[0] and found.is_known
    assert (found.reason or "").startswith(expected[1] or "")
    assert bool(found.reason) == bool(expected[1])
    assert found.has_ended == (expected[0] in ("finished", "failed", "cancelled"))
    if found.has_ended:
        slurm.forgets()
        assert only(run) == found
        slurm.is_away()
        assert only(run) == found


def test_a_slurm_that_does_not_answer_ends_nothing(slurm: Slurm, run: Run) -> None:
    slurm.is_away()
    for state in ("running", "failed", "cancelled"):
        write_status(run.cells[0], Status(state))
        found = only(run)
        assert (found.state, found.is_known, found.has_ended) == (state, False, False)
        assert "(squeue: slurm_load_jobs error: Unable to contact" in (found.reason or "")
    with pytest.raises(JobError, match="nothing was cancelled"):
        cancel_run(run)
    write_status(run.cells[0], Status("finished"))
    assert only(run).has_ended


def test_another_users_job_is_seen(slurm: Slurm, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    slurm.says("RUNNING")
    assert only(run).state == "running"
    # Where Slurm hides the jobs of others, it does not mean that this one is gone.
    slurm.forgets()
    found = only(run)
    assert found.state == "unknown" and "the job said running" in (found.reason or "")


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_cell_that_nobody_submits_does_not_wait_for_ever(
    slurm: Slurm,
    tmp_path: Path,
    scheduler: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = _run(tmp_path, scheduler, Status(QUEUED), job=None)
    slurm.forgets()
    command = (
        "import sys, time; from pathlib import Path;"
        "from cookbook.run.run import take_submit_lock;"
        "take_submit_lock(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", command, str(run.folder)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as submitter:
        assert submitter.stdout is not None
        submitter.stdout.readline()
        assert only(run).state == "queued"
        # A second one does not submit them too.
        monkeypatch.setenv("COOKBOOK_RUNS", str(run.folder.parent))
        assert main(["run", "--resume", run.name]) == 2
        holder = f"process {submitter.pid} on {socket.gethostname()} submits its cells"
        assert holder in capsys.readouterr().err
        submitter.kill()
        submitter.wait()
        found = only(run)
        assert found.state == "failed" and "never submitted" in (found.reason or "")


def local_run(folder: Path, state: str = RUNNING) -> tuple[Run, psutil.Popen]:
    """A run on this machine, whose job is a process that waits."""
    run = _run(folder, "local", Status(state, started=time.time()), job=None)
    process = psutil.Popen(["sleep", "60"], env=os.environ | {RUN_VARIABLE: str(run.folder)})
    write_job(run.cells[0], process_job(process.pid))
    return run, process


def test_a_local_job_runs_as_long_as_its_process(tmp_path: Path) -> None:
    # The folder of runs is a link, as to scratch.
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    run, process = local_run(tmp_path / "link")
    try:
        assert (only(run).state, only(run).reason) == (RUNNING, None)
        job = json.loads(run.cells[0].job.read_text())
        # After a restart of the machine, or in time, another process has its id.
        for other in ({"boot": "another"}, {"started": "1"}):
            run.cells[0].job.write_text(json.dumps(job | other))
            assert not is_alive(read_job(run.cells[0]) or Job("1"))
        run.cells[0].job.write_text(json.dumps(job))
    finally:
        process.kill()
        # Ended, but not yet waited for: a zombie, as after the driver's own child.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = only(run)
        process.wait()
    assert found.state == FAILED
    assert found.reason == f"process {process.pid} is gone: killed, or the machine was restarted"


def test_a_run_of_another_machine_is_neither_dead_nor_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, process = local_run(tmp_path)
    process.kill()
    process.wait()
    job = json.loads(run.cells[0].job.read_text())
    run.cells[0].job.write_text(json.dumps(job | {"host": "node-7"}))
    found = only(run)
    assert (found.state, found.is_known, found.has_ended) == (RUNNING, False, False)
    assert found.reason and found.reason.startswith("runs on node-7")
    monkeypatch.setenv("COOKBOOK_RUNS", str(run.folder.parent))
    assert main(["cancel"]) == 1 and main(["run", "--resume", run.name]) == 2
    assert capsys.readouterr().err.count("runs on node-7") == 2
    # The end that the job wrote is known everywhere.
    write_status(run.cells[0], Status("finished"))
    assert only(run).has_ended


def test_a_run_whose_folder_was_deleted_is_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, process = local_run(tmp_path)
    monkeypatch.setenv("COOKBOOK_RUNS", str(run.folder.parent))
    shutil.rmtree(run.folder)
    with pytest.raises(JobError, match=f"deleted.*cancel {run.name}"):
        watching.watch_run(run)
    assert not run.folder.exists() and process.poll() is None
    assert main(["cancel", run.name]) == 0
    assert process.wait(10) == -signal.SIGTERM
    assert "its folder was deleted" in capsys.readouterr().out
    assert main(["cancel", run.name]) == 2


@pytest.mark.parametrize(
    ("words", "state"),
    [
        # Every state of squeue's manual that the table above lacks, and one of Slurm 25.11.
        ("CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD EXPEDITING", "queued"),
        ("RESIZING SIGNALING STAGE_OUT SUSPENDED STOPPED", "running"),
        ("BOOT_FAIL DEADLINE OUT_OF_MEMORY PREEMPTED REVOKED", "failed"),
    ],
)
def test_each_other_state_of_slurm(slurm: Slurm, run: Run, words: str, state: str) -> None:
    for word in words.split():
        slurm.says(word)
        found = only(run)
        assert (found.state, found.has_ended) == (state, state == "failed"), word
        # Only an end is kept for when Slurm has forgotten the job.
        assert run.cells[0].end.exists() is (state == "failed"), word
        is_told = state == "failed" or word in ("SUSPENDED", "STOPPED")
        assert (f"Slurm: {word}" in (found.reason or "")) is is_told


def test_a_job_that_nobody_knows_any_more_has_ended(slurm: Slurm, run: Run) -> None:
    slurm.forgets()
    for state in (QUEUED, RUNNING):
        write_status(run.cells[0], Status(state))
        found = only(run)
        assert (found.state, found.has_ended) == ("failed", True)
        assert found.reason == "job 4711 is gone, and neither Slurm nor the job said how it ended"


LINE = "slurmstepd-worker-0: error: *** JOB 2 ON worker-0 CANCELLED AT {at}{why} ***\n"


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("", ("cancelled", "SIGTERM")),
        (" DUE TO TIME LIMIT", ("failed", "Slurm: TIMEOUT")),
        (" DUE TO JOB REQUEUE", ("queued", "requeued")),
        (" DUE TO PREEMPTION", ("failed", "Slurm: PREEMPTED")),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", ("failed", "Slurm: NODE_FAIL")),
    ],
)
def test_why_slurm_stopped_a_job(tmp_path: Path, why: str, expected: tuple[str, str]) -> None:
    now = time.time()
    times = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now - ago)) for ago in (500, 0)]
    log = tmp_path / "job.log"
    # The log of a requeued job holds that of its earlier attempts.
    earlier = LINE.format(at=times[0], why=" DUE TO JOB REQUEUE")
    log.write_text(earlier + "step 1\n" + LINE.format(at=times[1], why=why) + "srun: got SIGCONT\n")
    assert stop_reason("SIGTERM", now - 100, log) == expected
    log.write_text(earlier)
    assert stop_reason("SIGTERM", now - 100, log) == ("cancelled", "SIGTERM")
    assert stop_reason("SIGTERM", now, tmp_path / "none") == ("cancelled", "SIGTERM")
