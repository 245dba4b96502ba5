"""The bars of docs/performance.md: the page says what was measured, and what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bars
from bench.step_points import POINTS, compare, read_points
from cookbook.base.paths import ROOT

PAGE = ROOT / "docs/performance.md"


def test_the_page_has_the_tables_and_the_figure_of_the_data() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert bars.judged() in page
    assert bars.measured_table() in page
    assert bars.FIGURE.relative_to(PAGE.parent).as_posix() in page
    figure = bars.FIGURE.read_text(encoding="utf-8")
    for name, run in bars.read_runs()["long"].items():
        assert name in figure
        assert f"{run['tokens_per_second_per_gpu']:,.0f}" in figure


def test_what_was_foretold_is_what_was_committed() -> None:
    """A prediction that was changed after the run would be none."""
    kept = json.loads((POINTS.parent / "time-predicted.json").read_text())["points"]
    committed = {
        (one["group"], one["name"], one["documents"]): one["tokens_per_second_per_gpu"]
        for one in kept
    }
    foretold = [point for point in read_points() if point.foretold]
    assert len(foretold) >= 15 + 19
    for point in foretold:
        assert point.foretold == committed[point.group, point.name, point.documents], point.name


def test_losses_and_memory_are_what_the_page_says() -> None:
    """Losses within 2e-5, with real routing 9.1e-5; memory within 5%."""
    rows = [line.split("|")[1:-1] for line in bars.measured_table().splitlines()[2:]]
    assert len(rows) == 15
    for row in rows:
        name, predicted, reserved, off = (row[index].strip() for index in (0, 6, 7, 10))
        assert abs(float(predicted) / float(reserved) - 1) < 0.05
        assert not off or float(off) <= (9.1e-5 if "real" in name else 2e-5)


def test_a_bar_that_is_missed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(bars.MEASURED.read_text())
    for one in content["rounds"]:
        for name, run in one["runs"].items():
            run["tokens_per_second_per_gpu"] = 160.0 if name.startswith("fast") else 100.0
    path = tmp_path / "bars.json"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(bars, "MEASURED", path)
    lines = bars.judged().splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == [
        "met",
        "met",
        "**missed**",
        "met",
        "met",
    ]
    assert all(line.count("1.600x") == 1 for line in lines)


def test_what_is_tried_next_is_predicted_as_the_page_says() -> None:
    table = (
        PAGE.read_text(encoding="utf-8").partition("**Tried next**")[2].partition("\n    python")[0]
    )
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| fast")]
    assert len(rows) == 7
    points = {(one.name, one.documents): one for one in read_points()}
    for row in rows:
        name, documents, speed, gib = (word.strip() for word in row)
        (found,) = compare([points[name, documents]])
        assert found.point.measured is None
        assert speed == f"{found.predicted.tokens_per_second_per_gpu:,.0f}", name
        assert gib == f"{bars._memory_gib(found.point):.0f}", name
