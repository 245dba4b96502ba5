"""The records that a report knows a cell and a run by."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cookbook.run import run as runs
from cookbook.run.record import CellRecord, read_record
from tests.cells import Point
from tests.checkout import commit_all


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
    same = ["name", "stand_in_for", "refused", "baseline", "prediction", "repeat_of", "repeat"]
    same += ["nodes", "emulated", "max_restarts", "environment"]
    assert {name: getattr(read, name) for name in same} == {n: getattr(cell, n) for n in same}
    assert read.emulated and read.published_tokens_per_second_per_gpu == 918.0
    parts = (cell.recipe, cell.precision, cell.ep_backend, cell.cluster)
    named = (read.recipe, read.precision, read.ep_backend, read.cluster)
    assert named == tuple(part.name for part in parts)
    assert (read.stack, read.device) == ("2026.02", "cpu")
    assert read.ranks_per_node == cell.cluster.ranks_per_node
    assert read.options == cell.options.values and read.options["training.steps"] == cell.steps
    # What only a later attempt or a user's own file brings.
    empty = {"files", "published_source", "profile", "too_few_nodes"}
    left = {field.name for field in fields(CellRecord) if not getattr(read, field.name)}
    assert left <= empty | {"environment"}


def test_a_commit_with_changes_has_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert runs.commit() is None

    (tmp_path / "file").write_text("one\n")
    head = commit_all(tmp_path)[:7]
    # Runs and notes lie beside the files; the code that runs is the commit's.
    (tmp_path / "notes").touch()
    assert runs.commit() == head
    (tmp_path / "file").write_text("two\n")
    assert runs.commit() == f"{head}+"
    record = runs.new_record(runs.RunRecord("local", (), "r", cluster="c", stack="s"))
    runs.write_run(tmp_path, record)
    assert json.loads((tmp_path / "run.json").read_text())["commit"] == f"{head}+"
