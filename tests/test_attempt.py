"""One attempt at work: how long its silence is borne, and what is done when it is asked to stop."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cookbook.base.schema import Unchecked
from cookbook.observe.console import Phase
from cookbook.run.attempts import AttemptEnd, Cause
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import QUEUED, Status, write_status
from cookbook.supervise.attempt import RunningAttempt
from cookbook.supervise.leftovers import end_left_processes
from cookbook.supervise.room import blame_full_disk, has_room
from cookbook.supervise.step_clock import Patience
from tests.saved import save
from tests.started import start_marked
from tests.test_step_clock import at

Begin = Callable[..., RunningAttempt]


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CellFolder:
    for name in ("SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(name, raising=False)
    cell = CellFolder(tmp_path / "run" / "cell")
    cell.attempt(0).path.mkdir(parents=True)
    write_status(cell, Status(QUEUED))
    return cell


@pytest.fixture
def begin(cell: CellFolder) -> Begin:
    def start(body: str = "true", **options: object) -> RunningAttempt:
        logged = {"metrics.log_freq": 1}
        CellRecord(options=Unchecked(logged | options)).write(cell.record)
        cell.script.write_text(body + "\n")
        return RunningAttempt(cell, cell.attempt(0), Patience(), usual=1.0)

    return start


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 25.0),
        # No line says that it validates, profiles, or writes down its memory.
        ({"validation.enable": True}, 905.0),
        ({"profiling.enable_profiling": True}, 905.0),
        ({"profiling.enable_memory_snapshot": True}, 905.0),
        ({"validation.enable": False}, 25.0),
        # Nine steps more without a line; ten is TorchTitan's default.
        ({"metrics.log_freq": 10}, 34.0),
        ({"metrics.log_freq": None}, 34.0),
    ],
)
def test_what_pauses_without_a_word_is_given_the_time_of_a_save(
    begin: Begin, options: dict[str, object], longest: float
) -> None:
    attempt = begin(**options)
    attempt.clock.look(at(3), 1, 0.0)
    assert attempt.clock.limit == longest
    assert attempt.wait().cause is Cause.FINISHED


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 35.0),
        ({"checkpoint.async_mode": "disabled"}, 35.0),
        ({"checkpoint.async_mode": "async"}, 900.0),
        ({"checkpoint.async_mode": "async_with_pinned_mem"}, 900.0),
    ],
)
def test_a_save_waits_for_one_that_is_written_behind_the_trainings_back(
    begin: Begin, cell: CellFolder, options: dict[str, object], longest: float
) -> None:
    attempt = begin(**options)
    # Two seconds to copy; nobody says how long it was written.
    saved = "Finished saving the checkpoint (or staging if async is enabled)in 2.00 seconds."
    cell.attempt(0).log.write_text(f"[rank0]:[titan] 2026 - root - INFO - {saved}\n")
    clock = attempt.clock
    for now in range(0, 40, 2):
        clock.look(at(3, Phase.SAVING_CHECKPOINT), 1, float(now))
    assert clock.silent > 25.0
    assert clock.limit == longest
    assert attempt.wait().cause is Cause.FINISHED


def test_what_counts_is_what_this_attempt_is_asked_for(cell: CellFolder) -> None:
    """`run --resume --set` asks a later attempt for something else than the first one."""
    first = CellRecord(options=Unchecked({"metrics.log_freq": 1, "checkpoint.enable": False}))
    asked = {"metrics.log_freq": 50, "checkpoint.enable": True, "validation.enable": True}
    changed = first.changed(1, CellRecord(options=Unchecked(asked)))
    changed.write(cell.record)
    cell.script.write_text("sleep 5\n")
    attempt = RunningAttempt(cell, cell.attempt(1), Patience(), usual=1.0)
    attempt.clock.look(at(3), 1, 0.0)
    assert attempt.clock.limit == 5 + 49 + 900
    attempt.ask_to_stop(0.1)
    assert attempt.wait().cause is Cause.TOO_LATE
    attempt.process.kill()
    attempt.process.wait()


@pytest.mark.parametrize("saves", [True, False])
def test_only_what_can_save_is_late(begin: Begin, cell: CellFolder, saves: bool) -> None:
    attempt = begin(
        'until [[ -e "${CELL_DIR}/go" ]]; do sleep 0.1; done', **{"checkpoint.enable": saves}
    )
    attempt.ask_to_stop(0.1)
    if saves:
        assert attempt.wait().cause is Cause.TOO_LATE
        (cell.path / "go").touch()
    else:
        # Long after that time.
        threading.Timer(1.5, (cell.path / "go").touch).start()
    assert attempt.wait().cause is Cause.FINISHED
    assert cell.attempt(0).stop.exists()


def _sleeper(cell: CellFolder, **variables: str) -> subprocess.Popen[bytes]:
    marks = {"CELL_DIR": str(cell.path), "COOKBOOK_SUPERVISED": "1"}
    return start_marked(60, {**os.environ, **marks, **variables})


def test_only_processes_of_this_very_job_are_ended(
    cell: CellFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        _sleeper(cell, SLURM_JOB_ID="78"),
        _sleeper(cell, SLURM_JOB_ID="77", CELL_DIR="/another/cell"),
        _sleeper(cell, SLURM_JOB_ID="77", COOKBOOK_SUPERVISED=""),
        _sleeper(cell),
    ]
    own = _sleeper(cell, SLURM_JOB_ID="77")
    try:
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        end_left_processes(cell)
        assert own.wait(5) < 0
        assert [other.poll() for other in others] == [None] * 4
    finally:
        for process in (own, *others):
            process.kill()
            process.wait()


class Usage:
    """What a disk with so many free bytes says."""

    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("free", "cause", "for_log", "for_checkpoint"),
    [
        ((8 << 20) - 1, Cause.DISK_FULL, False, False),
        (9 << 20, Cause.DEAD_RANK, True, False),
        (200 << 20, Cause.DEAD_RANK, True, True),
    ],
)
def test_a_disk_without_room_for_a_log_is_to_blame(
    cell: CellFolder,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    cause: Cause,
    for_log: bool,
    for_checkpoint: bool,
) -> None:
    monkeypatch.setattr("cookbook.supervise.room.shutil.disk_usage", lambda path: Usage(free))
    end = blame_full_disk(AttemptEnd(0, Cause.DEAD_RANK, "rank 1: killed"), cell)
    assert end.cause is cause
    if cause is Cause.DISK_FULL:
        assert (end.reason or "").startswith("7 MiB are free at ")
    assert has_room(cell, "checkpoint") == for_log
    # The last one had 100 MiB, so the next one has.
    save(cell.path / "checkpoint", 1)
    with (cell.path / "checkpoint/step-1/__9_0.distcp").open("wb") as file:
        file.truncate(100 << 20)
    assert has_room(cell, "checkpoint") == for_checkpoint
