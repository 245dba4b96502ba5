"""What `report` writes beside what it prints: files, figures and a page, from the logs alone."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.base.yamlfile import shown_path
from cookbook.results.charts import Chart, charts_of, running_mean
from cookbook.results.page import save_report
from tests.made_up_run import (
    RESTART_STEP,
    RESTARTED,
    STALL_STEP,
    STALLED,
    make_run,
    results_of,
)
from tests.submit import listing, submit

BASE = "671b-bf16-standard"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four cells, with a report."""
    folder = make_run(tmp_path_factory.mktemp("full"), steps=300)
    answer = submit("report", runs=folder.parent)
    assert (answer.status, answer.stderr) == (0, ""), answer
    (folder / "printed").write_text(answer.stdout)
    return folder


def test_the_printed_report_begins_the_file_and_says_where_the_page_is(full: Path) -> None:
    printed, _, where = (full / "printed").read_text().rpartition("\n\nAs a page: ")
    text = (full / "report.md").read_text()
    assert text.startswith(printed) and printed.startswith(f"# {full.name}")
    assert where.startswith(f"{shown_path(full / 'report.html')}, ")


def test_json_draws_and_writes_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    before = listing(folder)
    answer = submit("report", "--format", "json", runs=tmp_path)
    assert len(json.loads(answer.stdout)["cells"]) == 4 and listing(folder) == before


def test_the_page_needs_nothing_else(full: Path) -> None:
    page = (full / "report.html").read_text()
    assert len(page) < 60_000
    links = set(re.findall(r"https?://[^\"'<> )]+", page))
    assert links == {"http://www.w3.org/2000/svg", "https://example.org/article"}
    assert not re.search(r"@import|url\((?!#)|<(script|img|iframe)[^>]* src=", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_run_without_a_step_has_tables_of_dashes_and_no_figure(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    for cell in folder.glob("671b-*"):
        (cell / "status.json").write_text(json.dumps({"state": "running", "reason": None}))
        record = (cell / "cell.yaml").read_text()
        (cell / "cell.yaml").write_text(re.sub(r"published_.*\n", "", record))
        for log in cell.glob("attempt-*"):
            shutil.rmtree(log)
    save_report(*results_of(folder))
    page = (folder / "report.html").read_text()
    assert "<figure" not in page and "no cell has reached its first step" in page
    assert "partly finished: 0 of 4 cells finished, 4 running" in page


def test_names_and_reasons_are_text_and_no_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    evil = '</script><script>alert("1")</script> & ok'
    run, results = results_of(folder)
    first, second, *rest = results.cells
    named = replace(second, record=replace(second.record, name="a<b>&</script>"))
    failed = replace(first, measured=replace(first.measured, reason=evil))
    save_report(run, replace(results, cells=(failed, named, *rest)))
    page = (folder / "report.html").read_text()
    assert page.count("</script>") == 2 and "&lt;script&gt;alert" in page


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chart]:
    """The charts of four cells of 1,500 steps."""
    _, results = results_of(make_run(tmp_path_factory.mktemp("charts")))
    return {chart.name: chart for chart in charts_of(results)}


def test_bars_hold_the_interval_and_what_was_published(charts: dict[str, Chart]) -> None:
    base, deepep, mxfp8, _ = charts["throughput"].bars
    assert (base.text, base.base, base.published) == ("655, baseline", None, 651)
    assert deepep.text == "853, +30.2%" and deepep.base == base.value
    assert deepep.low is not None and deepep.high is not None and deepep.value is not None
    assert 0.9 * deepep.value < deepep.low < deepep.value < deepep.high < charts["throughput"].high
    assert mxfp8.published is None
    assert "published" in charts["throughput"].caption


def test_the_difference_is_from_the_baseline_at_the_same_step(charts: dict[str, Chart]) -> None:
    chart = charts["loss-difference"]
    assert len(chart.lines) == 3 and chart.band == pytest.approx(0.25)
    deepep, mxfp8, _ = chart.lines
    # The made-up losses of MXFP8 lie 0.04% higher.
    assert sum(mxfp8.y) / len(mxfp8.y) == pytest.approx(0.04, abs=0.01)
    assert abs(sum(deepep.y) / len(deepep.y)) < 0.01


def test_stalls_and_restarts_are_marked(charts: dict[str, Chart]) -> None:
    lines = {line.label: line for line in charts["step-time"].lines}
    assert STALL_STEP in [step for step, _ in lines[STALLED].marks]
    assert lines[RESTARTED].rules == (RESTART_STEP,) and lines[STALLED].rules == ()
    # Thinning keeps a stall.
    assert {seconds for _, seconds in lines[STALLED].marks} <= set(lines[STALLED].y)
    assert len(lines[STALLED].y) <= 100


def test_a_running_mean_stands_at_the_middle_of_its_steps() -> None:
    found = running_mean({step: float(step % 2) for step in range(1, 4001)}, 400)
    assert len(found) <= 400 and [*found.values()] == pytest.approx([0.5] * len(found))
    assert min(found) == pytest.approx(50.5)
