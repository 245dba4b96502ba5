"""A script that begins: alone in its folder, and with something left to do."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from tests.saved import save
from tests.submit import listing
from tests.test_resume_begin import NAME, Begun


@pytest.fixture
def cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Begun:
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Begun(tmp_path / "runs" / "mine" / NAME, capsys)


def test_a_second_script_waits_until_the_first_has_begun(cell: Begun) -> None:
    cell.folder.mkdir(parents=True)
    begun = threading.Thread(target=cell.begin)
    handle = os.open(cell.folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    begun.start()
    begun.join(timeout=1)
    assert begun.is_alive() and listing(cell.folder) == []
    os.close(handle)
    begun.join(timeout=20)
    assert (cell.folder / "attempt-0").is_dir()


def test_a_supervised_script_writes_nothing_that_its_submitter_wrote(
    cell: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was written before the job was queued; one script would add its own words."""
    texts = {"cell.yaml": f"name: {NAME}\nnodes: 4\n", "job.json": "{}", "status.json": "{}"}
    cell.folder.mkdir(parents=True)
    for name, text in texts.items():
        (cell.folder / name).write_text(text)
    monkeypatch.setenv("COOKBOOK_SUPERVISED", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    cell.begin()
    assert {name: (cell.folder / name).read_text() for name in texts} == texts
    assert not (cell.folder.parent / "run.json").exists()
    assert (cell.folder / "attempt-0").is_dir()


def test_a_run_that_has_made_its_steps_says_so(cell: Begun) -> None:
    save(cell.saved, 20)
    words = cell.begin()
    assert "all 20 steps were made before, so nothing is left to do; for more: --training." in words
    assert f"for a run of its own: CELL_DIR={cell.folder.parent.parent}/another/{NAME}" in words


def test_a_job_that_is_requeued_keeps_the_time_when_it_first_began(
    cell: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that time its run is the newest, or is not."""
    monkeypatch.setattr("cookbook.run.slurm.job_infos", lambda jobs: {})
    job = cell.folder / "job.json"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    cell.begin()
    assert json.loads(job.read_text())["job_id"] == "77"
    job.write_text('{"job_id": "77", "queued": 1000.0}')
    cell.begin(attempt=1)
    assert json.loads(job.read_text()) == {"job_id": "77", "queued": 1000.0}
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    cell.begin(attempt=2)
    assert json.loads(job.read_text())["job_id"] == "78"
