"""Figures of a cell over several attempts, and what of a record and a log a result must keep."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.schema import Unchecked
from cookbook.config.cell import Cell
from cookbook.run import run as runs
from cookbook.run.record import CellRecord, read_record
from tests.cells import Point
from tests.test_results import Run, log_of, metrics_line

PUBLISHED: dict[str, Any] = {"published_tokens_per_second_per_gpu": 651.0}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_memory_is_the_peak_of_all_attempts(run: Run) -> None:
    first = "".join(metrics_line(step, memory="99.50") for step in (1, 2))
    run.add("base", first, metrics_line(2, memory="10.00"))
    assert run.only().memory_gib == 99.5


def test_of_two_lines_of_what_was_active_the_newer_one_counts(run: Run) -> None:
    run.add("base", log_of(attention="flex", emulated=True) + log_of(attention="sdpa"))
    cell = run.only()
    assert (cell.attention, cell.emulated) == ("sdpa", False)


def test_what_was_active_is_what_the_newest_attempt_that_said_it_says(run: Run) -> None:
    attempts = [log_of(attention="flex"), log_of(attention="sdpa"), metrics_line(3)]
    run.add("base", *attempts)
    assert run.only().attention == "sdpa"


def test_a_published_number_is_only_beside_the_cell_that_was_published(run: Run) -> None:
    log = metrics_line(1) + metrics_line(2)
    run.add("base", log, **PUBLISHED)
    run.add("fewer nodes", log, **PUBLISHED, changes=[{"attempt": 1, "nodes": 16}])
    options = {"training.local_batch_size": 4}
    run.add("another batch", log, **PUBLISHED, changes=[{"attempt": 2, "options": options}])
    found = [cell.published_tokens_per_second_per_gpu for cell in run.collect().cells]
    assert found == [651.0, None, None]


@pytest.mark.parametrize("emulated", [0, 1])
def test_a_cell_is_emulated_where_any_of_its_repeats_is(run: Run, emulated: int) -> None:
    logs = [log_of(emulated=number == emulated) for number in range(2)]
    run.add("base", logs[0])
    run.add("base-r2", logs[1], repeat_of="base", repeat=2)
    (cell,) = run.collect().cells
    assert cell.emulated and cell.speedup is None


def test_of_repeats_the_worst_state_and_the_fewest_steps_count(run: Run) -> None:
    for number, (state, steps) in enumerate((("finished", 9), ("failed", 4), ("finished", 7)), 1):
        name = "base" if number == 1 else f"base-r{number}"
        log = "".join(metrics_line(step, memory=f"{number}0.00") for step in range(1, steps + 1))
        of: dict[str, Any] = {} if number == 1 else {"repeat_of": "base", "repeat": number}
        run.add(name, log, state=state, **of)
    (cell,) = run.collect().cells
    assert (cell.status, cell.steps, cell.memory_gib) == ("failed", 4, 30.0)


def test_all_of_a_cell_is_in_its_record(tmp_path: Path) -> None:
    """What is lost here is lost for good: a report knows a cell by its record alone."""
    cell = replace(
        Point("debug", "mxfp8", "standard", "local").cell(),
        stand_in_for="deepseek_v3_671b",
        refused="does not fit",
        published=918.0,
        baseline="debug-bf16-standard",
        repeat_of="debug-mxfp8-standard",
        repeat=2,
    )
    cell.record().write(tmp_path / "cell.yaml")
    read = read_record(tmp_path / "cell.yaml")
    assert read == cell.record()
    same = [*("name", "stand_in_for", "refused", "baseline", "repeat_of", "repeat", "nodes")]
    same += ["emulated", "max_restarts", "environment"]
    assert {name: getattr(read, name) for name in same} == {n: getattr(cell, n) for n in same}
    assert read.emulated and read.published_tokens_per_second_per_gpu == 918.0
    parts = (cell.recipe, cell.precision, cell.ep_backend, cell.cluster)
    named = (read.recipe, read.precision, read.ep_backend, read.cluster)
    assert named == tuple(part.name for part in parts)
    assert (read.stack, read.device) == ("2026.02", "cpu")
    assert read.ranks_per_node == cell.cluster.ranks_per_node
    assert read.options == cell.options.values and read.options["training.steps"] == cell.steps
    # What only a later attempt or a user's own file brings.
    empty = {"changes", "files", "published_source"}
    left = {field.name for field in fields(CellRecord) if not getattr(read, field.name)}
    assert left <= empty | {"environment"}


def test_a_record_says_where_the_users_own_files_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((Path(__file__).parent.parent / "recipes/debug.yaml").read_text())
    record = _cell(str(path)).record()
    assert dict(record.files) == {"recipe": str(path)}


def _cell(recipe: str) -> Cell:
    return Point(recipe, "bf16", "standard", "local").cell()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Of two nodes with eight ranks each.
        ({"training.local_batch_size": 4}, 4 * 512),
        ({"training.local_batch_size": 4, "parallelism.tensor_parallel_degree": 2}, 2 * 512),
        (
            {
                "training.local_batch_size": 4,
                "parallelism.tensor_parallel_degree": 2,
                "parallelism.pipeline_parallel_degree": 2,
                "parallelism.expert_parallel_degree": 8,
            },
            512,
        ),
        ({"training.local_batch_size": 4, "parallelism.context_parallel_degree": 4}, 512),
        ({"training.local_batch_size": 4, "training.global_batch_size": 256}, 16 * 512),
        # What is not asked for, TorchTitan's default of -1, is known by nobody here.
        ({"training.global_batch_size": -1}, None),
    ],
)
def test_the_tokens_of_a_step_are_shared_as_torchtitan_counts_them(
    options: dict[str, int], expected: int | None
) -> None:
    asked = Unchecked({"training.seq_len": 512, **options})
    assert CellRecord(nodes=2, ranks_per_node=8, options=asked).tokens_per_step_per_gpu == expected


def test_a_commit_with_changes_has_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert runs.commit() is None

    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *own, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "--quiet", "--message=first")
    head = git("rev-parse", "--short", "HEAD")
    # Runs and notes lie beside the files; the code that runs is the commit's.
    (tmp_path / "notes").touch()
    assert runs.commit() == head
    (tmp_path / "file").write_text("two\n")
    assert runs.commit() == f"{head}+"
    git("add", "file")
    assert runs.commit() == f"{head}+"
    record = runs.new_record("r", cluster="c", scheduler="local", stack="s", cells=[])
    runs.write_run(tmp_path, record)
    assert json.loads((tmp_path / "run.json").read_text())["commit"] == f"{head}+"


def _timed(minutes: int, tps: str = "100") -> str:
    """Steps at the beginning and at the end of so many minutes."""
    lines = "".join(metrics_line(step, tps=tps) for step in (1, 2))
    return lines + metrics_line(3, tps=tps).replace("18:29:22", f"18:{29 + minutes}:22")


def test_gpu_hours_are_those_that_each_attempt_had(run: Run) -> None:
    """Half an hour on 8 GPUs, then 15 minutes on 4."""
    changes = [{"attempt": 2, "nodes": 2}]
    run.add("base", _timed(30), _timed(15), nodes=4, changes=changes)
    assert run.only().gpu_hours == pytest.approx(8 * 0.5 + 4 * 0.25)


def test_a_billion_tokens_cost_what_they_take_with_their_stalls(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    text = (Path(__file__).parent.parent / "recipes/cluster/soperator-b200.yaml").read_text()
    profile.write_text(text + "\nprice_per_gpu_hour: 3.6\n")
    speeds = ["100"] * 4 + ["1000"] * 3 + ["100"]
    log = "".join(metrics_line(step, tps=tps) for step, tps in enumerate(speeds, 1))
    run.add("base", log, cluster="mine", files={"cluster": str(profile)})
    # Of the 6 measured steps three took ten times as long: 6,000 tokens in 33 s at best.
    seconds = (3 / 1000 + 3 / 100) / 6 * 1e9
    assert run.only().cost_per_billion_tokens == pytest.approx(3.6 * seconds / 3600)
