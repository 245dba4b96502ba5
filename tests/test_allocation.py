"""Cells that share an allocation: what is said of those that wait, run, and come to no turn."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cookbook.run.folder import CellFolder
from cookbook.run.slurm import JobInfo
from cookbook.run.states import COMPLETING, merge_shared_job_state
from cookbook.run.status import (
    CANCELLED,
    FAILED,
    QUEUED,
    Status,
    read_status,
    write_job,
    write_status,
)
from cookbook.supervise import supervisor
from cookbook.supervise.supervisor import Supervisor

TURN = "waits for its turn in the allocation"
OVER = "the allocation ended before its turn (Slurm: "


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
        ((CANCELLED, "before it started", None), ("COMPLETING", "", 0), (QUEUED, COMPLETING)),
        ((FAILED, "Slurm: PREEMPTED", 1.0), ("COMPLETING", "", 0), ("running", COMPLETING)),
        ((FAILED, "Slurm: PREEMPTED", 1.0), ("PENDING", "BeginTime", 1), (QUEUED, "BeginTime")),
        ((CANCELLED, "before it started", None), ("RUNNING", "", 1), (QUEUED, TURN)),
        # The allocation is over: of what ran Slurm says why, and what waited has done nothing.
        (("running", None, 1.0), ("TIMEOUT", "TimeLimit", 0), (FAILED, "Slurm: TIMEOUT TimeLimit")),
        (
            (QUEUED, None, None),
            ("TIMEOUT", "TimeLimit", 0),
            (CANCELLED, f"{OVER}TIMEOUT TimeLimit"),
        ),
        ((QUEUED, None, None), ("NODE_FAIL", "", 0), (CANCELLED, f"{OVER}NODE_FAIL)")),
        ((FAILED, "exit status 3", 1.0), ("TIMEOUT", "", 1), (CANCELLED, f"{OVER}TIMEOUT)")),
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
    found, why = merge_shared_job_state(
        Status(state, reason=reason, started=started), JobInfo(*said)
    )
    assert found == expected[0]
    assert why == expected[1] or (expected[1] and (why or "").startswith(expected[1]))


@pytest.mark.parametrize(
    ("told", "state", "reason"),
    [
        ((CANCELLED, "SIGTERM"), CANCELLED, "cancelled before it started"),
        ((FAILED, "Slurm: TIMEOUT"), CANCELLED, f"{OVER}TIMEOUT)"),
        ((FAILED, "Slurm: NODE_FAIL"), CANCELLED, f"{OVER}NODE_FAIL)"),
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
    for name in ("SLURM_JOB_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(supervisor, "stop_reason", lambda name, began: told)
    cells = [CellFolder(tmp_path / "run" / name) for name in ("waits", "failed before")]
    for cell, before in zip(cells, (Status(QUEUED), Status(FAILED, 3, "x", 1, 5.0)), strict=True):
        cell.path.mkdir(parents=True)
        write_status(cell, before)
    job = Supervisor(cells)
    job.signal_number = signal.SIGTERM
    job.supervise()
    waits, failed = map(read_status, cells)
    assert (waits.state, waits.reason) == (state, reason)
    if state == CANCELLED:
        assert (waits.restarts, waits.started) == (2, None)
        # The attempts of an earlier start of the job are still its own.
        assert (failed.state, failed.reason, failed.attempt, failed.started) == (
            state,
            reason,
            3,
            5.0,
        )
    else:
        assert failed == Status(FAILED, 3, "x", 1, 5.0)


def test_a_job_that_nobody_noted_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    cell = CellFolder(tmp_path / "run" / "cell")
    cell.path.mkdir(parents=True)
    write_status(cell, Status(QUEUED))
    write_job(cell, "2")
    # Without a record, a turn would end with another status.
    assert Supervisor([cell]).supervise() == 1
    assert read_status(cell) == Status(QUEUED)
    # Nor does it say how the cell ended when it is told to stop.
    told = Supervisor([cell])
    told.signal_number = signal.SIGTERM
    assert told.supervise() == 128 + signal.SIGTERM
    assert read_status(cell) == Status(QUEUED)
