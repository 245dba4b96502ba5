"""The charts' numbers are the logs', and their captions explain what is drawn alone."""

from __future__ import annotations

import pytest

from cookbook.results.charts import Chart, charts_of, draw_chart, running_mean
from tests.made_up_run import (
    DRAWN,
    RESTART_STEP,
    RESTARTED,
    STALL_STEP,
    STALLED,
    make_run,
    results_of,
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chart]:
    """The charts of four cells of 1,500 steps."""
    _, results = results_of(make_run(tmp_path_factory.mktemp("full")))
    return {chart.name: chart for chart in charts_of(results)}


def test_all_are_there(full: dict[str, Chart]) -> None:
    assert list(full) == DRAWN
    for chart in full.values():
        values = [y for line in chart.lines for y in line.y]
        values += [n for bar in chart.bars for n in (bar.value, bar.high, bar.published) if n]
        assert chart.low < chart.high and max(values) > chart.low


def test_bars_hold_the_interval_and_what_was_published(full: dict[str, Chart]) -> None:
    base, deepep, mxfp8, _ = full["throughput"].bars
    assert (base.text, base.base, base.published) == ("655, baseline", None, 651)
    assert deepep.text == "853, +30.2%" and deepep.base == base.value
    assert deepep.low is not None and deepep.high is not None and deepep.value is not None
    assert 0.9 * deepep.value < deepep.low < deepep.value < deepep.high < full["throughput"].high
    assert mxfp8.published is None
    assert "published" in full["throughput"].caption


def test_the_difference_is_from_the_baseline_at_the_same_step(full: dict[str, Chart]) -> None:
    chart = full["loss-difference"]
    assert len(chart.lines) == 3 and chart.band == pytest.approx(0.25)
    deepep, mxfp8, _ = chart.lines
    # The made-up losses of MXFP8 lie 0.04% higher.
    assert sum(mxfp8.y) / len(mxfp8.y) == pytest.approx(0.04, abs=0.01)
    assert abs(sum(deepep.y) / len(deepep.y)) < 0.01


def test_stalls_and_restarts_are_marked(full: dict[str, Chart]) -> None:
    lines = {line.label: line for line in full["step-time"].lines}
    assert STALL_STEP in [step for step, _ in lines[STALLED].marks]
    assert lines[RESTARTED].rules == (RESTART_STEP,) and lines[STALLED].rules == ()
    # Thinning keeps a stall.
    assert {seconds for _, seconds in lines[STALLED].marks} <= set(lines[STALLED].y)
    assert len(lines[STALLED].y) <= 400


def test_a_running_mean_stands_at_the_middle_of_its_steps() -> None:
    steps, mean = running_mean(range(1, 4001), [float(step % 2) for step in range(4000)])
    assert len(steps) <= 400 and mean == pytest.approx([0.5] * len(mean))
    assert steps[0] == pytest.approx(50.5)


@pytest.mark.parametrize("name", DRAWN)
def test_matplotlib_draws_each(full: dict[str, Chart], name: str) -> None:
    found = draw_chart(full[name])
    svg = found["svg"].decode()
    assert found == draw_chart(full[name]), "the same numbers, the same file"
    # The baseline has no difference from itself.
    labels = ("bf16-standard", "mxfp8-deepep")[name == "loss-difference" :]
    assert all(label in svg for label in labels)
    assert found["png"].startswith(b"\x89PNG")
