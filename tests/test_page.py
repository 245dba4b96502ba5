"""What `report` writes beside what it prints: files, figures and a page, from the logs alone."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.base.yamlfile import shown_path
from cookbook.results.figures.draw import NAMES
from cookbook.results.keep import keep_report
from cookbook.results.loss import MARGIN
from tests.made_up_run import (
    RESTART_STEP,
    RESTARTED,
    STALL_STEP,
    STALLED,
    make_run,
    results_of,
)
from tests.submit import ROOT, submit

FIGURE_BYTES = 100_000
PAGE_BYTES = 2_000_000
BASE = "671b-bf16-standard"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four cells of 1,500 steps, with a report."""
    folder = make_run(tmp_path_factory.mktemp("full"))
    answer = submit("report", runs=folder.parent, timeout=120)
    assert (answer.status, answer.stderr) == (0, ""), answer
    (folder / "printed").write_text(answer.stdout)
    return folder


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which one cell is at its end, with a report."""
    folder = make_run(tmp_path_factory.mktemp("partly"), steps=60, partly=True)
    keep_report(*results_of(folder))
    return folder


def test_files_are_small_and_whole(full: Path) -> None:
    assert (full / "report.html").stat().st_size < PAGE_BYTES
    found = sorted(path.name for path in (full / "figures").iterdir())
    assert found == sorted(f"{name}.{suffix}" for name in NAMES for suffix in ("png", "svg"))
    for path in (full / "figures").iterdir():
        assert 1_000 < path.stat().st_size < FIGURE_BYTES, path.name
        if path.suffix == ".svg":
            assert path.read_text().startswith("<svg ") and path.read_text().endswith("</svg>\n")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_each_figure_is_drawn_for_wide_and_for_narrow_pages(partly: Path) -> None:
    page = (partly / "report.html").read_text()
    widths = [float(width) for width in re.findall(r'viewBox="0 0 ([\d.]+) ', page)]
    assert widths == [760, 352] * (len(widths) // 2) and len(widths) > 8


def _texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", path.read_text())


def test_the_end_of_the_loss_is_its_last_30_percent_and_the_margin_the_verdicts(
    full: Path,
) -> None:
    def least(name: str) -> float:
        texts = [text.replace(",", "") for text in _texts(full / f"figures/{name}.svg")]
        return min(float(text) for text in texts if re.fullmatch(r"\d+", text))

    assert least("loss") < 0.3 * 1500
    assert least("loss-last") >= 0.7 * 1500
    assert f"±{MARGIN:.2%}" in _texts(full / "figures/loss-difference.svg")


def test_what_is_printed_begins_the_file_and_says_where_the_page_is(full: Path) -> None:
    printed, _, where = (full / "printed").read_text().rpartition("\n\nAs a page: ")
    text = (full / "report.md").read_text()
    assert text.startswith(printed) and printed.startswith(f"# {full.name}")
    assert where.startswith(f"{shown_path(full / 'report.html')}, ")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures == [f"figures/{name}.svg" for name in NAMES]
    assert all((full / picture).is_file() for picture in pictures)


def test_the_page_needs_nothing_else(full: Path) -> None:
    page = (full / "report.html").read_text()
    # Names of XML, and where the published numbers are from.
    links = set(re.findall(r"https?://[^\"'<> )]+", page))
    assert links == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
        "https://example.org/article",
    }
    assert not re.search(r"@import|url\((?!#)|<(script|img|iframe)[^>]* src=", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_json_is_alone_on_standard_output_and_html_is_the_path(partly: Path) -> None:
    answer = submit("report", "--format", "json", runs=partly.parent)
    assert json.loads(answer.stdout)["run"] == partly.name and answer.stderr == ""
    answer = submit("report", "--format", "html", runs=partly.parent)
    assert answer.stdout == f"{shown_path(partly / 'report.html')}\n" and answer.stderr == ""


def test_a_cell_without_a_log_has_no_number(partly: Path) -> None:
    rows = {row[0]: row for row in _rows((partly / "report.html").read_text(), "table-cells")}
    waiting = rows["671b-mxfp8-deepep"]
    assert waiting[2:] == ["-/60", *["-"] * 6, "918 (1.41x)"]
    published = _rows((partly / "report.html").read_text(), "table-published")
    assert published[3] == ["671b-mxfp8-deepep", "918", "+41.0%", "-", "-", "-", "-"]
    # Without an end there is no speed-up, of any cell but what was published.
    assert [row[4] for row in published] == ["baseline", "-", "-", "-"]


def test_a_run_without_a_step_has_tables_of_dashes_and_no_figure(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    for log in folder.glob("*/attempt-*"):
        shutil.rmtree(log)
    for cell in folder.glob("671b-*"):
        status = {"state": "running", "reason": None}
        (cell / "status.json").write_text(json.dumps(status))
        record = (cell / "cell.yaml").read_text()
        (cell / "cell.yaml").write_text(re.sub(r"published_.*\n", "", record))
    keep_report(*results_of(folder))
    page = (folder / "report.html").read_text()
    assert "partly finished: 0 of 4 cells finished" in page and "<figure" not in page
    assert "no cell has come to its first step" in page
    assert not (folder / "figures").exists()
    for row in _rows(page, "table-cells"):
        assert not re.search(r"\d", "".join(row[3:])), row


def _rows(page: str, table: str) -> list[list[str]]:
    body = page[page.index(f'<table id="{table}"') :]
    body = body[body.index("<tbody>") : body.index("</tbody>")]
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row)]
        for row in body.replace("\n", " ").split("</tr>")[:-1]
    ]


def test_every_number_in_the_figures_is_in_the_logs(full: Path) -> None:
    """The labels of the bars are the medians and peaks of the results, and nothing else."""
    _, results = results_of(full)
    svg = (full / "figures" / "throughput.svg").read_text()
    said = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if ", " in text]
    measured = [f"{cell.tokens_per_second_per_gpu:,.0f}" for cell in results.cells]
    gains = ["", *(f"{100 * ((cell.speedup or 0) - 1):+.1f}%" for cell in results.cells[1:])]
    expected = [
        f"{tokens}, {gain or 'baseline'}" for tokens, gain in zip(measured, gains, strict=True)
    ]
    assert sorted(said) == sorted([*expected, "published 859, +32.0%", "published 918, +41.0%"])
    svg = (full / "figures" / "memory.svg").read_text()
    for cell in results.cells:
        assert f"{cell.memory_gib:.4g} GiB of 178" in svg


def test_stalls_and_restarts_are_marked(full: Path) -> None:
    svg = (full / "figures" / "step-time.svg").read_text()
    assert svg.count(">restart<") == 1 and "1 restart<" in svg
    _, results = results_of(full)
    by_name = {cell.name: cell for cell in results.cells}
    throughput = by_name[f"671b-{STALLED}"].throughput
    assert throughput is not None and STALL_STEP in throughput.stalls
    assert f"{len(throughput.stalls)} stalls" in svg
    curve = results.curves[f"671b-{RESTARTED}"]
    assert next(step.step for step in curve if step.attempt == 1) == RESTART_STEP
    # Its rows say what the later attempt does, not what it replaced.
    assert len(curve) == 1500


def test_without_matplotlib_the_report_says_what_to_install(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", steps=30)
    (tmp_path / "hidden" / "matplotlib").mkdir(parents=True)
    lost = 'raise ModuleNotFoundError("No module named \'matplotlib\'", name="matplotlib")\n'
    (tmp_path / "hidden" / "matplotlib" / "__init__.py").write_text(lost)
    variables = {"PYTHONPATH": str(tmp_path / "hidden")}
    answer = submit("report", runs=folder.parent, variables=variables)
    assert answer.status == 0 and "| 671b-bf16-deepep" in answer.stdout
    remedy = "the package matplotlib is not installed here; run: ./setup.sh"
    (line,) = answer.stderr.splitlines()
    assert line == f"submit.py: no figures: {remedy}"
    assert remedy in (folder / "report.md").read_text()
    assert remedy in (folder / "report.html").read_text()
    assert not (folder / "figures").exists()
    assert "figures/" not in answer.stdout


def test_a_figure_that_is_no_longer_true_goes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    keep_report(*results_of(folder))
    (folder / "figures" / "mine.png").write_bytes(b"mine")
    assert (folder / "figures" / "loss-difference.svg").is_file()
    for path in folder.glob(f"{BASE}/attempt-*/train.log"):
        path.unlink()
    keep_report(*results_of(folder))
    left = {path.name for path in (folder / "figures").iterdir()}
    assert not {"loss-difference.svg", "loss-difference.png"} & left
    assert {"loss.svg", "loss.png", "mine.png"} <= left
    assert "loss-difference" not in (folder / "report.md").read_text()


def test_what_a_run_says_is_text_and_no_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60)
    evil = '<script>alert("1")</script> & $x_1$ ok'
    run, results = results_of(folder)
    cells = (replace(results.cells[0], reason=evil), *results.cells[1:])
    names = {cell.name: cell.name for cell in cells} | {cells[1].name: "a<b>&$x_1$"}
    cells = tuple(replace(cell, name=names[cell.name]) for cell in cells)
    results = replace(
        results,
        cells=cells,
        settings={names[name]: setting for name, setting in results.settings.items()},
        curves={names[name]: curve for name, curve in results.curves.items()},
    )
    keep_report(run, results)
    page = (folder / "report.html").read_text()
    assert page.count("<script>") == 1 and "&lt;script&gt;alert" in page
    # A dollar sign begins no formula.
    assert "a&lt;b&gt;&amp;$x_1$</text>" in (folder / "figures" / "loss.svg").read_text()


def test_an_old_run_and_one_without_cells_have_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "matrix-20261121-192057"
    shutil.copytree(ROOT / "tests" / "old_run", folder)
    keep_report(*results_of(folder))
    assert "finished, emulated" in (folder / "report.html").read_text()
    for cell in folder.glob("debug-*"):
        shutil.rmtree(cell)
    record = json.loads((folder / "run.json").read_text()) | {"cells": []}
    (folder / "run.json").write_text(json.dumps(record))
    keep_report(*results_of(folder))
    assert "<h1>" in (folder / "report.html").read_text()


def test_repeats_are_a_table_and_one_cell(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=60, repeats=3)
    keep_report(*results_of(folder))
    page = (folder / "report.html").read_text()
    assert len(_rows(page, "table-cells")) == 4
    repeats = _rows(page, "table-repeats")
    assert [row[1] for row in repeats[:3]] == [BASE, f"{BASE}-r2", f"{BASE}-r3"]
    assert len(repeats) == 12
    assert [row[9] for row in _rows(page, "table-speed")] == ["-", *["3 repeats"] * 3]
    _, _, conditions = page.replace("<wbr>", "").partition('id="configuration"')
    assert BASE in conditions and f"{BASE}-r2" not in conditions
