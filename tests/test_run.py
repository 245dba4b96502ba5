"""The folder and the records of a run: made whole, found by name, read back."""

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.config.cell import Cell
from cookbook.launch import submit
from cookbook.launch.script import render_script
from cookbook.launch.submit import create_run
from cookbook.run import run as records
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import find_run, note_new_job, read_run, run_names
from cookbook.run.status import QUEUED, REFUSED, Status, read_job, read_status
from tests.cells import Point
from tests.checkout import commit_all
from tests.submit import listing


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that runs go to."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    return tmp_path


@pytest.fixture
def cells() -> list[Cell]:
    """A cell that runs, and one that is refused."""
    base = Point("debug", "bf16", "standard", "soperator-b200").cell()
    return [
        replace(base, baseline=base.name),
        replace(base, name="other", baseline=base.name, refused="needs GPUs"),
    ]


def test_a_new_run(tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["submit.py", "sweep", "smoke"])
    run = create_run("smoke", cells)
    assert re.fullmatch(r"smoke-\d{8}-\d{6}", run.name)
    assert run.folder == tmp_path / run.name
    record = json.loads((run.folder / "run.json").read_text())
    assert record["run"] == run.name
    assert record["cells"] == [cell.name for cell in cells] == [cell.name for cell in run.cells]
    assert record["baseline"] == cells[0].name
    assert record["command"] == ["python", "submit.py", "sweep", "smoke"]
    assert (record["cluster"], record["scheduler"]) == ("soperator-b200", "slurm")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["created"])
    assert record["stack"] == "2026.02" and record["user"]
    for cell in cells:
        folder = run.cell(cell.name)
        # The script that runs is what `render` prints, byte for byte.
        assert folder.script.read_bytes() == render_script(cell).encode()
        assert yaml.safe_load(folder.record.read_text())["name"] == cell.name
        record = read_record(folder.record)
        asked = replace(cell.job_record(), command=record.command, code=record.code)
        assert record == replace(asked, commit=record.commit)
        # It carries its code.
        assert (run.folder / "code" / (record.code or "") / "cookbook/__init__.py").is_file()
    assert read_status(run.cell(cells[0].name)) == Status(QUEUED)
    refused = read_status(run.cell(cells[1].name))
    assert (refused.state, refused.reason) == (REFUSED, cells[1].refused)
    assert find_run(run.name) == find_run(None) == run
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "elsewhere"))
    assert find_run(str(run.folder)) == run
    # Nothing is left of its making.
    assert not [name for name in listing(tmp_path) if "/." in f"/{name}"]


def test_runs_of_one_second_are_numbered(
    tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    names = [create_run("smoke", cells[:1]).name for _ in range(3)]
    assert names == ["smoke-now", "smoke-now-2", "smoke-now-3"]
    assert run_names() == names
    assert find_run(None).name == names[-1]


def test_a_full_disk(tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(submit, "render_script", full)
    with pytest.raises(OSError, match="No space left"):
        create_run("smoke", cells)
    assert listing(tmp_path) == []


def test_the_newest_job_has_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("16b", "matrix-20260101-000000", ".z-20270101-000000-77", "a"):
        note_new_job(_run_json(tmp_path, '{"scheduler": "slurm", "cells": []}', name))
    assert run_names() == ["16b", "matrix-20260101-000000", "a"]
    note_new_job(tmp_path / "16b")
    assert run_names()[-1] == find_run(None).name == "16b"
    # In a colleague's run a job starts all the same.
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError))
    note_new_job(tmp_path / "a")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run yet; start one: python submit.py"):
        find_run(None)
    _run_json(tmp_path, '{"run": "smoke-1", "scheduler": "local", "cells": []}', "smoke-1")
    with pytest.raises(InputError, match=r"unknown run 'smoke-2'.*did you mean 'smoke-1'"):
        find_run("smoke-2")


def _run_json(folder: Path, text: str, name: str = "mine") -> Path:
    (folder / name).mkdir()
    (folder / name / "run.json").write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", '{"scheduler": "local"', "run.json: cannot be read"),
        ("run.json", "[]", "run.json: found [], allowed: an object"),
        ("run.json", '{"scheduler": "local"}', "run.json: cells: is missing; write {"),
        ("run.json", '{"scheduler": "local", "cells": [null]}', "cells: found None"),
        ("run.json", '{"scheduler": "lsf", "cells": []}', "found 'lsf', allowed: 'slurm' or 'loc"),
        ("cell.yaml", "[]", "found a list at the top"),
        ("cell.yaml", "nodes: many", "nodes: found the text 'many', allowed: a whole number"),
        ("status.json", "", "status.json: cannot be read"),
        ("status.json", '{"state": "well"}', "state: found 'well', allowed: cancelled, failed"),
        ("job.json", '{"job_id": 5}', "job_id: found 5"),
        ("job.json", '{"job_id": "-1"}', "job_id: found '-1'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    cell = CellFolder(tmp_path)
    read: dict[str, Callable[[], object]] = {
        "run.json": lambda: read_run(tmp_path),
        "cell.yaml": lambda: read_record(cell.record),
        "status.json": lambda: read_status(cell),
        "job.json": lambda: read_job(cell),
    }
    with pytest.raises(InputError) as caught:
        read[name]()
    assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_attempts_are_in_order_and_the_next_one_follows(tmp_path: Path) -> None:
    cell = CellFolder(tmp_path)
    assert (cell.attempts(), cell.next_attempt().number) == ([], 0)
    names = ["attempt-0", "attempt-10", "attempt-2", "attempt-x", "attempt-²", "attempt-٣"]
    for name in [*names, "attempt-", "attempts"]:
        (tmp_path / name).mkdir()
    found = [attempt.path.name for attempt in cell.attempts()]
    assert found == ["attempt-0", "attempt-2", "attempt-10"]
    assert cell.next_attempt().path == tmp_path / "attempt-11"


def test_a_run_that_was_renamed_and_got_cells_by_hand(tmp_path: Path) -> None:
    record = {"run": "old", "scheduler": "slurm", "cells": ["b"]}
    folder = _run_json(tmp_path, json.dumps(record))
    for name in ("b", "a", ".hidden"):
        (folder / name).mkdir()
        (folder / name / "cell.yaml").write_text("name: x")
    (folder / "job").mkdir()
    assert [cell.name for cell in read_run(folder).cells] == ["b", "a"]
    assert find_run("mine").name == find_run(str(folder)).record.run == "mine"


def test_all_of_a_cell_is_in_its_record(tmp_path: Path) -> None:
    """What is lost here is lost for good: a report knows a cell by its record alone."""
    cell = replace(
        Point("debug", "mxfp8", "standard", "local").cell(),
        stand_in_for="deepseek_v3_671b",
        refused="does not fit",
        published=918.0,
        baseline="debug-bf16-standard",
        prediction="predicted 5",
        repeat_of="debug-mxfp8-standard",
        repeat=2,
    )
    cell.record().write(tmp_path / "cell.yaml")
    read = read_record(tmp_path / "cell.yaml")
    assert read == cell.record()
    assert (read.stand_in_for, read.refused, read.prediction) == (
        *("deepseek_v3_671b", "does not fit", "predicted 5"),
    )
    of_sweep = (read.baseline, read.repeat_of, read.repeat)
    assert of_sweep == ("debug-bf16-standard", "debug-mxfp8-standard", 2)
    assert read.emulated and read.published_tokens_per_second_per_gpu == 918.0
    assert (read.stack, read.device, read.world) == ("2026.02", "cpu", cell.world)
    assert read.options == cell.options.values and read.options["training.steps"] == cell.steps
    # What only a job, a later attempt or a user's own file brings.
    empty = {"files", "published_source", "profile", "too_few_nodes", "environment_from"}
    empty |= {"command", "spare_nodes", "commit", "code", "environment"}
    assert {field.name for field in fields(CellRecord) if not getattr(read, field.name)} <= empty


def test_a_commit_with_changes_has_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert records.commit() is None

    (tmp_path / "file").write_text("one\n")
    head = commit_all(tmp_path)[:7]
    # Runs and notes lie beside the files; the code that runs is the commit's.
    (tmp_path / "notes").touch()
    assert records.commit() == head
    (tmp_path / "file").write_text("two\n")
    assert records.commit() == f"{head}+"
    records.write_run(tmp_path, records.RunRecord("local", (), "r", cluster="c", stack="s"))
    assert json.loads((tmp_path / "run.json").read_text())["commit"] == f"{head}+"


def test_who_reads_while_it_is_written_sees_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, "old, and long\n")
    with path.open() as reader:
        assert reader.read(3) == "old"
        write_whole(path, b"new\n", mode=0o755)
        assert reader.read() == ", and long\n"
    # What cannot be written leaves that, and nothing beside it.
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "no text: \ud800")
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert list(path.parent.iterdir()) == [path]
