"""How an attempt ended, by its script's status, its signal, and what its ranks left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cookbook.job.__main__ import main as job
from cookbook.job.begin import end
from cookbook.job.ends import ended
from cookbook.job.stop import restarts_after_failure
from cookbook.run.folder import CellFolder
from cookbook.run.history import Cause, read_history
from cookbook.run.status import RUNNING, Status, read_status, write_status


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CellFolder:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    cell = CellFolder(tmp_path / "run" / "cell")
    cell.attempt(0).path.mkdir(parents=True)
    write_status(cell, Status(RUNNING, 0, started=1.0))
    return cell


def told(monkeypatch: pytest.MonkeyPatch, state: str, reason: str) -> None:
    monkeypatch.setattr("cookbook.job.ends.stopped_as", lambda *words: (state, reason))


def test_an_attempt_that_saved_as_asked_has_neither_finished_nor_failed(cell: CellFolder) -> None:
    cell.attempt(0).stopped.write_text("77 12\n")
    for code in (0, 1):
        last, state = ended(cell, 0, 1.0, code)
        assert (last.cause, state) == (Cause.SAVED, "failed")
        assert last.reason == "asked to stop, it saved step 12 and ended"
    end(cell, 2)
    assert "saved step 12 and ended; submit it again" in (read_status(cell).reason or "")


def test_requeued_it_waits_and_cancelled_it_has_ended(
    cell: CellFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.attempt(0).stopped.write_text("77 12\n")
    told(monkeypatch, "queued", "requeued")
    end(cell, 143, "SIGTERM")
    (last,) = read_history(cell.attempts())
    assert (last.cause, last.decision, read_status(cell).state) == (
        Cause.SAVED,
        "requeued",
        "queued",
    )
    told(monkeypatch, "cancelled", "SIGTERM")
    end(cell, 143, "SIGTERM")
    (last,) = read_history(cell.attempts())
    assert (last.cause, read_status(cell).state) == (Cause.STOPPED, "cancelled")


def test_a_script_that_goes_on_keeps_why_the_attempt_failed(cell: CellFolder) -> None:
    words = ["end", str(cell.path), "--exit-status=9", "--decision=restarted (1 of 3)"]
    assert job(words) == 0
    (last,) = read_history(cell.attempts())
    assert (last.reason, last.decision) == ("exit status 9", "restarted (1 of 3)")
    assert read_status(cell).state == "running"


def test_the_nodes_that_were_left_out_are_in_the_history(cell: CellFolder) -> None:
    found = {"nodes": [], "left_out": {"worker-4": "GPU 3: 2 uncorrectable ECC error(s)"}}
    cell.attempt(0).preflight.write_text(json.dumps(found))
    assert ended(cell, 0, 1.0, 1)[0].left_out == ("worker-4",)
    cell.attempt(0).preflight.write_text("{")
    assert ended(cell, 0, 1.0, 1)[0].left_out == ()


def test_too_few_nodes_are_no_wrong_option(cell: CellFolder) -> None:
    write_status(cell, Status("failed", 0, reason="preflight: 1 node(s) too few, and so on"))
    assert ended(cell, 0, 1.0, 4)[0].cause is Cause.BAD_NODES


def test_requeues_after_a_save_are_not_counted(
    cell: CellFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    for number, job_id in enumerate(["77", "77", "76"]):
        cell.attempt(number).path.mkdir(exist_ok=True)
        cell.attempt(number).stopped.write_text(f"{job_id} 5\n")
    assert restarts_after_failure(cell) == 1
