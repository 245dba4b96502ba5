"""What a report says besides its summary: headlines, intervals, verdicts, and what differs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.results.conditions import configuration, environment
from cookbook.results.headlines import headlines, partly_finished
from cookbook.results.page import render_page
from cookbook.results.result import Result
from cookbook.results.speed import FASTER, NOISE, STEPS, SpeedUp
from cookbook.results.table import Table
from cookbook.results.tables import loss_table, published_table, speed_table
from cookbook.run.run import read_run
from tests.made_up_run import RESTARTED, make_run, results_of

BASE = "671b-bf16-standard"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four cells of 1,500 steps."""
    return make_run(tmp_path_factory.mktemp("full"))


def test_conditions_show_what_differs_and_share_the_rest(full: Path) -> None:
    run = read_run(full)
    found = configuration(run)
    assert found.differing is not None
    rows = {row[0]: row[1:] for row in found.differing.rows}
    assert rows["precision"] == ("bf16", "bf16", "mxfp8", "mxfp8")
    assert rows["quantize.grouped_mm.mx.recipe_name"] == ("-", "-", "mxfp8", "mxfp8")
    assert all(len(set(row)) > 1 for row in rows.values())
    shared = dict(found.shared)
    assert shared["nodes"] == "32" and shared["training.seq_len"] == "8192"
    assert not shared.keys() & rows.keys()
    found = environment(run)
    shared = dict(found.shared)
    assert shared["commit of the cookbook"] == "33acf20"
    assert (shared["torch"], shared["gpu"], shared["driver"]) == (
        "2.10.0+cu128",
        "NVIDIA B200",
        "570.86.15",
    )
    assert found.differing is not None
    rows = {row[0]: row[1:] for row in found.differing.rows}
    assert rows["nodes"][0] == "32: worker-0 to worker-31"
    assert rows["nodes"][1] == "32: worker-1 to worker-32"
    assert rows["deep_ep"] == ("-", "1.2.1+29d31c0", "-", "1.2.1+29d31c0")


def test_a_restart_elsewhere_shows_the_newest_environment(full: Path, tmp_path: Path) -> None:
    folder = tmp_path / full.name
    shutil.copytree(full, folder)
    newest = folder / f"671b-{RESTARTED}" / "attempt-1" / "environment.json"
    content = json.loads(newest.read_text()) | {"nodes": ["worker-7"]}
    newest.write_text(json.dumps(content))
    found = environment(read_run(folder)).differing
    assert found is not None
    assert next(row for row in found.rows if row[0] == "nodes")[4] == "worker-7"


def test_headlines_name_the_fastest_and_the_verdicts(full: Path) -> None:
    _, results = results_of(full)
    fastest, losses = headlines(results)
    assert fastest.startswith("Fastest: 671b-mxfp8-deepep at 92")
    assert f"over {BASE} (95% interval +4" in fastest
    assert losses == (
        "Loss of 671b-bf16-deepep, 671b-mxfp8-standard and 671b-mxfp8-deepep: "
        "equivalent to the baseline's within ±0.25%."
    )
    assert partly_finished(results) is None


def test_headlines_do_not_call_noise_a_gain(full: Path) -> None:
    _, results = results_of(full)
    base, one, two, three = results.cells
    near = SpeedUp(1.01, 0.99, 1.03, NOISE, STEPS, 30)
    first = replace(one, speedup=1.01, speed=near)
    lines = headlines(replace(results, cells=(base, first)))
    assert lines[0].startswith(f"No cell is measurably faster than the baseline {BASE}. ")
    assert lines[0].endswith("(95% interval -1.0% to +3.0%): inside the noise.")
    assert "Fastest" not in lines[0]
    # Two cells whose intervals overlap are not told apart.
    second = replace(two, speedup=1.4, speed=SpeedUp(1.4, 1.3, 1.5, FASTER, STEPS, 30))
    third = replace(three, speedup=1.41, speed=SpeedUp(1.41, 1.32, 1.5, FASTER, STEPS, 30))
    lines = headlines(replace(results, cells=(base, second, third)))
    assert lines[1] == f"{two.name} (+40.0%) may be as fast: the intervals overlap."
    slow = replace(one, speedup=0.9, speed=SpeedUp(0.9, 0.88, 0.92, "slower", STEPS, 30))
    lines = headlines(replace(results, cells=(base, slow)))
    assert re.fullmatch(rf"No cell is faster than the baseline {BASE} at [\d,]+ \S+", lines[0])
    # Slower, but by no more than chance may do.
    close = replace(one, speedup=0.99, speed=SpeedUp(0.99, 0.97, 1.01, NOISE, STEPS, 30))
    (line, *_) = headlines(replace(results, cells=(base, close)))
    wide = f"; {one.name} (-1.0%, 95% interval -3.0% to +1.0%) may be as fast."
    assert line.startswith(f"No cell is faster than the baseline {BASE}") and line.endswith(wide)
    few = replace(one, speedup=1.3, speed=SpeedUp(1.3, None, None, None, STEPS, 4))
    lines = headlines(replace(results, cells=(base, few)))
    assert "+30.0%" in lines[0] and "(too few steps for an interval)" in lines[0]
    assert lines[0].startswith("No cell is measurably faster")
    # A wide interval hides no sure gain behind it.
    wide_one = replace(one, speedup=1.5, speed=SpeedUp(1.5, 0.9, 2.1, NOISE, STEPS, 30))
    (line, later, *_) = headlines(replace(results, cells=(base, wide_one, second)))
    sure = f"No cell but {two.name} (+40.0%, 95% interval +30.0% to +50.0%) is measurably faster"
    assert line.startswith(sure) and line.endswith("inside the noise.")
    assert later == f"{two.name} (+40.0%) may be as fast: the intervals overlap."
    # Without an interval none overlaps.
    later = headlines(replace(results, cells=(base, replace(few, speedup=1.42), second, third)))[1]
    assert later.startswith(f"{three.name} (+41.0%) and {two.name} (+40.0%) may be as fast: too")


def test_headlines_say_what_was_not_compared(full: Path) -> None:
    _, results = results_of(full)
    base, one, two, _ = results.cells

    def speeds(*cells: Result) -> list[str]:
        found = headlines(replace(results, cells=cells))
        return [line for line in found if not line.startswith("Loss")]

    unknown = {"speedup": None, "speed": None}
    alone, other = replace(one, **unknown), replace(two, **unknown)  # type: ignore[arg-type]
    missing = f"No speed-up is known of {one.name} and {two.name}: the baseline {BASE} "
    for status, words in (("failed", "failed"), ("running", "is running")):
        broken = replace(base, status=status, speedup=None)
        assert speeds(broken, alone, other) == [f"{missing}{words}."]
    assert speeds(alone, other) == [f"{missing}is not in this run."]
    # One cell that finished is no comparison, and an emulated one has no speed.
    failed = replace(alone, status="failed")
    (line,) = speeds(base, failed)
    assert re.fullmatch(f"Only {BASE} finished at .*: there is nothing to compare it with.", line)
    assert speeds(base) == []
    emulated = replace(alone, emulated=True)
    (line,) = speeds(base, emulated)
    assert line == f"{one.name} is emulated: the loss counts, the speed does not."
    # It would have none whatever became of its baseline.
    assert speeds(emulated) == [line]
    (line,) = speeds(base, two, failed)
    assert line.startswith(f"Fastest of those that finished: {two.name}")
    assert speeds(replace(base, emulated=True, speedup=None), alone) == [
        f"{BASE} is emulated: the loss counts, the speed does not.",
        f"No speed-up is known of {one.name}: the baseline {BASE} is emulated.",
    ]


def test_headlines_compare_no_cells_of_different_baselines(full: Path) -> None:
    _, results = results_of(full)
    base, one, two, three = results.cells
    settings = dict(results.settings)
    for cell in (two, three):
        settings[cell.name] = replace(settings[cell.name], baseline=two.name)
    other = replace(two, speedup=1.0, speed=None)
    lines = headlines(replace(results, cells=(base, one, other, three), settings=settings))
    assert [line.split(" at ")[0] for line in lines[:2]] == [
        f"Fastest: {one.name}",
        f"Fastest: {three.name}",
    ]
    assert not any("may be as fast" in line for line in lines)
    assert lines[-1].endswith("equivalent to that of its own baseline within ±0.25%.")


def test_tables_hold_intervals_and_verdicts(full: Path) -> None:
    _, results = results_of(full)
    speed, loss, published = speed_table(results), loss_table(results), published_table(results)
    assert speed is not None and loss is not None and published is not None
    rows = {row[0]: dict(zip(speed.head, row, strict=True)) for row in speed.rows}
    assert rows[BASE]["speed-up"] == "baseline" and rows[BASE]["verdict"] == "-"
    row = rows["671b-mxfp8-deepep"]
    # Both attempts warm up.
    assert (row["steps measured"], row["warm-up left out"]) == ("1,480", "20")
    assert row["verdict"] == "faster" and re.fullmatch(
        r"\+4\d\.\d% to \+4\d\.\d%", row["95% interval"]
    )
    assert [row[:2] for row in loss.rows[:2]] == [
        ("671b-bf16-deepep", "whole"),
        ("671b-bf16-deepep", "last tenth"),
    ]
    assert all(row[-1] == "equivalent" for row in loss.rows) and len(loss.rows) == 6
    assert published.rows[3][-1] == "1.00"


def test_of_two_verdicts_the_worse_one_is_the_headline(full: Path) -> None:
    _, results = results_of(full)
    base, one, *_ = results.cells
    assert one.loss is not None and one.loss_last_tenth is not None
    parted = replace(one, loss_last_tenth=replace(one.loss_last_tenth, verdict="different"))
    (line,) = headlines(replace(results, cells=(base, parted)))[1:]
    assert line == f"Loss of {one.name}: different from the baseline's."
    unsure = replace(one, loss=replace(one.loss, verdict="cannot tell"))
    (line,) = headlines(replace(results, cells=(base, unsure)))[1:]
    assert line == f"Loss of {one.name}: cannot be told from this run."


def test_a_column_that_says_nothing_of_any_row_is_left_out() -> None:
    table = Table(("cell", "hours", "cost"), (("a", "-", "1"), ("b", "-", "-")), "lrr")
    assert table.without_unknown() == Table(("cell", "cost"), (("a", "1"), ("b", "-")), "lr")
    # The first one names the rows.
    nothing = Table(("cell", "cost"), (("-", "-"),), "lr").without_unknown()
    assert nothing == Table(("cell",), (("-",),), "l")


def test_a_page_begins_with_what_no_reader_may_miss(tmp_path: Path) -> None:
    def alerts(page: str) -> list[str]:
        return re.findall(r'<p class="alert" role="note">(.*?)</p>', page)

    missing = "no figures: the package matplotlib is not installed here"
    _, results = results_of(make_run(tmp_path / "whole", steps=40))
    assert alerts(render_page(results, {}, [])) == []
    _, results = results_of(make_run(tmp_path / "partly", steps=40, partly=True))
    first, last = alerts(render_page(results, {}, [], missing))
    assert first.startswith("partly finished: 1 of 4 cells finished, ")
    assert last == missing
