"""The router's load as it was logged: over several attempts, in files that are not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cookbook.observe.metrics import LoadStep, collect_router_load
from cookbook.results.collect import summarize_load
from cookbook.run.folder import CellFolder


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
    write(tmp_path, 0, line(1, 1, 2, 3) + line(2, 10, 2, 3) + line(11, 20, 9, 9))
    write(tmp_path, 1, "")
    # Resumed at the checkpoint of step 15: the first one's line of 11 to 20 is of no account.
    write(tmp_path, 10, line(16, 20, 5, 4))
    write(tmp_path, 9, line(16, 20, 8, 8))
    steps = collect_router_load(CellFolder(tmp_path))
    assert [(step.first_step, step.step) for step in steps] == [(1, 1), (2, 10), (16, 20)]
    assert steps[2] == LoadStep(16, 20, False, (1, 2), (5, 4), (0, 0))


def test_what_is_not_whole_is_left_out(tmp_path: Path) -> None:
    whole = line(1, 1, 2.5)
    broken = [
        "\n",
        "no JSON\n",
        "[]\n",
        '{"step": 1}\n',
        line(2, 2, 2.5, starved_experts=[]),
        line(2, 2, float("nan")),
        line(2, 2),
    ]
    # A job writes the last one yet.
    write(tmp_path, 0, "".join(broken) + whole + line(2, 2, 2.5)[:-9])
    assert [step.step for step in collect_router_load(CellFolder(tmp_path))] == [1]
    assert collect_router_load(CellFolder(tmp_path / "none")) == []


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
