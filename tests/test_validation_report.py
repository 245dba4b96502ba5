"""Validation losses, skipped steps and spikes reach the report and `status`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cookbook.cli.main import main
from cookbook.config.sweep import load_sweep
from cookbook.results.charts import charts_of, draw_chart
from cookbook.results.columns import report_tables
from cookbook.results.report import notes
from tests.made_up_run import Run, metrics_line


def write(cell: Path, losses: list[float], validation: dict[int, float], skipped: int = 0) -> None:
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
    for name, last in (("base", 6.5), ("other", 6.25)):
        write(run.add(name, metrics_line(1)), [7.0] * 20, {1: 7.5, 10: 7.0, 20: last})
    results = run.collect()
    table = report_tables(results)["cells"]
    column = table.head.index("validation loss")
    assert [row[column] for row in table.rows] == ["6.5000", "6.2500"]
    (chart,) = [one for one in charts_of(results) if one.name == "validation-loss"]
    assert [list(line.x) for line in chart.lines] == [[1, 10, 20]] * 2
    assert draw_chart(chart)["png"]
    assert not notes(results)


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([5.0] * 30 + [5.6] + [5.0] * 9, "the loss spikes: 5.6 at step 31 (before: 5)"),
        ([5.0] * 30 + [5.4] + [5.0] * 9, ""),
        # A noisy curve.
        ([5.0, 5.2] * 15 + [5.9] + [5.0] * 9, ""),
    ],
)
def test_a_spike_is_named(losses: list[float], says: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    write(run.add("base", metrics_line(1)), losses, {})
    assert [line.removeprefix("base: ") for line in notes(run.collect())] == [says] * bool(says)


def test_skipped_steps_are_counted_over_attempts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    cell = run.add("base", metrics_line(1), metrics_line(5))
    write(cell, [7.0] * 4, {}, skipped=2)
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
    write(run.add("base", metrics_line(1)), [7.0] * 20, {10: 7.0, 20: 6.125})
    run.write()
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    assert main(["status"]) == 0
    assert "step 20/20, validation loss 6.1250" in " ".join(capsys.readouterr().out.split())


def test_a_cells_prediction_stands_beside_what_was_measured(tmp_path: Path) -> None:
    (first, *_) = load_sweep("fast").points
    assert first.prediction.startswith("predicted 1,602, published 918. Near 918: ")
    run = Run(tmp_path)
    write(run.add("fast", metrics_line(1), prediction=first.prediction), [7.0] * 20, {})
    run.add("fails", state="failed", prediction="predicted 5. No step: the network is at fault.")
    assert notes(run.collect()) == [
        f"fast: 100 tokens/s/GPU; {first.prediction}",
        "fails: not measured; predicted 5. No step: the network is at fault.",
    ]
