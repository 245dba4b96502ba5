"""The state of a cell from its files and processes, or a stand-in for Slurm; shared allocations."""

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
from cookbook.run import own_job
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.run import Run, read_run
from cookbook.run.slurm import JobInfo
from cookbook.run.states import (
    COMPLETING,
    RUN_VARIABLE,
    CellState,
    cancel_run,
    cell_states,
    is_alive,
    merge_slurm_state,
    process_job,
)
from cookbook.run.status import (
    CANCELLED,
    FAILED,
    QUEUED,
    RUNNING,
    Job,
    Status,
    read_job,
    read_status,
    write_job,
    write_status,
)
from cookbook.supervise.supervisor import Supervisor
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


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("CANCELLED by 1000", ("cancelled", None)),
        ("TIMEOUT", ("failed", "Slurm: TIMEOUT exit code 0:1")),
    ],
)
def test_accounting_knows_a_job_that_slurm_forgot(
    slurm: Slurm, run: Run, word: str, expected: tuple[str, str | None]
) -> None:
    slurm.forgets()
    lines = f"a word of warning\n4711|{word}|0:1\n4712|COMPLETED|0:0\n"
    write_program(Path(slurm.path) / "sacct", f"#!/bin/sh\nprintf '{lines}'\n")
    assert (only(run).state, only(run).reason) == expected


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
    earlier = LINE.format(at=times[0], why=" DUE TO JOB REQUEUE")
    log.write_text(earlier + "step 1\n" + LINE.format(at=times[1], why=why) + "srun: got SIGCONT\n")
    assert own_job.stop_reason("SIGTERM", now - 100, log) == expected
    log.write_text(earlier)
    assert own_job.stop_reason("SIGTERM", now - 100, log) == ("cancelled", "SIGTERM")
    assert own_job.stop_reason("SIGTERM", now, tmp_path / "none") == ("cancelled", "SIGTERM")


TURN = "waits for its turn in the allocation"


@pytest.mark.parametrize(
    ("word", "said", "expected"),
    [
        # The cell's state, its reason and start; Slurm's state, reason and count of requeues.
        ((QUEUED, None, None), ("PENDING", "Priority", 0), (QUEUED, "Priority")),
        ((QUEUED, None, None), ("RUNNING", "", 0), (QUEUED, TURN)),
        (("running", None, 1.0), ("RUNNING", "", 0), ("running", None)),
        # One that has ended by itself has, whatever its job does.
        (("finished", None, 1.0), ("RUNNING", "", 0), ("finished", None)),
        ((FAILED, "exit status 3", 1.0), ("RUNNING", "", 0), (FAILED, "exit status 3")),
        ((FAILED, "exit status 3", 1.0), ("PENDING", "BeginTime", 1), (QUEUED, "BeginTime")),
        # What ended with the job may come back with it.
        ((CANCELLED, "SIGTERM", 1.0), ("COMPLETING", "", 0), ("running", COMPLETING)),
        ((FAILED, "Slurm: PREEMPTED", 1.0), ("COMPLETING", "", 0), ("running", COMPLETING)),
        ((FAILED, "Slurm: PREEMPTED", 1.0), ("PENDING", "BeginTime", 1), (QUEUED, "BeginTime")),
        ((CANCELLED, "before it started", None), ("RUNNING", "", 1), (QUEUED, TURN)),
        # The allocation is over: of what ran Slurm says why, and what waited has done nothing.
        (("running", None, 1.0), ("TIMEOUT", "TimeLimit", 0), (FAILED, "Slurm: TIMEOUT TimeLimit")),
        ((QUEUED, None, None), ("NODE_FAIL", "", 0), (FAILED, "Slurm: NODE_FAIL")),
        ((FAILED, "exit status 3", 1.0), ("TIMEOUT", "", 1), (FAILED, "Slurm: TIMEOUT")),
        (("running", None, 1.0), ("CANCELLED", "", 0), (CANCELLED, None)),
        ((CANCELLED, "before it started", None), ("TIMEOUT", "", 0), (CANCELLED, "before it")),
    ],
)
def test_the_state_of_a_cell_in_a_shared_job(
    word: tuple[str, str | None, float | None],
    said: tuple[str, str, int],
    expected: tuple[str, str | None],
) -> None:
    state, reason, started = word
    written = Status(state, reason=reason, started=started)
    found, why = merge_slurm_state(written, JobInfo(*said), is_shared=True)
    assert found == expected[0]
    assert why == expected[1] or (expected[1] and (why or "").startswith(expected[1]))


@pytest.mark.parametrize(
    ("told", "state", "reason"),
    [
        ((CANCELLED, "SIGTERM"), CANCELLED, "cancelled before it started"),
        (
            (FAILED, "Slurm: TIMEOUT"),
            CANCELLED,
            "the allocation ended before its turn (Slurm: TIMEOUT)",
        ),
        # Slurm starts the job again, and what had no turn still waits for it.
        ((QUEUED, "requeued"), QUEUED, None),
    ],
)
def test_what_has_no_turn_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: tuple[str, str],
    state: str,
    reason: str | None,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(own_job, "stop_reason", lambda name, began: told)
    cells = [CellFolder(tmp_path / "run" / name) for name in ("waits", "failed before")]
    before = Status(FAILED, 3, "x", 1, 5.0)
    for cell, status in zip(cells, (Status(QUEUED), before), strict=True):
        cell.path.mkdir(parents=True)
        write_status(cell, status)
    job = Supervisor(cells)
    job.signal_number = signal.SIGTERM
    job.supervise()
    waits, failed = map(read_status, cells)
    assert (waits.state, waits.reason) == (state, reason)
    if state == CANCELLED:
        assert (waits.restarts, waits.started) == (2, None)
        # The attempts of an earlier start of the job are still its own.
        assert (failed.state, failed.attempt, failed.started) == (state, 3, 5.0)
    else:
        assert failed == before


def test_a_job_that_nobody_noted_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    cell = CellFolder(tmp_path / "run" / "cell")
    CellRecord(profile={"scheduler": "slurm"}).write(cell.record)
    write_status(cell, Status(QUEUED))
    write_job(cell, "2")
    # Without a command, a turn would end with another status.
    assert Supervisor([cell]).supervise() == 1
    assert read_status(cell) == Status(QUEUED)
    # Nor does it say how the cell ended when it is told to stop.
    told = Supervisor([cell])
    told.signal_number = signal.SIGTERM
    assert told.supervise() == 128 + signal.SIGTERM
    assert read_status(cell) == Status(QUEUED)
