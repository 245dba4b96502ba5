"""Cells that a sweep trains several times: their order, and what becomes of their figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.sweep import CellRequest, expand_sweep, in_rounds, load_sweep
from cookbook.results.charts import charts_of
from cookbook.results.columns import REPEATS, report_tables
from cookbook.results.report import notes
from tests.made_up_run import Run, metrics_line


def smoke() -> list[Cell]:
    return expand_sweep(load_sweep("smoke"), CellRequest(load_cluster("soperator-b200"), nodes=1))


def test_rounds_turn_their_order_and_leave_out_what_is_refused() -> None:
    cells = smoke()[:2]
    refused = replace(cells[0], name="refused", refused="no GPU")
    assert len(in_rounds([refused, *cells], 3)) == 1 + 3 * 2
    names = [cell.name for cell in in_rounds(cells, 3)]
    a, b = (cell.name for cell in cells)
    assert names == [a, b, f"{b}-r2", f"{a}-r2", f"{a}-r3", f"{b}-r3"]
    assert in_rounds(cells, 1) == cells
    last = in_rounds(cells, 3)[-1]
    assert (last.repeat_of, last.repeat, last.baseline) == (b, 3, a)
    assert (last.record().repeat_of, last.record().repeat) == (b, 3)
    assert in_rounds(cells, 3)[0].record().repeat_of is None


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def log_of(tps: float, loss: float = 3.0, steps: int = 20) -> str:
    return "".join(metrics_line(s, tps=f"{tps:g}", loss=f"{loss}") for s in range(1, steps + 1))


def add(
    run: Run, name: str, *speeds: float, losses: tuple[float, ...] = (), **cell: object
) -> None:
    for number, speed in enumerate(speeds, 1):
        folder = name if number == 1 else f"{name}-r{number}"
        again = {} if number == 1 else {"repeat_of": name, "repeat": number}
        loss = losses[number - 1] if losses else 3.0
        run.add(folder, log_of(speed, loss), **again, **cell)  # type: ignore[arg-type]


def test_repeats_are_one_cell_with_a_speed_up_over_pairs(run: Run) -> None:
    add(run, "base", 100, 110, 120)
    add(run, "fast", 150, 165, 183)
    results = run.collect()
    base, fast = results.cells
    assert (base.name, fast.name) == ("base", "fast")
    repeats = fast.repeats
    assert [one.name for one in repeats] == ["fast", "fast-r2", "fast-r3"]
    assert [one.tokens_per_second_per_gpu for one in repeats] == [150, 165, 183]
    assert fast.tokens_per_second_per_gpu == 165
    assert fast.throughput is not None and fast.throughput.num_steps == 45
    # 1.5, 1.5 and 1.525: the noise between runs, not that between steps, which is none here.
    assert fast.speed is not None and fast.speed.low is not None and fast.speed.high is not None
    assert fast.speedup == fast.speed.ratio == pytest.approx((1.5 * 1.5 * 1.525) ** (1 / 3))
    assert (fast.speed.basis, fast.speed.num) == ("repeats", 3)
    assert fast.speed.high - fast.speed.low == pytest.approx(2 * 4.303 * 0.025 / 3, rel=0.02)
    assert base.speedup == 1.0 and base.speed is None


def test_one_pair_alone_is_judged_by_its_steps(run: Run) -> None:
    add(run, "base", 100, 100)
    run.add("fast", log_of(150))
    run.add("fast-r2", log_of(150), state="failed", reason="out of memory", repeat_of="fast")
    fast = run.collect().cells[1]
    assert (fast.status, fast.reason) == ("failed", "repeat 2: out of memory")
    assert fast.speed is not None
    assert (fast.speed.basis, fast.speed.num) == ("steps", 15)
    assert fast.speedup == pytest.approx(1.5)


def test_losses_of_repeats_are_judged_by_how_far_these_are_apart(run: Run) -> None:
    add(run, "base", 100, 100, losses=(3.0, 3.001))
    add(run, "near", 100, 100, losses=(3.0, 3.001))
    add(run, "far", 100, 100, losses=(3.1, 3.101))
    cells = {cell.name: cell for cell in run.collect().cells}
    near, far = cells["near"], cells["far"]
    assert near.loss is not None and far.loss is not None and far.loss_last_tenth is not None
    assert (near.loss.verdict, near.loss.runs) == ("equivalent", 2)
    assert (far.loss.verdict, far.loss_last_tenth.verdict) == ("different", "different")
    assert cells["base"].loss is None


def test_stalls_and_restarts_of_every_repeat_are_told(run: Run) -> None:
    """The first goes well; the second stalls twice, its job starts again, and it is slower."""
    timed = {"training.steps": 20, "training.seq_len": 64, "training.local_batch_size": 2}
    run.add("base", log_of(100), options=timed)
    before = "".join(metrics_line(s, tps="25" if s == 6 else "60") for s in range(1, 10))
    after = "".join(metrics_line(s, tps="25" if s == 14 else "60") for s in range(8, 17))
    run.add("base-r2", before, after, options=timed, repeat_of="base", repeat=2)
    results = run.collect()
    (cell,) = results.cells
    first, second = cell.repeats
    # Of its own median: a slow repeat has no more stalls than others.
    assert [one.throughput and one.throughput.stalls for one in (first, second)] == [(), (6, 14)]
    assert cell.throughput is not None and cell.throughput.stalls == (6, 14)
    assert [len(one.history.attempts) for one in (first, second)] == [1, 2]
    assert len(cell.history.attempts) == 3
    assert (first.history.steps_lost, cell.history.steps_lost) == (0, 2)
    table = report_tables(results)[REPEATS]
    shown = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert [(row["stalls"], row["restarts"]) for row in shown] == [("0", "0"), ("2", "1")]
    said = "\n".join(notes(results))
    assert "base-r2: attempt 2: steps 8 to 16" in said
    assert "base: attempt" not in said
    (times,) = (chart for chart in charts_of(results) if chart.name == "step-time")
    assert [line.label for line in times.lines] == ["base, repeat 1", "base, repeat 2"]
    assert [[step for step, _ in line.marks] for line in times.lines] == [[], [6, 14]]
    assert [line.rules for line in times.lines] == [(), (8,)]
