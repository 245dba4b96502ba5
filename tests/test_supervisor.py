"""What a supervisor does about an attempt that fails; short scripts stand in for training."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cookbook.base.errors import JobError
from cookbook.base.schema import Unchecked
from cookbook.run.attempts import AttemptEnd, Cause, read_history
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import QUEUED, RUNNING, Status, read_status, write_status
from cookbook.supervise.step_clock import Patience
from cookbook.supervise.supervisor import Supervisor
from tests.started import start_marked

# What every script begins with: its attempt's folder, and a step that it prints.
HEAD = """
for ((K = 0; ; K++)); do [[ -d "${CELL_DIR}/attempt-${K}" ]] || break; done
A="${CELL_DIR}/attempt-${K}"; mkdir "${A}"; exec >>"${A}/train.log" 2>&1
step() { echo "[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step: $1  loss: $2  x: 1"; }
torchrun_says() { echo "E1120 18:40:01.1 api.py:1] failed (exitcode: $1) local_rank: 1 (pid: 9)"; }
"""


@dataclass(frozen=True)
class Outcome:
    status: Status
    ends: list[AttemptEnd]

    @property
    def causes(self) -> list[Cause]:
        return [end.cause for end in self.ends]


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(Supervisor, "patience", Patience(steps=5, more_s=1, start_s=4, save_s=4))

    def run(body: str, most: int = 9, status: Status | None = None) -> Outcome:
        cell = CellFolder(tmp_path / "run" / "cell")
        options = Unchecked({"checkpoint.enable": True})
        CellRecord(max_restarts=most, options=options).write(cell.record)
        cell.script.write_text(HEAD + body)
        write_status(cell, status or Status(QUEUED))
        # A cell that failed fails the job; else the process ends with status 0.
        ends, said = (SystemExit, "^0$") if "exit 0" in body else (JobError, "^failed: cell$")
        with pytest.raises(ends, match=said):
            Supervisor([cell])()
        return Outcome(read_status(cell), read_history(cell.attempts()))

    return run


def test_a_dead_rank_is_followed_by_another_attempt(supervised: Callable[..., Outcome]) -> None:
    done = supervised("step 1 7; ((K)) && exit 0\ntorchrun_says -9; exit 1\n")
    assert done.causes == [Cause.DEAD_RANK, Cause.FINISHED]
    assert (done.status.state, done.status.attempt) == ("finished", 1)
    first = done.ends[0]
    assert "exitcode: -9" in (first.reason or "") and (first.first_step, first.last_step) == (1, 1)
    assert first.decision == "restarted (1 of 9)"


def test_a_hang_is_ended_with_all_that_it_started_and_followed(
    supervised: Callable[..., Outcome], tmp_path: Path
) -> None:
    # torchrun's ranks have sessions of their own. Another cell's are not to be ended, nor a user's.
    body = """
step 1 7; ((K)) && exit 0
setsid sleep 300 & echo $! >"${CELL_DIR}/rank"
CELL_DIR=/another/cell setsid sleep 300 & echo $! >"${CELL_DIR}/other"
for i in 2 3 4 5; do sleep 0.6; step "${i}" 7; done
sleep 300; exit 0
"""
    other = subprocess.Popen(["sleep", "300"], env={"CELL_DIR": str(tmp_path / "run" / "cell")})
    try:
        done = supervised(body)
        assert done.causes == [Cause.HANG, Cause.FINISHED]
        assert re.match(r"no step for \d+ s \(usual: 0.\d s\) after step 5", said(done, 0))
        cell = tmp_path / "run" / "cell"
        assert not lives(int((cell / "rank").read_text()))
        assert lives(int((cell / "other").read_text())) and other.poll() is None
    finally:
        other.kill()
        other.wait()
        os.kill(int((tmp_path / "run" / "cell" / "other").read_text()), 9)


def test_the_rest_of_a_step_without_its_rank_is_not_waited_for(
    supervised: Callable[..., Outcome], tmp_path: Path
) -> None:
    waits = 'sleep 100; touch "${CELL_DIR}/waited"'
    done = supervised(f"step 1 7; ((K)) && exit 0\ntorchrun_says -9; {waits}\n")
    assert done.causes == [Cause.DEAD_RANK, Cause.FINISHED]
    assert not (tmp_path / "run" / "cell" / "waited").exists()
    first = done.ends[0]
    # It was seen when the rank was gone, and what was left had some seconds to end by itself.
    assert first.started and first.seen and first.ended
    assert first.started < first.seen < first.ended


@pytest.mark.parametrize(
    ("body", "cause", "words"),
    [
        (
            "echo '[rank1]: Traceback (most recent call last):'\n"
            "echo '[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'\n"
            "exit 1",
            Cause.OUT_OF_MEMORY,
            "lower training.local_batch_size",
        ),
        (
            "echo '[rank1]: Traceback (most recent call last):'\n"
            "echo \"[rank1]: FileNotFoundError: [Errno 2] No such file or directory: 'x'\"\nexit 1",
            Cause.MISSING_FILE,
            "put the file there",
        ),
        ("echo 'Unrecognized options: --training.step=5'; exit 1", Cause.WRONG_OPTION, "correct"),
        (
            "echo '[rank0]:[titan] 2026-11-20 18:29:22,279 - root - ERROR - cookbook refuses: no'\n"
            "exit 1",
            Cause.WRONG_OPTION,
            "no; stopped",
        ),
        ("exit 2", Cause.WRONG_OPTION, "exit status 2"),
    ],
)
def test_what_would_come_again_stops_at_once_with_its_remedy(
    supervised: Callable[..., Outcome], body: str, cause: Cause, words: str
) -> None:
    done = supervised(f"step 1 7; {body}\n")
    assert done.causes == [cause]
    assert done.status.state == "failed"
    assert words in (done.status.reason or "")


@pytest.mark.parametrize(
    ("body", "attempts"),
    [
        # An exception before the first step; the same at a step; a rank that dies at a step.
        ("echo 'Traceback (most recent call last):'; echo 'ValueError: no'; exit 1", 2),
        ("step 3 7; echo 'Traceback (most recent call last):'; echo 'ValueError: no'; exit 1", 3),
        ("step 3 7; torchrun_says -11; exit 1", 4),
        ("torchrun_says -11; exit 1", 3),
    ],
)
def test_a_crash_that_comes_again_ends_at_the_bound_with_its_cause(
    supervised: Callable[..., Outcome], body: str, attempts: int
) -> None:
    done = supervised(body)
    assert len(done.ends) == attempts
    assert done.status.state == "failed"
    assert re.search("ValueError: no|exitcode: -11", done.status.reason or "")
    assert "attempts in a row came no further" in (done.status.reason or "")


def test_restarts_are_bounded_also_where_each_comes_further(
    supervised: Callable[..., Outcome],
) -> None:
    done = supervised("step $((K + 1)) 7; torchrun_says -9; exit 1\n", most=5)
    assert len(done.ends) == 6
    assert "restarted 5 times, as max_restarts allows" in (done.status.reason or "")


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_nan_loss_is_ended_and_its_last_good_step_is_known(
    supervised: Callable[..., Outcome], loss: str
) -> None:
    bad = f"step 3 {loss}; step 4 {loss}"
    done = supervised(f"step 1 7; ((K)) && exit 0\nstep 2 6; {bad}; sleep 300\n")
    assert done.causes == [Cause.NAN_LOSS, Cause.FINISHED]
    assert done.ends[0].last_good_step == 2
    assert f"loss is {loss}" in said(done, 0)


def test_after_a_full_disk_room_for_a_checkpoint_is_waited_for(
    supervised: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("cookbook.supervise.supervisor._ROOM_S", 1.0)
    body = """
step 1 7; ((K)) && exit 0
S="${CELL_DIR}/checkpoint/step-1"; mkdir -p "${S}"; touch "${S}/.metadata"
# Larger than any disk, and takes nothing of it.
truncate -s 4T "${S}/__0_0.distcp"
echo "Traceback (most recent call last):"; echo "OSError: [Errno 28] No space left on device"
exit 1
"""
    done = supervised(body)
    assert done.causes == [Cause.DISK_FULL, Cause.FINISHED]
    assert "waiting for room at " in capfd.readouterr().err


@pytest.mark.parametrize("does", ["saves", "fails", "takes long"])
def test_asked_to_stop_where_no_slurm_can_requeue_it_says_how_to_go_on(
    supervised: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    does: str,
) -> None:
    monkeypatch.setenv("COOKBOOK_LATE_S", "1" if does == "takes long" else "60")
    body = """
step 1 7; kill -USR1 "${PPID}"
until [[ -e "${A}/stop" ]]; do sleep 0.1; done
[[ %s == fails ]] && { torchrun_says -9; exit 1; }
[[ %s == saves ]] || sleep 3
echo "local 1" >"${A}/stopped"
"""
    done = supervised(body % (f"'{does}'", f"'{does}'"))
    (end,) = done.ends
    assert capfd.readouterr().err.count("too late: ") == (does == "takes long")
    assert end.cause is (Cause.DEAD_RANK if does == "fails" else Cause.SAVED)
    assert done.status.state == "failed"
    assert "; stopped; to go on: python submit.py run --resume RUN" in (done.status.reason or "")


def test_an_attempt_whose_supervisor_was_killed_is_noted(
    supervised: Callable[..., Outcome], tmp_path: Path
) -> None:
    cell = CellFolder(tmp_path / "run" / "cell")
    log = cell.path / "attempt-0" / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text("[rank0]:[titan] 2026-11-20 18:29:22,279 - root - INFO - step: 4  loss: 7  x\n")
    marks = {"CELL_DIR": str(cell.path), "COOKBOOK_SUPERVISED": "1"}
    left = start_marked(300, {**os.environ, **marks})
    done = supervised("exit 0", status=Status(RUNNING, 0, started=time.time() - 60))
    assert left.wait(timeout=1) < 0
    assert done.causes == [Cause.CUT_SHORT, Cause.FINISHED]
    assert (done.ends[0].last_step, done.status.attempt) == (4, 1)


def said(done: Outcome, attempt: int) -> str:
    return done.ends[attempt].reason or ""


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
