"""Runs of the version before the rooms are read, resumed, or refused with what to do."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.base.errors import JobError
from cookbook.base.paths import ROOT
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.supervise.supervisor import Supervisor
from tests.submit import submit

NAME = "matrix-20261121-192057"
CELL = "debug-mxfp8-standard"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs with one that the old version wrote, its own `train.sh` included."""
    folder = tmp_path / "runs"
    shutil.copytree(ROOT / "tests" / "old_run", folder / NAME)
    script = folder / NAME / CELL / "train.sh"
    script.write_text(script.read_text().replace("/home/me/moe-cookbook", str(ROOT)))
    return folder


def test_it_is_listed_shown_and_reported(runs: Path) -> None:
    answer = submit("status", runs=runs)
    assert answer.status == 0
    assert [line.split()[:2] for line in answer.stdout.splitlines()] == [
        [NAME, "(local)"],
        ["debug-bf16-deepep", "refused"],
        [CELL, "finished"],
    ]
    assert "step 6/6" in answer.stdout
    answer = submit("report", "--format", "json", runs=runs)
    assert answer.status == 0
    (refused, finished) = json.loads(answer.stdout)["cells"]
    assert (refused["name"], refused["status"]) == ("debug-bf16-deepep", "refused")
    assert (finished["steps"], finished["final_loss"]) == (6, 7.33862)
    assert finished["emulated"] is True
    for name in (CELL, f"{NAME}/{CELL}", NAME):
        answer = submit("logs", name, runs=runs)
        assert answer.status == 0 and "step:  6" in answer.stdout


def test_its_record_is_whole(runs: Path) -> None:
    record = read_record(CellFolder(runs / NAME / CELL).record)
    assert (record.name, record.precision, record.device) == (CELL, "mxfp8", "cpu")
    assert (record.world, record.steps, record.loss_rank) == (2, 6, 0)
    assert record.environment == {"OMP_NUM_THREADS": "1"}


def test_its_script_says_that_it_must_be_rendered_anew(runs: Path) -> None:
    done = subprocess.run(
        ["bash", str(runs / NAME / CELL / "train.sh")],
        env={**os.environ, "CELL_DIR": str(runs / NAME / CELL), "VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "rendered by an older version" in said
    assert f"CELL_DIR={runs / NAME / CELL}" in said and "python submit.py render" in said
    assert not (runs / NAME / CELL / "attempt-1" / "train.log").exists()


def test_its_queued_job_ends_with_that_reason(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = CellFolder(runs / NAME / CELL)
    folder.status.write_text('{"state": "queued", "attempt": 0}')
    monkeypatch.setenv("VENV", sys.prefix)
    # Protocol 0 writes the names of modules on lines of their own.
    now = pickle.dumps(Supervisor([folder]), protocol=0)
    before = now.replace(b"cookbook.supervise.supervisor\n", b"cookbook.supervisor\n")
    assert before != now
    with pytest.raises(JobError, match=rf"^failed: {CELL}$"):
        pickle.loads(before)()
    status = json.loads(folder.status.read_text())
    assert status["state"] == "failed"
    assert "rendered by an older version" in status["reason"]
    assert "rendered by an older version" in capfd.readouterr().err
