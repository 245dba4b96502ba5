"""The tables of predicted and measured steps, and how a measurement comes into them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import step_times
from bench.step_points import POINTS, cell_of_point, compare, read_points


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the data file with four points, two of them not measured."""
    content = json.loads(POINTS.read_text())
    wanted = [p for p in content["points"] if p["group"] == "8 layers, 2 H200"]
    measured = [p for p in wanted if p.get("measured")][:2]
    waiting = [{**p, "measured": None} for p in wanted if p not in measured][-2:]
    path = tmp_path / "time.json"
    path.write_text(json.dumps({**content, "points": [*measured, *waiting]}))
    monkeypatch.setattr(step_times, "POINTS", path)
    return path


def throughput(path: Path, name: str, speeds: list[float], reason: str | None = None) -> Path:
    rounds = [
        {
            "corpus": "short",
            "runs": {name: {"tokens_per_second_per_gpu": speed, "reason": reason}},
        }
        for speed in speeds
    ]
    path.write_text(json.dumps({"rounds": rounds}))
    return path


def test_the_table_has_what_was_measured_and_what_was_not(points: Path) -> None:
    comparisons = list(compare(read_points(points)))
    text = step_times.tables(comparisons)
    assert "**8 layers, 2 H200**" in text
    assert "**8 layers, 2 H200, not measured yet**" in text
    first = comparisons[0]
    assert first.error
    assert f"{first.error:+.1%}" in text
    assert text.count("| held out") + text.count("| to fit") == 2
    # A point with a note is of other code: it stands in the table, and not in the mean.
    others = [replace(one, point=replace(one.point, note="other code")) for one in comparisons]
    assert "mean error" in text
    assert "mean error" not in step_times.tables(others)
    assert f"{first.point.name} (other code)" in step_times.tables(others)
    # Slower than it was: the error is above 0.
    slower = first.predicted.tokens_per_second_per_gpu < (first.point.measured or 0)
    assert slower is (first.error > 0)


def test_a_measurement_is_noted_at_its_own_point(
    points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [p for p in read_points(points) if p.measured is None and p.documents == "short"]
    kept_speed = 12_500
    key = {"group": waiting[0].group, "name": waiting[0].name, "documents": "short"}
    kept = {"points": [{**key, "tokens_per_second_per_gpu": kept_speed}]}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    monkeypatch.setattr(step_times, "PREDICTED", tmp_path / "kept.json")
    found = throughput(tmp_path / "throughput.json", waiting[0].name, [10_000, 30_000, 11_000])
    assert step_times.note(found, 2, 8) == 1
    (noted,) = [
        p for p in read_points(points) if (p.name, p.documents) == (waiting[0].name, "short")
    ]
    assert noted.measured == 11_000
    # What was kept before stays beside it, and is no prediction of today's model.
    assert noted.foretold == kept_speed
    text = step_times.tables([*compare(read_points(points))])
    assert f" {11_000 / kept_speed - 1:+.1%} |" in text
    assert "1 points predicted before they were measured" in text
    # Other GPUs or layers are another group; a run that failed is none.
    before = points.read_text()
    assert step_times.note(found, 4, 8) == step_times.note(found, 2, 27) == 0
    failed = throughput(tmp_path / "failed.json", waiting[0].name, [5.0], "died")
    assert step_times.note(failed, 2, 8) == 0
    assert points.read_text() == before


def test_what_is_predicted_anew_leaves_what_was_predicted_before(
    points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = list(compare(read_points(points)))
    measured = next(one.point for one in comparisons if one.error is not None)
    waiting = [one for one in comparisons if one.error is None]
    key = {"group": measured.group, "name": measured.name, "documents": measured.documents}
    old = {**key, "tokens_per_second_per_gpu": 1}
    stale = {**old, "name": waiting[0].point.name, "documents": waiting[0].point.documents}
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"points": [old, stale]}))
    monkeypatch.setattr(step_times, "PREDICTED", kept)
    step_times.keep(comparisons)
    found = json.loads(kept.read_text())["points"]
    assert found[0] == old
    assert [one["tokens_per_second_per_gpu"] for one in found[1:]] == [
        round(one.predicted.tokens_per_second_per_gpu) for one in waiting
    ]


def test_every_point_is_a_cell_of_its_own() -> None:
    points = read_points()
    keys = {(p.group, p.name, p.documents) for p in points}
    assert len(keys) == len(points)
    for point in points:
        cell = cell_of_point(point)
        gpus = 256 if "B200" in point.group else point.gpus
        assert cell.world == gpus
        assert point.group.endswith(("2 H200", "4 H200", "256 B200"))
        assert cell.uses_deepep is (point.ep_backend == "deepep")
        assert (cell.hooks == "") is point.released
        sizes = {"16B_8layers": "8 layers", "16B": "27 layers", "671B": "671B"}
        assert point.group.startswith(sizes[cell.options["model.flavor"]])


def test_what_was_predicted_beforehand_is_of_points_that_are_there() -> None:
    kept = json.loads(step_times.PREDICTED.read_text())
    named = {(p["group"], p["name"], p["documents"]) for p in kept["points"]}
    points = read_points()
    assert len(named) == len(kept["points"]) >= 12
    assert named <= {(p.group, p.name, p.documents) for p in points}
