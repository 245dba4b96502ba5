"""In: cells to run. Out: a run directory that is whole, found by name, and read back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.cells.cell import Cell
from cookbook.run import rundir
from cookbook.run.rundir import (
    FAILED,
    QUEUED,
    REFUSED,
    Status,
    attempts,
    create_run,
    find_run,
    read_job,
    read_status,
    run_names,
    write_job,
    write_status,
)
from cookbook.script.render import render_script
from tests.cells import Point
from tests.submit import listing


@pytest.fixture
def cells() -> list[Cell]:
    """A cell that runs, and one that is refused."""
    points = [
        Point("debug", "bf16", "standard", "soperator-b200"),
        Point("debug", "bf16", "mxfp8_a2a", "soperator-b200"),
    ]
    base, refused = (point.cell() for point in points)
    assert refused.refused
    return [replace(cell, baseline=base.name) for cell in (base, refused)]


def test_a_run_has_all_that_its_jobs_read(tmp_path: Path, cells: list[Cell]) -> None:
    run = create_run("smoke", cells, ["python", "submit.py", "sweep", "smoke"], tmp_path)
    assert re.fullmatch(r"smoke-\d{8}-\d{6}", run.name)
    assert run.folder == tmp_path / run.name
    record = json.loads((run.folder / "run.json").read_text())
    assert record["run"] == run.name
    assert record["cells"] == [cell.name for cell in cells] == list(run.cells)
    assert record["baseline"] == cells[0].name
    assert record["command"] == ["python", "submit.py", "sweep", "smoke"]
    assert (record["cluster"], record["scheduler"]) == ("soperator-b200", "slurm")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["created"])
    assert record["stack"] == "2026.02" and record["user"]
    for cell in cells:
        folder = run.cell_folder(cell.name)
        # The script that runs is what `render` prints, byte for byte.
        assert (folder / "train.sh").read_bytes() == render_script(cell).encode()
        assert yaml.safe_load((folder / "cell.yaml").read_text())["name"] == cell.name
    assert read_status(run.cell_folder(cells[0].name)) == Status(QUEUED)
    refused = read_status(run.cell_folder(cells[1].name))
    assert (refused.state, refused.reason) == (REFUSED, cells[1].refused)
    assert find_run(run.name, tmp_path) == find_run(None, tmp_path) == run
    assert find_run(str(run.folder), tmp_path / "elsewhere") == run
    # Nothing is left of its making.
    assert not [name for name in listing(tmp_path) if "/." in f"/{name}"]


def test_two_runs_in_one_second_have_two_names(tmp_path: Path, cells: list[Cell]) -> None:
    names = [create_run("smoke", cells[:1], [], tmp_path).name for _ in range(3)]
    assert len(set(names)) == 3
    assert run_names(tmp_path) == names
    assert find_run(None, tmp_path).name == names[-1]


def test_a_run_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cell: Cell) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "render_script", fail)
    with pytest.raises(OSError, match="No space left"):
        create_run("smoke", cells, [], tmp_path)
    assert listing(tmp_path) == []


def test_the_newest_run_is_the_latest_whatever_its_sweep(tmp_path: Path) -> None:
    for name in [
        "matrix-20260101-000000",
        "a-20260102-000000",
        "b-20260102-000000-2",
        "z-20251231-235959",
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(
            json.dumps({"run": name, "scheduler": "local", "cells": []})
        )
    (tmp_path / ".z-20270101-000000-77").mkdir()
    (tmp_path / ".z-20270101-000000-77" / "run.json").write_text("{}")
    assert run_names(tmp_path)[-1] == "b-20260102-000000-2"
    assert run_names(tmp_path)[0] == "z-20251231-235959"
    assert len(run_names(tmp_path)) == 4


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run yet; start one: python submit.py"):
        find_run(None, tmp_path)
    (tmp_path / "smoke-1").mkdir()
    (tmp_path / "smoke-1" / "run.json").write_text('{"run": "smoke-1", "scheduler": "local"')
    with pytest.raises(InputError, match="is not the folder of a run"):
        find_run("smoke-1", tmp_path)
    with pytest.raises(InputError, match=r"unknown run 'smoke-2'.*did you mean 'smoke-1'"):
        find_run("smoke-2", tmp_path)
    (tmp_path / "status.json").write_text("[]")
    with pytest.raises(InputError, match=r"status.json: cannot be read"):
        read_status(tmp_path)


def test_status_and_job_read_back(tmp_path: Path) -> None:
    status = Status(FAILED, 3, "exit status 1", 1, 10.5, 20.0)
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    assert read_job(tmp_path) is None
    write_job(tmp_path, "4711")
    job = read_job(tmp_path)
    assert job is not None and job.job_id == "4711" and job.queued > 1e9


def test_attempts_are_in_order(tmp_path: Path) -> None:
    for name in ["attempt-0", "attempt-10", "attempt-2", "attempt-x", "attempts"]:
        (tmp_path / name).mkdir()
    assert [path.name for path in attempts(tmp_path)] == ["attempt-0", "attempt-2", "attempt-10"]


def test_cells_that_were_added_by_hand_are_part_of_the_run(tmp_path: Path) -> None:
    record = {"run": "mine", "scheduler": "slurm", "cells": ["b"]}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text(json.dumps(record))
    for name in ("b", "a", ".hidden"):
        (tmp_path / "mine" / name).mkdir()
        (tmp_path / "mine" / name / "cell.yaml").write_text("name: x")
    (tmp_path / "mine" / "job").mkdir()
    assert rundir.read_run(tmp_path / "mine").cells == ("b", "a")
