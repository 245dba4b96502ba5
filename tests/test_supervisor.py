"""What a supervisor does about an attempt that fails; short scripts stand in for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cookbook.job.step_clock import Patience
from cookbook.job.supervisor import Supervisor
from cookbook.run.folder import CellFolder
from cookbook.run.history import AttemptEnd, Cause, read_history
from cookbook.run.record import CellRecord
from cookbook.run.status import QUEUED, Status, read_status, write_status

# What every script begins with: its attempt's folder, and a step that it prints.
_HEAD = """
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

    def run(body: str, most: int = 9) -> Outcome:
        cell = CellFolder(tmp_path / "run" / "cell")
        CellRecord(max_restarts=most).write(cell.record)
        cell.script.write_text(_HEAD + body)
        write_status(cell, Status(QUEUED))
        with pytest.raises(SystemExit) if _ends_well(body) else pytest.raises(Exception):
            Supervisor([cell])()
        return Outcome(read_status(cell), read_history(cell.attempts()))

    return run


def _ends_well(body: str) -> bool:
    return "exit 0" in body


def test_a_dead_rank_is_followed_by_another_attempt(supervised: Callable[..., Outcome]) -> None:
    done = supervised("step 1 7; ((K)) && exit 0\ntorchrun_says -9; exit 1\n")
    assert done.causes == [Cause.DEAD_RANK, Cause.FINISHED]
    assert (done.status.state, done.status.attempt) == ("finished", 1)
    first = done.ends[0]
    assert "exitcode: -9" in (first.reason or "") and (first.first_step, first.last_step) == (1, 1)
    assert first.decision == "restarted (1 of 9)"
