"""The report says what happened, for people and for programs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from cookbook.base.tables import display_width
from cookbook.results.report import render_json, render_markdown
from cookbook.results.result import CellSetting, Result, RunResults
from cookbook.run.run import RunRecord

SETTING = CellSetting(
    total_steps=20,
    device="cuda",
    stand_in_for=None,
    baseline="671b-bf16-standard",
    published_speedup=None,
    raw_final_loss=None,
)
BLANK = Result(
    name="",
    recipe="deepseek_v3_671b",
    precision="bf16",
    ep_backend="standard",
    status="queued",
    reason=None,
    steps=None,
    tokens_per_second_per_gpu=None,
    tflops_per_gpu=None,
    mfu=None,
    memory_gib=None,
    final_loss=None,
    speedup=None,
    published_tokens_per_second_per_gpu=None,
    attention=None,
    mean_attended_length=None,
    emulated=False,
    active=None,
)
BASELINE = replace(
    BLANK,
    name="671b-bf16-standard",
    status="finished",
    steps=20,
    tokens_per_second_per_gpu=651.4,
    tflops_per_gpu=171.23,
    mfu=7.61,
    memory_gib=150.421,
    final_loss=8.12345,
    speedup=1.0,
    published_tokens_per_second_per_gpu=651.0,
)
DEEPEP = replace(
    BASELINE,
    name="671b-bf16-deepep",
    ep_backend="deepep",
    status="running",
    steps=7,
    tokens_per_second_per_gpu=1859.0,
    speedup=1.3195,
    published_tokens_per_second_per_gpu=859.0,
)
FAILED = replace(
    BLANK, name="671b-mxfp8-standard", status="failed", reason="rank 3: OOM |\nmore", steps=None
)
REFUSED = replace(BLANK, name="671b-mxfp8-deepep", status="refused", reason="needs SM100")


def run_of(*cells: Result, **settings: CellSetting) -> RunResults:
    return RunResults(
        run=RunRecord(
            run="matrix-20261120-182922",
            scheduler="slurm",
            cells=tuple(cell.name for cell in cells),
            sweep="matrix",
            created="2026-11-20T18:29:22+00:00",
            user="ada",
            commit="33acf20",
            cluster="soperator-b200",
            stack="2026.02",
            baseline="671b-bf16-standard",
        ),
        cells=cells,
        settings={cell.name: settings.get(cell.name.replace("-", "_"), SETTING) for cell in cells},
    )


def table_of(text: str) -> dict[str, dict[str, str]]:
    """cell -> column -> text, read from the Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_every_cell_appears_with_its_figures() -> None:
    published = {DEEPEP.name.replace("-", "_"): replace(SETTING, published_speedup=859 / 651)}
    run = run_of(BASELINE, DEEPEP, FAILED, REFUSED, **published)
    table = table_of(render_markdown(run))
    assert list(table) == [c.name for c in (BASELINE, DEEPEP, FAILED, REFUSED)]
    assert table[BASELINE.name] == {
        "cell": "671b-bf16-standard",
        "status": "finished",
        "steps": "20",
        "tokens/s/GPU": "651",
        "speed-up": "baseline",
        "TFLOPs/GPU": "171.2",
        "MFU": "7.6%",
        "memory GiB": "150.42",
        "final loss": "8.1235",
        "published": "651",
    }
    assert table[DEEPEP.name]["steps"] == "7/20"
    assert table[DEEPEP.name]["tokens/s/GPU"] == "1,859"
    assert table[DEEPEP.name]["speed-up"] == "1.32x"
    assert table[DEEPEP.name]["published"] == "859 (1.32x)"
    assert table[FAILED.name]["steps"] == "-/20"
    assert table[REFUSED.name]["steps"] == "-"
    assert table[REFUSED.name]["tokens/s/GPU"] == "-"


def test_the_table_is_aligned() -> None:
    wide = replace(BLANK, name="671b-größe-模型")
    text = render_markdown(run_of(BASELINE, wide, FAILED))
    widths = {display_width(line) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_head_says_what_ran_where() -> None:
    text = render_markdown(run_of(BASELINE))
    assert text.startswith("# matrix-20261120-182922\n")
    for fact in ("soperator-b200", "2026.02", "33acf20", "ada", "2026-11-20T18:29:22"):
        assert fact in text
    assert "stand-in" not in text
    assert "cpu" not in text


def test_what_stood_in_for_what() -> None:
    setting = replace(SETTING, stand_in_for="deepseek_v3_671b", device="cpu")
    cell = replace(BASELINE, name="debug", recipe="debug", mfu=None)
    text = render_markdown(run_of(cell, debug=setting))
    assert "debug ran instead of deepseek_v3_671b" in text
    assert "CPU figure" in text


def test_reasons_stand_below_the_table() -> None:
    text = render_markdown(run_of(BASELINE, FAILED, REFUSED))
    notes = [line for line in text[text.rindex("\n|") :].splitlines() if line.startswith("- ")]
    assert notes == [
        "- 671b-mxfp8-standard (failed): rank 3: OOM | more",
        "- 671b-mxfp8-deepep (refused): needs SM100",
    ]


def test_emulated_cells_are_labelled() -> None:
    cell = replace(DEEPEP, emulated=True, speedup=None, status="finished", reason="emulated")
    row = table_of(render_markdown(run_of(BASELINE, cell)))[cell.name]
    assert row["status"] == "finished, emulated"
    assert row["speed-up"] == "-"


def test_a_loss_that_is_no_number_shows_as_such() -> None:
    cell = replace(BASELINE, name="a", final_loss=None)
    text = render_markdown(run_of(cell, a=replace(SETTING, raw_final_loss=math.nan)))
    assert table_of(text)["a"]["final loss"] == "nan"


@pytest.mark.parametrize(("tokens", "shown"), [(99.96, "100"), (3.14159, "3.14"), (0.5, "0.5")])
def test_few_tokens_keep_their_decimals(tokens: float, shown: str) -> None:
    cell = replace(BASELINE, tokens_per_second_per_gpu=tokens)
    assert table_of(render_markdown(run_of(cell)))[cell.name]["tokens/s/GPU"] == shown


def test_a_run_without_cells_has_a_report() -> None:
    assert "cell" in render_markdown(run_of())
    assert json.loads(render_json(run_of()))["cells"] == []


def test_json_has_the_promised_fields() -> None:
    report = json.loads(render_json(run_of(BASELINE, FAILED)))
    assert list(report) == ["run", "sweep", "cells", "baseline"]
    first, second = report["cells"]
    promised = {
        "name",
        "recipe",
        "precision",
        "ep_backend",
        "status",
        "reason",
        "steps",
        "tokens_per_second_per_gpu",
        "tflops_per_gpu",
        "mfu",
        "memory_gib",
        "final_loss",
        "speedup",
        "published_tokens_per_second_per_gpu",
    }
    seen = {"attention", "mean_attended_length", "emulated", "active", "resumptions"}
    seen |= {"throughput", "speed", "loss", "loss_last_tenth", "repeats"}
    seen |= {"gpu_hours", "cost_per_billion_tokens"}
    seen |= {"predicted_tokens_per_second_per_gpu", "predicted_largest"}
    seen |= {"history", "router_load", "profiled"}
    assert promised | seen == set(first)
    assert first["tokens_per_second_per_gpu"] == 651.4
    assert second["tokens_per_second_per_gpu"] is None
    assert second["steps"] is None


def test_a_cell_that_is_slower_than_predicted_is_called_that() -> None:
    near = replace(
        BASELINE,
        predicted_tokens_per_second_per_gpu=700.0,
        predicted_largest="attention",
    )
    far = replace(DEEPEP, predicted_tokens_per_second_per_gpu=2500.0, predicted_largest="host")
    run = run_of(near, replace(far, tokens_per_second_per_gpu=1859.0), FAILED)
    text = render_markdown(run)
    table = table_of(text)
    assert table[BASELINE.name]["predicted"] == "700"
    assert table[DEEPEP.name]["predicted"] == "2,500"
    assert table[FAILED.name]["predicted"] == "-"
    (line,) = [line for line in text.splitlines() if "slower than predicted" in line]
    assert line.startswith(f"- {DEEPEP.name}: 26% slower than predicted (2,500 tokens/s/GPU; ")
    assert "within 15% is usual" in line
    assert "look first at host" in line


def test_json_is_valid_whatever_was_measured() -> None:
    cell = replace(BASELINE, final_loss=math.nan, mfu=math.inf, active={"a": [math.nan, 1]})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads(render_json(run_of(cell)), parse_constant=refuse)
    assert report["cells"][0]["final_loss"] is None
    assert report["cells"][0]["mfu"] is None
    assert report["cells"][0]["active"] == {"a": [None, 1]}


def test_a_column_that_says_nothing_is_left_out() -> None:
    cell = replace(BASELINE, mfu=None, published_tokens_per_second_per_gpu=None)
    row = table_of(render_markdown(run_of(cell)))[cell.name]
    assert "MFU" not in row and "published" not in row
    assert row["final loss"] == "8.1235"


def attending(cell: Result, attention: str | None, length: float | None) -> Result:
    return replace(cell, attention=attention, mean_attended_length=length)


def facts_of(text: str) -> list[str]:
    head = text[: text.index("\n|")]
    return [line for line in head.splitlines() if "attention" in line or "WARNING" in line]


def test_attention_that_all_cells_share_is_said_once() -> None:
    # A cell that has not begun knows nothing, and differs from none.
    cells = [attending(BASELINE, "flex", 812.4), attending(DEEPEP, "flex", 812.3), FAILED]
    text = render_markdown(run_of(*cells))
    assert facts_of(text) == ["- attention: flex; a token attends to 812 tokens on average"]
    assert not {"attention", "attended tokens"} & set(table_of(text)[BASELINE.name])
    assert facts_of(render_markdown(run_of(BASELINE))) == []


def test_kinds_of_attention_that_differ_are_a_column() -> None:
    cells = [attending(BASELINE, "flex", 4096.5), attending(DEEPEP, "flash_attention_4", 4096.5)]
    text = render_markdown(run_of(*cells))
    assert facts_of(text) == ["- attention: a token attends to 4,096 tokens on average"]
    rows = table_of(text)
    assert [rows[cell.name]["attention"] for cell in cells] == ["flex", "flash_attention_4"]
    assert "attended tokens" not in rows[BASELINE.name]


def test_cells_on_other_masks_are_warned_of() -> None:
    cells = [attending(BASELINE, "flex", 812.0), attending(DEEPEP, "flex", 2600.0)]
    text = render_markdown(run_of(*cells, FAILED))
    kind, warning = facts_of(text)
    assert kind == "- attention: flex"
    assert warning == (
        "- WARNING: cells were trained on different masks: a token attends to 2,600 tokens in "
        "671b-bf16-deepep and to 812 in 671b-bf16-standard; do not compare their speed"
    )
    rows = table_of(text)
    assert [row["attended tokens"] for row in rows.values()] == ["812", "2,600", "-"]
    # Another batch of the same corpus has another mean.
    near = [attending(BASELINE, "flex", 812.0), attending(DEEPEP, "flex", 900.0)]
    assert facts_of(render_markdown(run_of(*near))) == ["- attention: flex"]
    assert table_of(render_markdown(run_of(*near)))[DEEPEP.name]["attended tokens"] == "900"


def test_json_has_attention_by_cell() -> None:
    report = json.loads(render_json(run_of(attending(BASELINE, "flex", 812.3), FAILED)))
    found = [(cell["attention"], cell["mean_attended_length"]) for cell in report["cells"]]
    assert found == [("flex", 812.3), (None, None)]


def test_the_self_check_is_told_with_its_largest_error() -> None:
    found = {"kernels": 4, "worst": 0.43, "worst_kernel": "linear layer bf16", "seconds": 3.1}
    one = replace(BASELINE, active={"self_check": found})
    other = replace(DEEPEP, active={"self_check": found | {"worst": 0.625, "worst_kernel": "rows"}})
    unchecked = replace(FAILED, active={"self_check": None})
    # Older runs say nothing of it, and nothing is said of them.
    older = replace(BLANK, name="older", active={"dispatch": "standard"})
    text = render_markdown(run_of(one, other, unchecked, older))
    assert (
        "- self-check: every kernel was compared with a reference before the first step; the "
        "largest error is 62% of what its format allows (rows in 671b-bf16-deepep)\n"
    ) in text
    assert "- self-check: switched off in 671b-mxfp8-standard\n" in text
    assert "self-check" not in render_markdown(run_of(older))
