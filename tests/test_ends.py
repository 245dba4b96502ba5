"""How an attempt ended, by its script's status, its signal, and what its ranks left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cookbook.run.attempts import AttemptEnd, Cause, read_history, write_attempt_end
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import RUNNING, Status, read_status, write_status
from cookbook.supervise.__main__ import main as job
from cookbook.supervise.begin import end
from cookbook.supervise.ends import close_history, ended
from cookbook.supervise.stop import restarts_after_failure


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CellFolder:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    cell = CellFolder(tmp_path / "run" / "cell")
    cell.attempt(0).path.mkdir(parents=True)
    write_status(cell, Status(RUNNING, 0, started=1.0))
    return cell


def told(monkeypatch: pytest.MonkeyPatch, state: str, reason: str) -> None:
    monkeypatch.setattr("cookbook.supervise.ends.stopped_as", lambda *words: (state, reason))


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


def test_a_step_with_a_gradient_that_is_no_number_is_no_good_one(cell: CellFolder) -> None:
    head = "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - "
    norms = {3: "1.5", 4: "nan", 5: "inf"}
    lines = [f"{head}step: {step}  loss: 7.0  grad_norm: {norm}" for step, norm in norms.items()]
    cell.attempt(0).log.write_text("\n".join(lines) + "\n")
    last, _ = ended(cell, 0, 1.0, 1)
    assert (last.first_step, last.last_step, last.last_good_step) == (3, 5, 3)


def test_only_an_attempt_without_a_word_of_its_end_was_cut_short(cell: CellFolder) -> None:
    record = CellRecord()
    write_attempt_end(cell.attempt(0), AttemptEnd(0, Cause.HANG, "no step for 90 s"))
    close_history(cell, record)
    assert [end.cause for end in read_history(cell.attempts())] == [Cause.HANG]
    # The status is of an attempt before this one, so nobody knows when this one started.
    cell.attempt(1).path.mkdir()
    close_history(cell, record)
    assert len(read_history(cell.attempts())) == 1
    write_status(cell, Status(RUNNING, 1, started=2.0))
    close_history(cell, record)
    assert [end.cause for end in read_history(cell.attempts())] == [Cause.HANG, Cause.CUT_SHORT]


@pytest.mark.parametrize(
    ("code", "cause", "reason"),
    [
        (2, Cause.WRONG_OPTION, "exit status 2"),
        (1, Cause.ERROR, "exit status 1"),
        (-9, Cause.DEAD_RANK, "ended by SIGKILL"),
        (0, Cause.FINISHED, None),
    ],
)
def test_without_a_word_in_the_log_the_exit_status_tells(
    cell: CellFolder, code: int, cause: Cause, reason: str | None
) -> None:
    last, state = ended(cell, 0, 1.0, code)
    assert (last.cause, last.reason) == (cause, reason)
    assert state == ("finished" if code == 0 else "failed")
