"""The report's text: tables, facts, notes, validation, the answer in three sentences; its JSON."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.cli.main import main
from cookbook.config.sweep import load_sweep
from cookbook.predict.step import StepTime
from cookbook.results.charts import charts_of
from cookbook.results.columns import CELLS, FIELDS, render_json, report_tables
from cookbook.results.page import configuration, environment
from cookbook.results.result import Judged, Measured, Result, RunResults
from cookbook.results.summary import facts, headlines, notes, render_markdown
from cookbook.results.verdicts import FASTER, NOISE, STEPS, SpeedUp, Throughput
from cookbook.run.record import CellRecord
from cookbook.run.run import RunRecord
from tests.made_up_run import RESTARTED, Run, make_run, metrics_line, results_of

BASE = "671b-bf16-standard"
RECORD = CellRecord(
    *(BASE, "deepseek_v3_671b", "bf16", "standard"), device="cuda", options={"training.steps": 20}
)
BLANK = Result(RECORD, Measured("queued"), Judged(baseline=BASE))
BASELINE = Result(
    replace(RECORD, published_tokens_per_second_per_gpu=651.0),
    Measured(
        status="finished",
        steps=20,
        throughput=Throughput(651.4, 651.0, 652.0, 651.4, 15, 5, (), 0.0),
        tflops_per_gpu=171.23,
        mfu=7.61,
        memory_gib=150.421,
        final_loss=8.12345,
    ),
    Judged(baseline=BASE, speedup=1.0),
)


def changed(cell: Result, tokens: float | None = None, **changes: Any) -> Result:
    """The cell with each change in the first part that has the field."""
    if tokens is not None:
        assert cell.measured.throughput is not None
        changes["throughput"] = replace(cell.measured.throughput, median=tokens)
    parts: dict[str, Any] = {name: getattr(cell, name) for name in ("measured", "judged", "record")}
    for name, part in parts.items():
        own = [field.name for field in fields(part) if field.name in changes]
        parts[name] = replace(part, **{key: changes.pop(key) for key in own})
    assert not changes
    return replace(cell, **parts)


DEEPEP = changed(
    BASELINE,
    name="671b-bf16-deepep",
    status="running",
    steps=7,
    tokens=1859.0,
    speedup=1.3195,
    published_tokens_per_second_per_gpu=859.0,
)
FAILED = changed(BLANK, name="671b-mxfp8-standard", status="failed", reason="rank 3: OOM |\nmore")
REFUSED = changed(BLANK, name="671b-mxfp8-deepep", status="refused", reason="needs SM100")


def step_of(speed: float) -> StepTime:
    return StepTime(0, {"host": 900.0, "loss": 100.0}, 0.0, speed, None)


def run_of(*cells: Result, **changes: Any) -> RunResults:
    """A run of `cells`, each with `changes`."""
    names = tuple(cell.name for cell in cells)
    record = RunRecord("slurm", names, "matrix-20261120-182922", "matrix", baseline=BASE)
    return RunResults(record, tuple(changed(cell, **changes) for cell in cells))


def table_of(results: RunResults, name: str = CELLS) -> dict[str, dict[str, str]]:
    """cell -> column -> text."""
    table = report_tables(results)[name]
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


def test_every_cell_appears_with_its_numbers() -> None:
    run = run_of(BASELINE, DEEPEP, FAILED, REFUSED, published_speedup=859 / 651)
    table = table_of(run)
    assert table[BASE] == {
        "cell": BASE,
        "tokens/s/GPU": "651",
        "speed-up": "baseline",
        "final loss": "8.1235",
        "status": "finished",
        "steps": "20",
        "TFLOPs/GPU": "171.2",
        "MFU": "7.6%",
        "memory GiB": "150.42",
        "published": "651",
    }
    assert [row["steps"] for row in table.values()] == ["20", "7/20", "-/20", "-"]
    assert [row["tokens/s/GPU"] for row in table.values()] == ["651", "1,859", "-", "-"]
    assert [table[DEEPEP.name][n] for n in ("speed-up", "published")] == ["1.32x", "859 (1.32x)"]
    lines = [line for line in render_markdown(run).splitlines() if line.startswith("|")]
    assert len(lines) == 6 and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("change", "column", "text"),
    [
        ({"tokens": 3.14159}, "tokens/s/GPU", "3.14"),
        ({"tflops_per_gpu": 0.0213}, "TFLOPs/GPU", "0.021"),
        ({"emulated": True}, "status", "finished, emulated"),
        ({"predicted": step_of(700)}, "predicted", "700"),
        ({"published_tokens_per_second_per_gpu": None}, "published", None),
        ({"attention": "flex", "mean_attended_length": 812.4}, "attention", None),
    ],
)
def test_a_column_needs_values(change: dict[str, Any], column: str, text: str | None) -> None:
    assert table_of(run_of(changed(BASELINE, **change)))[BASE].get(column) == text


def test_json_has_the_promised_fields_and_null_for_the_unknown() -> None:
    cell = changed(BASELINE, final_loss=math.nan, mfu=math.inf, environment={"a": [math.nan, 1]})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads(render_json(run_of(cell, FAILED)), parse_constant=refuse)
    assert list(report) == ["run", "sweep", "cells", "baseline"]
    first, second = report["cells"]
    promised = (
        "name recipe precision ep_backend status reason steps tokens_per_second_per_gpu "
        "tflops_per_gpu mfu memory_gib final_loss validation_loss speedup "
        "published_tokens_per_second_per_gpu attention mean_attended_length emulated active "
        "resumptions history throughput speed loss "
        "loss_last_tenth gpu_hours cost_per_billion_tokens predicted_tokens_per_second_per_gpu "
        "predicted_largest router_load profiled repeats"
    )
    assert set(promised.split()) == set(first) == set(second)
    assert [one["tokens_per_second_per_gpu"] for one in (first, second)] == [651.4, None]
    assert (first["final_loss"], first["mfu"], first["active"]) == (None, None, {"a": [None, 1]})


def test_each_field_of_the_json_is_the_value_of_its_name() -> None:
    """Each part's values are objects that equal nothing else."""
    parts: tuple[Any, ...] = (BASELINE.record, BASELINE.judged, BASELINE.measured)
    record, judged, measured = (
        replace(part, **{field.name: object() for field in fields(part)}) for part in parts
    )
    named = {
        f.name: getattr(part, f.name) for part in (record, judged, measured) for f in fields(part)
    }
    cell, checked = Result(record, measured, judged), 0
    for name, _, value in FIELDS:
        if name in named:
            assert value(cell) is named[name], name
            checked += 1
    assert checked == len(FIELDS) - 5


def test_a_cell_that_is_slower_than_predicted_is_named() -> None:
    near = changed(BASELINE, predicted=step_of(700))
    far = changed(DEEPEP, predicted=step_of(2500))
    (line,) = notes(run_of(near, far, REFUSED))[1:]
    assert line.startswith(f"{DEEPEP.name}: 26% slower than predicted (2,500 tokens/s/GPU; ")
    assert "look first at host" in line


def attending(cell: Result, kind: str, length: float) -> Result:
    return changed(cell, attention=kind, mean_attended_length=length)


@pytest.mark.parametrize(
    ("one", "other", "fact", "is_warned"),
    [
        (812.4, 812.3, "flex; a token attends to 812 tokens", False),
        (812.0, 900.0, "attention: flex", False),
        (812.0, 2600.0, "attention: flex", True),
    ],
)
def test_other_masks_are_warned_of(one: float, other: float, fact: str, is_warned: bool) -> None:
    cells = attending(BASELINE, "flex", one), attending(DEEPEP, "flex", other)
    found = facts(run_of(*cells, FAILED))
    assert fact in "\n".join(found)
    assert any(line.startswith("WARNING") for line in found) == is_warned


def test_whole_sequences_are_named() -> None:
    cell = changed(attending(BASELINE, "sdpa", 128.5), options={"training.seq_len": 256})
    words = "a token attends to 128 tokens on average"
    assert f"attention: sdpa; {words}, in whole sequences of 256" in facts(run_of(cell))
    assert f"attention: sdpa; {words}" in facts(run_of(attending(cell, "sdpa", 128.1)))


def sped(cell: Result, ratio: float, low: float | None, high: float | None, verdict: str) -> Result:
    speed = SpeedUp(ratio, low, high, verdict if low else None, STEPS, 30)
    return changed(cell, status="finished", speedup=ratio, speed=speed)


OTHER = changed(DEEPEP, name="671b-mxfp8-deepep")


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        ([sped(DEEPEP, 1.4, 1.3, 1.5, FASTER)], [f"Fastest: {DEEPEP.name}", "+40.0%"]),
        ([sped(DEEPEP, 1.01, 0.99, 1.03, NOISE)], ["-1.0% to +3.0%", "inside the noise"]),
        ([sped(DEEPEP, 1.3, None, None, NOISE)], ["too few steps"]),
        ([sped(DEEPEP, 0.99, 0.97, 1.01, NOISE)], ["No cell is faster", "may be as fast"]),
        (
            [sped(DEEPEP, 1.4, 1.3, 1.5, FASTER), sped(OTHER, 1.41, 1.32, 1.5, FASTER)],
            [f"Fastest: {OTHER.name}", f"{DEEPEP.name} (+40.0%) may be as fast"],
        ),
    ],
)
def test_the_fastest_is_named_and_noise_is_no_gain(cells: list[Result], parts: list[str]) -> None:
    line, *more = headlines(run_of(BASELINE, *cells))
    assert all(part in line for part in parts), line
    assert more == []


@pytest.mark.parametrize(
    ("base", "cell", "reason"),
    [
        (changed(BASELINE, status="failed", speedup=None), {}, "its baseline .* is failed"),
        (changed(BASELINE, emulated=True, speedup=None), {}, "emulated numerics"),
        (BASELINE, {"emulated": True}, "have no speed"),
        (None, {}, "is not in this run"),
    ],
)
def test_why_a_cell_has_no_speed_up(base: Result | None, cell: dict[str, Any], reason: str) -> None:
    own = changed(DEEPEP, status="finished", speedup=None, **cell)
    cells = [own] if base is None else [base, own]
    (line,) = headlines(run_of(*cells))
    assert line.startswith(f"No speed-up for {own.name} (")
    assert re.search(reason, line), line
    assert not any("the pin is" in line for line in facts(run_of(*cells)))
    other = changed(own, environment={"versions": {"torch": "2.11.0+cu130"}})
    assert "WARNING: trained by torch 2.11.0+cu130; the pin is 2.10.0" in facts(run_of(other))
    # Of a recipe's stand-in nobody asks for it.
    assert headlines(run_of(*[changed(one, stand_in_for="671b") for one in cells])) == []


def test_a_run_in_which_nothing_is_compared_says_what_was_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, baseline=None)
    log = metrics_line(1) + metrics_line(2, loss="3.25").replace("18:29:22", "19:30:24")
    write_metrics(run.add("base", log, state="running"), [7.0, 6.5], {2: 6.75})
    run.add("other", log)
    run.add("waits", state="queued")
    assert headlines(run.collect()) == [
        "base: 2 of 20 steps, loss 7.0000 -> 6.5000, validation loss 6.7500.",
        "other: 2 of 20 steps in 1:01:02, loss 3.5000 -> 3.2500.",
    ]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four cells of 1,500 steps."""
    return make_run(tmp_path_factory.mktemp("full"))


def test_the_last_sentence_has_the_losses_and_the_worse_verdict_counts(full: Path) -> None:
    _, results = results_of(full)
    fastest, losses = headlines(results)
    assert fastest.startswith("Fastest: 671b-mxfp8-deepep at 922 tokens/s/GPU, +40.8% over ")
    assert losses.startswith(
        "Loss against the baseline: equivalent within ±0.25%: 671b-bf16-deepep"
    )
    base, one, *_ = results.cells
    loss = one.judged.loss
    assert loss is not None
    worse = changed(one, loss_last_tenth=replace(loss, verdict="different"))
    assert headlines(replace(results, cells=(base, worse)))[-1].endswith(f"different: {one.name}.")
    for reason, says in ((None, "the interval crosses the margin"), ("no steps", "no steps")):
        last = replace(loss, window="last tenth", verdict="cannot tell", reason=reason)
        answer = headlines(replace(results, cells=(base, changed(one, loss_last_tenth=last))))[-1]
        assert answer.endswith(f"cannot tell: {one.name} (last tenth: {says}).")


def test_conditions_show_what_differs_and_share_the_rest(full: Path) -> None:
    _, results = results_of(full)
    found = configuration(results)
    assert found.differing is not None
    rows = {row[0]: row[1:] for row in found.differing.rows}
    assert rows["precision"] == ("bf16", "bf16", "mxfp8", "mxfp8")
    # `mxfp8` is TorchTitan's default: a cell that sets it does not differ from one that does not.
    assert "quantize.grouped_mm.mx.recipe_name" not in rows
    shared = dict(found.shared)
    assert (shared["nodes"], shared["training.seq_len"]) == ("32", "8192")
    assert not shared.keys() & rows.keys()
    found = environment(results)
    assert found.differing is not None and dict(found.shared)["torch"] == "2.10.0+cu128"
    rows = {row[0]: row[1:] for row in found.differing.rows}
    assert rows["nodes"][:2] == ("32: worker-0 to worker-31", "32: worker-1 to worker-32")
    assert rows["deep_ep"] == ("-", "1.2.1+29d31c0", "-", "1.2.1+29d31c0")


def test_the_newest_environment_counts_and_nothing_is_json(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1000)
    newest = folder / f"671b-{RESTARTED}" / "attempt-2" / "environment.json"
    check = {"worst": 0.4, "worst_kernel": "rows", "shapes": [1, 2]}
    content = json.loads(newest.read_text()) | {"nodes": ["worker-7"], "self_check": check}
    newest.write_text(json.dumps(content))
    found = environment(results_of(folder)[1]).differing
    assert found is not None
    column = {row[0]: row[4] for row in found.rows}
    assert column["nodes"] == "worker-7" and column["self check worst kernel"] == "rows"
    assert not any(set("{[") & set(text) for text in column.values())


def write_metrics(
    cell: Path, losses: list[float], validation: dict[int, float], skipped: int = 0
) -> None:
    lines = []
    for step, loss in enumerate(losses, 1):
        number = {"skipped_steps": skipped if step > 2 else 0}
        lines.append({"step": step, "rank": 0, "loss": loss, "tokens_per_second": 100.0} | number)
        if step in validation:
            lines.append({"step": step, "rank": 0, "validation_loss": validation[step]})
    path = cell / "attempt-1" / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_last_validation_loss_is_a_column_and_all_are_a_curve(tmp_path: Path) -> None:
    run = Run(tmp_path)
    again = {"repeat_of": "other"}
    repeats = ("other-r2", 20, 6.75, again), ("other-r3", 11, 9.0, again)
    for name, steps, last, more in (("base", 20, 6.0, {}), ("other", 20, 6.25, {}), *repeats):
        cell = run.add(name, metrics_line(1), **more)
        write_metrics(cell, [7.0] * steps, {1: 7.5, 10: 7.0, steps: last})
    results = run.collect()
    table = report_tables(results)["cells"]
    column = table.head.index("validation loss")
    assert [row[column] for row in table.rows] == ["6.0000", "6.5000"]
    (chart,) = [one for one in charts_of(results) if one.name == "validation-loss"]
    assert [list(line.x) for line in chart.lines] == [[1, 10, 20]] * 2
    assert not notes(results)


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([5.0] * 30 + [5.6] + [5.0] * 9, "the loss spikes: 5.6 at step 31 (before: 5)"),
        ([5.0] * 30 + [5.4] + [5.0] * 9, ""),
        ([5.0, 5.2] * 15 + [5.9] + [5.0] * 9, ""),
    ],
)
def test_a_spike_is_named(losses: list[float], says: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_metrics(run.add("base", metrics_line(1)), losses, {})
    assert [line.removeprefix("base: ") for line in notes(run.collect())] == [says] * bool(says)


def test_skipped_steps_are_counted_over_attempts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    cell = run.add("base", metrics_line(1), metrics_line(5))
    write_metrics(cell, [7.0] * 4, {}, skipped=2)
    path = cell / "attempt-2" / "metrics.jsonl"
    lines = [{"step": step, "rank": 0, "loss": 7.0, "skipped_steps": 1} for step in (5, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "base: 3 steps were skipped, since their gradients were not finite" in notes(
        run.collect()
    )


def test_status_shows_the_newest_validation_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    write_metrics(run.add("base", metrics_line(1)), [7.0] * 20, {10: 7.0, 20: 6.125})
    run.write()
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    assert main(["status"]) == 0
    assert "step 20/20, validation loss 6.1250" in " ".join(capsys.readouterr().out.split())


def test_a_cells_prediction_stands_beside_what_was_measured(tmp_path: Path) -> None:
    (first, *_) = load_sweep("fast").points
    assert first.prediction.startswith("predicted 1,602, published 918. Near 918: ")
    run = Run(tmp_path)
    write_metrics(run.add("fast", metrics_line(1), prediction=first.prediction), [7.0] * 20, {})
    run.add("fails", state="failed", prediction="predicted 5. No step: the network is at fault.")
    assert notes(run.collect()) == [
        f"fast: 100 tokens/s/GPU; {first.prediction}",
        "fails: not measured; predicted 5. No step: the network is at fault.",
    ]
