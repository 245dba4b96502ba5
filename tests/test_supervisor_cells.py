"""What a supervisor does about its cells: which it trains, and which failures it counts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.base.errors import JobError
from cookbook.run.attempts import AttemptEnd, Cause, read_history, write_attempt_end
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import FINISHED, QUEUED, REFUSED, Status, read_status, write_status
from cookbook.supervise.step_clock import Patience
from cookbook.supervise.supervisor import Supervisor
from tests.test_attempt import Usage
from tests.test_supervisor import HEAD


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SUBMITIT_LOCAL_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Supervisor, "patience", Patience(steps=5, more_s=1, start_s=4, save_s=4))
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def make(folder: Path, name: str, body: str = "exit 0", state: str = QUEUED) -> CellFolder:
    cell = CellFolder(folder / "run" / name)
    CellRecord(max_restarts=1).write(cell.record)
    cell.script.write_text(HEAD + body + "\n")
    write_status(cell, Status(state))
    return cell


def states(*cells: CellFolder) -> list[str]:
    return [read_status(cell).state for cell in cells]


def test_what_has_finished_or_cannot_run_is_not_trained(tmp_path: Path) -> None:
    done, refused = make(tmp_path, "a", state=FINISHED), make(tmp_path, "b", state=REFUSED)
    open_one = make(tmp_path, "c")
    with pytest.raises(SystemExit, match=r"^0$"):
        Supervisor([done, refused, open_one])()
    assert [len(cell.attempts()) for cell in (done, refused, open_one)] == [0, 0, 1]
    assert states(done, refused, open_one) == [FINISHED, REFUSED, FINISHED]


def test_one_cell_that_fails_stops_no_other_and_fails_the_job(tmp_path: Path) -> None:
    bad, good = make(tmp_path, "bad", "exit 2"), make(tmp_path, "good")
    with pytest.raises(JobError, match=r"^failed: bad$"):
        Supervisor([bad, good])()
    assert states(bad, good) == ["failed", FINISHED]


def test_told_to_stop_it_starts_no_further_cell(tmp_path: Path) -> None:
    first = make(tmp_path, "first", 'kill -TERM "${PPID}"; sleep 20')
    second = make(tmp_path, "second")
    with pytest.raises(JobError, match=r"^failed: first$"):
        Supervisor([first, second])()
    assert states(first, second) == ["cancelled", "cancelled"]
    assert read_status(second).reason == "cancelled before it started"
    assert second.attempts() == []


def test_failures_of_earlier_jobs_are_none_of_this_one(tmp_path: Path) -> None:
    cell = make(tmp_path, "a", "((K == 3)) && exit 0; torchrun_says -9; exit 1")
    for number in range(2):
        cell.attempt(number).path.mkdir(parents=True)
        end = AttemptEnd(number, Cause.DEAD_RANK, "rank 1: killed", job_id="4711")
        write_attempt_end(cell.attempt(number), end)
    with pytest.raises(SystemExit, match=r"^0$"):
        Supervisor([cell])()
    ends = read_history(cell.attempts())
    assert [end.cause for end in ends[2:]] == [Cause.DEAD_RANK, Cause.FINISHED]
    assert ends[2].decision == "restarted (1 of 1)"


def test_a_disk_without_room_is_blamed_for_what_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cookbook.supervise.supervisor._ROOM_S", 0.1)
    monkeypatch.setattr("cookbook.supervise.room.shutil.disk_usage", lambda path: Usage(1 << 20))
    cell = make(tmp_path, "a", "((K)) && exit 0; torchrun_says -9; exit 1")
    with pytest.raises(SystemExit, match=r"^0$"):
        Supervisor([cell])()
    first, second = read_history(cell.attempts())
    assert (first.cause, second.cause) == (Cause.DISK_FULL, Cause.FINISHED)
    assert (first.reason or "").startswith("1 MiB are free at ")
