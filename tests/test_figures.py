"""The figures of a report: nothing is lost, covered, or too large."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cookbook.observe.curve import CurveStep
from cookbook.observe.router_load import LoadStep
from cookbook.results.figures import theme
from cookbook.results.figures.canvas import (
    NARROW,
    WIDE,
    Canvas,
    Size,
    drawing_style,
    spread,
    thin,
)
from cookbook.results.figures.loss import draw_difference, draw_whole
from cookbook.results.figures.series import Series, StepTime, all_series, short_labels
from cookbook.results.figures.steps import draw_steps
from cookbook.results.figures.throughput import draw_throughput
from cookbook.results.keep import keep_report
from tests.made_up_run import make_run, results_of
from tests.test_results import Run, metrics_line

FIGURE_BYTES = 100_000
PAGE_BYTES = 2_000_000


@pytest.mark.parametrize("most", [8, 9, 50, 100])
@pytest.mark.parametrize("num", [101, 102, 399, 5000])
def test_a_thinned_line_keeps_its_ends_and_peaks(num: int, most: int) -> None:
    random_ = random.Random(num)
    steps, values = list(range(num)), [random_.gauss(0, 1) for _ in range(num)]
    kept, shown = thin(steps, values, most)
    # Two of each run of neighbours, and both ends.
    assert len(kept) <= most + 3 and list(kept) == sorted(set(kept))
    assert [values[int(step)] for step in kept] == list(shown)
    assert (min(shown), max(shown)) == (min(values), max(values))
    assert (kept[0], kept[-1]) == (steps[0], steps[-1])


@pytest.mark.parametrize("num", [0, 1, 8])
def test_a_short_line_is_drawn_as_it_is(num: int) -> None:
    values = [float(step % 3) for step in range(num)]
    assert thin(range(num), values, 8) == (range(num), values)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_are_apart_and_inside_and_in_order(wanted: list[float]) -> None:
    places = spread(wanted, 15, 0, 100)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    ordered = sorted(places)
    pairs = pairwise(ordered)
    assert all(after - before > 15 - 1e-6 for before, after in pairs)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    assert [places[index] for index in order] == ordered


def test_labels_leave_out_what_all_names_begin_with() -> None:
    assert short_labels(["671b-bf16-deepep", "671b-mxfp8-deepep"]) == [
        "bf16-deepep",
        "mxfp8-deepep",
    ]
    assert short_labels(["671b-mxfp8-a", "671b-mxfp8_wgrad_hp-a"]) == [
        "mxfp8-a",
        "mxfp8_wgrad_hp-a",
    ]
    assert short_labels(["debug", "debug-2"]) == ["debug", "debug-2"]
    assert short_labels(["a-b"]) == ["a-b"] and short_labels([]) == []


def series(
    name: str, losses: list[float], position: int = 0, load: Sequence[LoadStep] = ()
) -> Series:
    steps = [CurveStep(0, step, loss) for step, loss in enumerate(losses, 1)]
    numbers = ("tokens", "base_tokens", "tokens_low", "tokens_high", "speedup", "published")
    nothing: dict[str, Any] = dict.fromkeys((*numbers, "published_speedup"))
    return Series(
        name=name,
        label=name,
        position=position,
        status="finished",
        note=None,
        is_baseline=position == 0,
        is_comparable=position > 0,
        baseline="base",
        steps=steps,
        times=(),
        restarts=(),
        memory_gib=None,
        capacity_gib=None,
        load=load,
        **nothing,
    )


def test_each_recipe_has_its_own_baseline_in_the_throughput() -> None:
    cells = [
        replace(
            series(name, [8.0], position), tokens=tokens, base_tokens=base, speedup=tokens / base
        )
        for position, (name, tokens, base) in enumerate(
            [("a", 100.0, 100.0), ("a-2", 120.0, 100.0), ("b", 200.0, 200.0), ("b-2", 210.0, 200.0)]
        )
    ]
    with drawing_style():
        canvas = draw_throughput(cells, WIDE)
    assert canvas is not None
    (axes,) = canvas.figure.axes
    lines = [(float(line.get_xdata()[0]), list(line.get_ydata())) for line in axes.lines]
    assert [x for x, _ in lines] == [100.0, 100.0, 200.0, 200.0]
    # From the top of the first cell to the bottom of the last, without a gap.
    ends = [y for _, ys in lines for y in ys]
    assert ends == sorted(ends) and ends[1:-1:2] == ends[2::2]


def test_each_cell_is_drawn_beside_its_own_baseline(tmp_path: Path) -> None:
    run = Run(tmp_path, baseline="a")
    for name, tps, recipe in (("a", 100, "x"), ("a2", 150, "x"), ("b", 400, "y"), ("b2", 440, "y")):
        lines = (metrics_line(step, tps=f"{tps}") for step in range(1, 25))
        run.add(name, "".join(lines), baseline=name[0], recipe=recipe)
    found = all_series(run.collect())
    assert [one.base_tokens for one in found] == [100, 100, 400, 400]
    assert [one.is_baseline for one in found] == [True, False, True, False]
    assert [one.speedup for one in found] == pytest.approx([1.0, 1.5, 1.0, 1.1])
    # The whiskers are in tokens/s: these steps do not vary, so both ends are at the bar's.
    ends = [(one.tokens_low, one.tokens_high) for one in found]
    assert ends[0] == ends[2] == (None, None)
    assert ends[1] == pytest.approx((150, 150)) and ends[3] == pytest.approx((440, 440))


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
@pytest.mark.parametrize("end", [0.1, 3.0, 8.0, 20.0])
def test_the_inset_covers_no_curve(size: Size, end: float) -> None:
    losses = [8.0 + (end - 8.0) * step / 99 for step in range(100)]
    with drawing_style():
        canvas = draw_whole([series("a", losses)], size)
    assert canvas is not None
    (axes,) = canvas.figure.axes
    (inset,) = axes.child_axes
    canvas.figure.canvas.draw()
    box = inset.get_tightbbox()
    assert box is not None
    for step, loss in enumerate(losses, 1):
        x, y = axes.transData.transform((step, loss))
        assert not (box.x0 < x < box.x1 and box.y0 < y), (step, box)


def test_differences_are_in_percent_within_their_band() -> None:
    base = series("base", [2.0] * 50)
    above = series("above", [2.01] * 50, position=1)
    with drawing_style():
        canvas = draw_difference([base, above], WIDE, margin=0.0025)
    assert canvas is not None
    (axes,) = canvas.figure.axes
    (line,) = [line for line in axes.get_lines() if line.get_gid() == "above"]
    assert list(line.get_ydata()) == pytest.approx([0.5] * 50)
    low, high = axes.get_ylim()
    assert low < -0.25 and high > 0.5
    assert "±0.25%" in canvas.svg("a")
    # Without a baseline there is nothing to be different from.
    assert draw_difference([replace(above, position=0)], WIDE) is None


def test_a_loss_differs_from_that_of_its_own_recipes_baseline() -> None:
    base, other = [8.0] * 30, [4.0] * 30
    cells = [
        series("base", base),
        series("above", [8.08] * 30, 1),
        replace(series("small", other, 2), is_baseline=True, is_comparable=False),
        replace(series("small-above", [4.02] * 30, 3), baseline="small"),
    ]
    with drawing_style():
        canvas = draw_difference(cells, WIDE, margin=0.0025)
        alone = draw_difference([*cells[:2], cells[2]], WIDE)
    assert canvas is not None and alone is not None
    (axes,) = canvas.figure.axes
    shown = {str(line.get_gid()): list(line.get_ydata()) for line in axes.lines}
    assert shown["above"] == pytest.approx([1.0] * 30)
    assert shown["small-above"] == pytest.approx([0.5] * 30)
    words = texts_of(canvas)
    assert {"above from base", "small-above from small"} <= words
    assert "loss, % from that of the baseline of its recipe" in words
    # With one baseline in it, the figure names it once.
    assert {"loss, % from that of base", "above", "base"} <= texts_of(alone)


def texts_of(canvas: Canvas) -> set[str]:
    return {text.get_text() for text in canvas.figure.texts}


def test_stalls_and_restarts_stand_at_their_steps() -> None:
    times = [StepTime(step, 3.0 if step == 9 else 1.0, step == 9) for step in range(1, 21)]
    cell = replace(series("a", [2.0] * 20), times=times, restarts=[14])
    with drawing_style():
        canvas = draw_steps([cell], WIDE)
    assert canvas is not None
    (axes,) = canvas.figure.axes
    steps, stalls, restart = axes.lines
    assert list(steps.get_xdata()) == list(range(1, 21))
    assert list(stalls.get_xdata()) == [9]
    assert set(restart.get_xdata()) == {14}
    assert "median 1 s, 1 stall, 1 restart" in canvas.svg("a")


def test_a_run_of_many_cells_stays_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=400)
    run, results = results_of(folder)
    cells = tuple(
        replace(cell, name=f"{cell.name}-{number}") for number in range(4) for cell in results.cells
    )
    results = replace(
        results,
        cells=cells,
        settings={cell.name: results.settings[cell.name[:-2]] for cell in cells},
        curves={cell.name: results.curves[cell.name[:-2]] for cell in cells},
    )
    keep_report(run, results)
    for path in (folder / "figures").iterdir():
        assert path.stat().st_size < FIGURE_BYTES, path.name
    assert (folder / "report.html").stat().st_size < PAGE_BYTES


def test_cells_differ_in_colour_and_then_in_their_dash() -> None:
    places = range(len(theme.CELLS) * len(theme.DASHES))
    looks = [(theme.colour_of(place), str(theme.dash_of(place))) for place in places]
    assert len(set(looks)) == len(looks)
    assert {dash for _, dash in looks[: len(theme.CELLS)]} == {"-"}
    # More cells than that begin anew.
    assert theme.colour_of(len(looks)) == theme.colour_of(0)
