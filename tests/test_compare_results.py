"""Which cells a comparison of two runs calls too slow, and which it does not compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cookbook.results.compare import Comparison, compare_runs, compare_with_published
from cookbook.results.compare_report import comparison_json, comparison_markdown
from cookbook.results.tables import published_table
from tests.test_results import Run, metrics_line

BATCH = {"training.steps": 20, "training.seq_len": 64, "training.local_batch_size": 2}


def log_of(tps: float, steps: int = 20) -> str:
    return "".join(metrics_line(step, tps=f"{tps:g}") for step in range(1, steps + 1))


def compared(
    folder: Path, before: dict[str, Any], after: dict[str, Any], tolerance: float = 5
) -> Comparison:
    """A cell of one run beside that of another; each is its log and what is special in it."""
    runs = []
    for name, cell in (("first", before), ("second", after)):
        run = Run(folder / name)
        run.add("cell", cell.pop("log"), **{"options": BATCH, **cell})
        runs.append(run.collect())
    return compare_runs(runs, tolerance)


@pytest.mark.parametrize(
    ("speed", "tolerance", "is_slower"),
    [(96, 5, False), (94, 5, True), (94, 10, False), (106, 5, False), (100, 0, False)],
)
def test_the_tolerance_is_how_much_slower_a_cell_may_be(
    tmp_path: Path, speed: float, tolerance: float, is_slower: bool
) -> None:
    found = compared(tmp_path, {"log": log_of(100)}, {"log": log_of(speed)}, tolerance)
    assert [one.is_slower for one in found.cells] == [False, is_slower]
    assert [one.cell for one in found.slower] == ["cell"] * is_slower
    assert json.loads(comparison_json(found))["is_fast_enough"] == (not is_slower)
    assert ("slower than allowed: cell in" in comparison_markdown(found)) == is_slower


def test_a_cell_without_a_speed_is_too_slow_where_the_first_run_has_one(tmp_path: Path) -> None:
    # One step is warm-up, and nothing is measured.
    found = compared(tmp_path, {"log": log_of(100)}, {"log": log_of(100, steps=1)})
    assert found.cells[1].speed is None and found.cells[1].is_slower
    other = compared(tmp_path / "b", {"log": log_of(100, steps=1)}, {"log": log_of(100)})
    assert not other.cells[1].is_slower


@pytest.mark.parametrize("state", ["failed", "cancelled", "running"])
def test_what_did_not_finish_is_too_slow_but_no_standard(tmp_path: Path, state: str) -> None:
    found = compared(tmp_path, {"log": log_of(100)}, {"log": log_of(100), "state": state})
    assert found.cells[1].is_slower and found.cells[1].speed is None
    other = compared(tmp_path / "b", {"log": log_of(100), "state": state}, {"log": log_of(9)})
    assert not other.cells[1].is_slower and other.cells[1].speed is None


def test_losses_are_judged_where_the_batches_are_alike(tmp_path: Path) -> None:
    found = compared(tmp_path, {"log": log_of(100)}, {"log": log_of(100)})
    assert found.cells[1].loss is not None and found.cells[1].loss.verdict == "equivalent"
    larger = BATCH | {"training.local_batch_size": 4}
    other = compared(tmp_path / "b", {"log": log_of(100)}, {"log": log_of(90), "options": larger})
    assert other.cells[1].loss is None
    assert other.cells[1].speed is not None


@pytest.mark.parametrize("special", [{"emulated": True}, {"device": "cpu"}, {"recipe": "other"}])
def test_cells_that_say_nothing_of_one_another_are_not_compared(
    tmp_path: Path, special: dict[str, Any]
) -> None:
    found = compared(tmp_path, {"log": log_of(100)}, {"log": log_of(50), **special})
    assert found.cells[1].speed is None and found.cells[1].reason
    assert not found.slower


def test_beside_the_published_number_stands_no_emulated_cell(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("real", "emulated"):
        special: dict[str, Any] = {"emulated": name == "emulated"}
        run.add(name, log_of(600), published_tokens_per_second_per_gpu=651.0, **special)
    run.add("other", log_of(600))
    real, emulated = compare_with_published([run.collect()], 5).cells
    assert real.speed is not None and real.is_slower
    assert real.speed.ratio == pytest.approx(600 / 651)
    assert (emulated.speed, emulated.is_slower) == (None, False)
    assert emulated.reason == "emulated numerics have no speed"


def test_the_table_beside_the_published_numbers_says_how_much_of_them_is_reached(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, baseline="base")
    run.add("base", log_of(600), published_tokens_per_second_per_gpu=750.0)
    run.add("fast", log_of(900), published_tokens_per_second_per_gpu=1000.0)
    run.add("other", log_of(300))
    table = published_table(run.collect())
    assert table is not None
    assert [row[:5] + row[6:] for row in table.rows] == [
        ("base", "750", "baseline", "600", "baseline", "0.80"),
        ("fast", "1,000", "+33.3%", "900", "+50.0%", "0.90"),
        ("other", "-", "-", "300", "-50.0%", "-"),
    ]
