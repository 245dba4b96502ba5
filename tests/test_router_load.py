"""The router's load as it was logged: over several attempts, in files that are not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cookbook.observe.router_load import LoadStep, _parse, collect_router_load
from cookbook.results.figures.canvas import NARROW, WIDE, Size, drawing_style
from cookbook.results.figures.load import draw_load
from cookbook.results.load import summarize_load
from cookbook.results.report import render_json
from cookbook.results.tables import load_table
from cookbook.run.folder import CellFolder
from tests.made_up_run import LOADED, RESTART_STEP, RESTARTED, make_run, results_of
from tests.test_figures import series


def line(first: int, step: int, *busiest: float, **other: Any) -> str:
    content = {
        "first_step": first,
        "step": step,
        "forced": False,
        "layers": list(range(1, len(busiest) + 1)),
        "busiest_over_mean": busiest,
        "starved_experts": [0] * len(busiest),
    }
    return json.dumps(content | other) + "\n"


def write(cell: Path, attempt: int, text: str) -> None:
    path = CellFolder(cell).attempt(attempt).router_load
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_steps_that_are_made_again_count_once(tmp_path: Path) -> None:
    counts = [[1, 2], [3, 0]]
    write(tmp_path, 0, line(1, 1, 2, 3) + line(2, 10, 2, 3) + line(11, 20, 9, 9))
    write(tmp_path, 1, "")
    # Resumed at the checkpoint of step 15: what the first one wrote of 11 to 20 is of no account.
    write(tmp_path, 10, line(16, 20, 5, 4, counts=counts, counts_from=16))
    write(tmp_path, 9, line(16, 20, 8, 8))
    steps = collect_router_load(CellFolder(tmp_path))
    assert [(step.first_step, step.step) for step in steps] == [(1, 1), (2, 10), (16, 20)]
    assert steps[2] == LoadStep(16, 20, False, (1, 2), (5, 4), (0, 0), 16, ((1, 2), (3, 0)))


def test_what_is_not_whole_is_left_out(tmp_path: Path) -> None:
    whole = line(1, 1, 2.5)
    broken = [
        "\n",
        "no JSON\n",
        "[]\n",
        '{"step": 1}\n',
        line(2, 2, 2.5, starved_experts=[]),
        line(2, 2, 2.5, counts=[[1], [2]], counts_from=1),
        line(2, 2, 2.5, counts=[[1]]),
        line(2, 2, float("nan")),
        line(2, 2),
        "[" * 100_000 + "\n",
    ]
    # A job writes the last one yet.
    write(tmp_path, 0, "".join(broken) + whole + line(2, 2, 2.5).rstrip())
    assert [step.step for step in collect_router_load(CellFolder(tmp_path))] == [1]
    assert collect_router_load(CellFolder(tmp_path / "none")) == []


@given(
    st.binary(max_size=80)
    | st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda some: (
            st.lists(some, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "layers",
                        "counts",
                        "step",
                        "first_step",
                        "forced",
                        "busiest_over_mean",
                        "starved_experts",
                    ]
                ),
                some,
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_line_is_an_error(text: bytes) -> None:
    _parse(text)


def steps_of(*busiest: tuple[float, ...], forced: bool = False) -> list[LoadStep]:
    return [
        LoadStep(number, number, forced, (3, 4, 5)[: len(row)], row, (1,) * len(row))
        for number, row in enumerate(busiest, 1)
    ]


def test_the_summary_is_of_the_end_and_names_the_layer() -> None:
    early = [(9.0, 9.0, 9.0)] * 27
    found = summarize_load(steps_of(*early, (1.5, 2.0, 1.0), (1.5, 2.5, 1.0), (7.0, 2.1, 1.0)))
    assert found is not None
    assert (found.busiest_over_mean, found.layer, found.median_over_layers) == (2.1, 4, 1.5)
    assert (found.steps, found.starved_experts, found.layers) == ((28, 30), 3, 3)
    assert not found.is_forced
    forced = summarize_load(steps_of((1.0,), forced=True))
    assert forced is not None and forced.is_forced
    assert summarize_load([]) is None
    # Of fewer than ten steps the last one counts.
    few = summarize_load(steps_of((9.0,), (9.0,), (1.5,)))
    assert few is not None and (few.busiest_over_mean, few.steps) == (1.5, (3, 3))


def test_a_report_shows_it_where_it_was_logged_alone(tmp_path: Path) -> None:
    _, results = results_of(make_run(tmp_path, steps=RESTART_STEP + 200))
    table = load_table(results)
    assert table is not None
    assert [row[0] for row in table.rows] == [f"671b-{pair}" for pair in LOADED]
    assert {row[-1] for row in table.rows} == {"the router's own"}
    steps = [step.step for step in results.loads[f"671b-{RESTARTED}"]]
    assert steps == sorted(set(steps)) and steps[-1] == 10 * ((RESTART_STEP + 200) // 10)
    cells = json.loads(render_json(results))["cells"]
    assert [cell["router_load"] is not None for cell in cells] == [True, False, False, True]
    assert cells[0]["router_load"]["busiest_over_mean"] > 1


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_the_figure_says_that_balance_is_forced(size: Size) -> None:
    assert draw_load([series("a", [8.0])], size) is None
    loaded = series("a", [8.0], load=steps_of((1.0, 1.0), forced=True))
    with drawing_style():
        canvas = draw_load([loaded, series("b", [8.0], 1)], size)
    assert canvas is not None
    svg = canvas.svg("x")
    assert "balance is forced" in svg and "in layer" not in svg


def test_the_map_shows_each_share_and_no_token_as_nothing() -> None:
    (step,) = steps_of((2.0, 3.0))
    counted = LoadStep(1, 1, False, (1, 2), (2.0, 3.0), (1, 2), 1, ((0, 50, 100), (0, 0, 150)))
    with drawing_style():
        canvas = draw_load([series("a", [8.0], load=[counted, step])], WIDE)
    assert canvas is not None
    _, axes = canvas.figure.axes
    (image,) = axes.images
    array = image.get_array()
    assert array is not None
    # From the busiest to the least, as parts of three times the mean.
    assert array[..., 3].tolist() == [pytest.approx([2 / 3, 1 / 3, 0], abs=0.03), [1, 0, 0]]


def test_curves_are_of_the_most_the_median_and_the_least_uneven_layer() -> None:
    with drawing_style():
        load = steps_of((2.0, 1.0, 1.2), (4.0, 1.0, 1.5))
        canvas = draw_load([series("a", [8.0], load=load)], WIDE)
    assert canvas is not None
    strip = canvas.figure.axes[0]
    assert [list(line.get_ydata()) for line in strip.lines] == [[2, 4], [1.2, 1.5], [1, 1]]


def test_the_map_is_of_what_was_counted_last_and_the_worst_layer_is_named() -> None:
    first = LoadStep(3, 3, False, (3, 4), (1.5, 3.0), (0, 0), 3, ((1, 3), (0, 4)))
    last = LoadStep(4, 4, False, (3, 4), (1.0, 2.0), (0, 0), 4, ((2, 2), (0, 2)))
    with drawing_style():
        canvas = draw_load([series("a", [8.0], load=[first, last])], WIDE)
        assert canvas is not None
        svg = canvas.svg("x")
    assert "2 experts of each layer, step 4<" in svg
    assert "at last 2x, in layer 4<" in svg
