"""Run folders as a run leaves them give the right figures, repeats of cells included."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.paths import ROOT
from cookbook.config.cluster import load_cluster
from cookbook.config.sweep import CellRequest, expand_sweep, in_rounds, load_sweep
from cookbook.results.charts import charts_of
from cookbook.results.columns import REPEATS, report_tables
from cookbook.results.recorded import routing_of
from cookbook.results.summary import facts, notes
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import take_submit_lock
from cookbook.run.status import AttemptEnd, Cause, write_attempt_end
from tests.made_up_run import Run, metrics_line

LOGS = Path(__file__).parent / "logs"
BATCH = "training.local_batch_size"
TP, PP, EP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "expert"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_that_was_profiled_is_said_to_be(run: Run) -> None:
    log = metrics_line(1)
    run.add("plain", log, options={"profiling.enable_profiling": False})
    run.add("asked", log, options={"profiling.enable_profiling": True})
    traced = run.add("traced", log)
    (traced / "attempt-1" / "profile_traces" / "iteration_8").mkdir(parents=True)
    # Resumed without the profiler, whose attempt does not count.
    resumed = run.add("resumed", log, metrics_line(2))
    shutil.copy(run.folder / "asked/cell.yaml", resumed / "attempt-1")
    (resumed / "attempt-1/profile_traces").mkdir()
    run.add("waits", options={"profiling.enable_profiling": True}, state="queued")
    results = run.collect()
    assert [cell.name for cell in results.cells if cell.measured.profiled] == ["asked", "traced"]
    said = [note.partition(": profiled, ")[0] for note in notes(results) if ": profiled, " in note]
    assert said == ["asked", "traced"]


def test_the_figures_of_a_real_run_on_two_h200(run: Run) -> None:
    run.add("base", (LOGS / "h200_stall.log").read_text())
    cell = run.only().measured
    assert (cell.steps, cell.final_loss, cell.memory_gib) == (13, 8.97069, 57.70)
    assert (cell.attention, cell.mean_attended_length) == ("flash_attention_4", 2343.0)
    assert cell.throughput is not None
    # Three steps of warm-up, of which the first one has 707 tokens/s; then one of 25,070.
    assert (cell.throughput.warm_up_steps, cell.throughput.num_steps) == (3, 10)
    assert cell.throughput.stalls == (5,)
    assert cell.tokens_per_second_per_gpu == (55173 + 55761) / 2
    assert cell.throughput.mean < 0.95 * cell.throughput.median
    # From 21:18:46.555 to 21:19:17.248, on two GPUs.
    assert cell.gpu_hours == pytest.approx(2 * 30.693 / 3600)


@pytest.mark.parametrize(("base", "other"), [({"emulated": True}, {}), ({}, {"device": "cpu"})])
def test_incomparable_cells(run: Run, base: dict[str, Any], other: dict[str, Any]) -> None:
    log = metrics_line(1) + metrics_line(2)
    run.add("base", log, **base)
    run.add("other", log, **other)
    assert run.collect().cells[1].judged.speedup is None


@pytest.mark.parametrize("state", ["failed", "running"])
@pytest.mark.parametrize("name", ["base", "other"])
def test_only_cells_that_finished_have_a_speedup(run: Run, name: str, state: str) -> None:
    log = metrics_line(1) + metrics_line(2)
    for cell in ("base", "other"):
        run.add(cell, log, state=state if cell == name else "finished")
    base, other = run.collect().cells
    assert (base.judged.speedup, other.judged.speedup) == (None if name == "base" else 1.0, None)
    assert other.measured.tokens_per_second_per_gpu == 100


def log_of(**active: Any) -> str:
    line = f"cookbook active: {json.dumps(active)}\n"
    return metrics_line(1) + line + metrics_line(2)


def test_attention_by_a_reference_gets_no_speedup(run: Run) -> None:
    run.add("base", log_of(attention="flex"))
    run.add("reference", log_of(attention="flash_attention_4_reference"))
    run.add("kernels", log_of(attention="flash_attention_4"))
    cells = run.collect().cells
    _, reference, kernels = cells
    assert [cell.judged.speedup for cell in cells] == [1.0, None, 1.0]
    assert reference.measured.emulated and not kernels.measured.emulated
    assert reference.measured.reason == (
        "attention by a reference: the throughput says nothing about FlashAttention-4"
    )


def test_a_loss_that_is_no_number_is_said(run: Run) -> None:
    losses = ["3.5", "nan", "3.0", "nan", "nan"]
    run.add("base", "".join(metrics_line(s, loss=v) for s, v in enumerate(losses, start=1)))
    cell = run.only().measured
    assert cell.final_loss is not None and math.isnan(cell.final_loss)
    assert cell.reason == "loss is nan since step 4"


def test_a_failed_cell_says_why(run: Run) -> None:
    log = (LOGS / "out_of_memory.log").read_text()
    run.add("base", log, state="failed", reason="exit code 1")
    cell = run.only().measured
    assert cell.reason is not None
    assert cell.reason.startswith("exit code 1; torch.OutOfMemoryError: CUDA out of mem")
    assert cell.steps == 1
    assert cell.tokens_per_second_per_gpu is None


def test_the_signal_of_a_cancel_is_no_reason(run: Run) -> None:
    folder = run.add("base", metrics_line(1), state="cancelled", reason="SIGTERM")
    end = AttemptEnd(attempt=1, cause=Cause.STOPPED, reason="SIGTERM")
    write_attempt_end(CellFolder(folder).attempt(1), end)
    run.add("before", state="cancelled", reason="cancelled before it started")
    said = notes(run.collect())
    assert "before (cancelled): cancelled before it started" in said
    assert "base: attempt 1: steps 1 to 1; stopped; 1 step lost" in said
    assert not any("SIGTERM" in note for note in said)


def test_cells_that_never_ran_appear(run: Run) -> None:
    run.add("queued", state="queued")
    take_submit_lock(run.folder)
    run.add("refused", state=None, refused="needs SM100", emulated=True)
    run.add("unknown", state=None)
    run.add("gone")
    shutil.rmtree(run.folder / "gone")
    run.add("broken")
    (run.folder / "broken" / "cell.yaml").write_text("a: [")
    (run.folder / "broken" / "status.json").write_text("")
    cells = run.collect().cells
    assert [cell.name for cell in cells] == ["queued", "refused", "unknown", "gone", "broken"]
    assert [cell.measured.status for cell in cells] == ["queued", "refused", None, None, None]
    reasons = [cell.measured.reason or "" for cell in cells]
    assert reasons[:2] == ["", "needs SM100"]
    assert "unknown/status.json: cannot be read: No such file" in reasons[2]
    assert "gone/cell.yaml: cannot be read: No such file" in reasons[3]
    assert "broken/cell.yaml:2:1: YAML syntax" in reasons[4]
    assert "broken/status.json: cannot be read" in reasons[4]
    measured = [cell.measured for cell in cells]
    assert {(one.steps, one.throughput, one.memory_gib, one.final_loss) for one in measured} == {
        (None, None, None, None)
    }


PLANNED: dict[str, Any] = {
    "recipe": "deepseek_v3_16b",
    "cluster": "h200-node",
    "stack": "2026.02",
    "ranks_per_node": 8,
    "options": {
        "model.name": "deepseek_v3",
        "model.flavor": "16B",
        "parallelism.expert_parallel_degree": 8,
        "training.dataset": "c4",
        "training.steps": 20,
        "compile.enable": True,
        "compile.components": ["model", "loss"],
    },
}


def test_a_gpu_cell_is_held_beside_its_prediction(run: Run) -> None:
    log = "".join(metrics_line(step, tps="100") for step in range(1, 21))
    run.add("known", log, **PLANNED)
    run.add("emulated", log, **PLANNED, emulated=True)
    run.add("cpu", log, **PLANNED | {"device": "cpu"})
    run.add("refused", state="refused", **PLANNED, refused="does not fit")
    run.add("no stack", log)
    cells = {cell.name: cell for cell in run.collect().cells}
    known = cells.pop("known")
    step = known.judged.predicted
    assert step and 5_000 < step.tokens_per_second_per_gpu < 30_000 and step.largest
    for cell in cells.values():
        assert cell.judged.predicted is None, cell.name


@pytest.mark.parametrize(
    ("option", "value", "seconds", "speed", "memory", "measured"),
    [
        ("training.steps", 20, 6, 200, 99.5, 45),
        ("optimizer.lr", 1, 6, 200, 99.5, 45),
        ("checkpoint.keep_latest_k", 3, 6, 200, 99.5, 45),
        ("training.global_batch_size", 4, 3, 300, 10, 30),
    ],
)
def test_speed_and_memory_stand_beside_the_newest_options(
    run: Run, option: str, value: int, seconds: float, speed: float, memory: float, measured: int
) -> None:
    """A cell that was resumed after step 20, and whose `option` was `value` before."""
    logs = [
        "".join(
            metrics_line(step, tps=f"{tps}", memory=gib, flops=f"tflops: {tps / 100}  mfu: 3.00%")
            for step in range(end - 19, end + 1)
        )
        for end, tps, gib in ((20, 100, "99.50"), (40, 300, "10.00"))
    ]
    options = {"training.global_batch_size": 8, "training.seq_len": 150, "training.steps": 40}
    folder = run.add("base", *logs, options=options)
    record = read_record(folder / "cell.yaml")
    record = replace(record, options=options | {option: value})
    record.write(folder / "attempt-1/cell.yaml")
    run.add("base-r2", steady_log(100), repeat_of="base", repeat=2, options=options)
    run.add("other", steady_log(600))
    base, other = (results := run.collect()).cells
    one = base.repeats[0]
    assert one.measured.tokens_per_second_per_gpu == speed
    assert one.measured.tflops_per_gpu == speed / 100
    assert one.measured.memory_gib == memory and len(one.measured.curve) == 40
    assert base.measured.throughput is not None and base.measured.throughput.num_steps == measured
    assert other.judged.speedup == pytest.approx(600 / speed)
    (times,) = (chart for chart in charts_of(results) if chart.name == "step-time")
    assert times.lines[0].y == [seconds] * 20 + [2] * 20


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Of two nodes with eight ranks each.
        ({BATCH: 4}, 4 * 512),
        ({BATCH: 4, TP: 2, PP: 2, EP: 8}, 512),
        ({BATCH: 4, "training.global_batch_size": 256}, 16 * 512),
        # TorchTitan's default.
        ({"training.global_batch_size": -1}, None),
    ],
)
def test_tokens_of_a_step_on_each_gpu(options: dict[str, int], expected: int | None) -> None:
    asked = {"training.seq_len": 512, **options}
    assert CellRecord(nodes=2, ranks_per_node=8, options=asked).tokens_per_step_per_gpu == expected


def test_gpu_hours_are_those_that_each_attempt_had(run: Run) -> None:
    """Half an hour on 8 GPUs, then 15 minutes on 4."""
    first, second = (
        metrics_line(1) + metrics_line(2).replace("18:29:22", f"18:{29 + minutes}:22")
        for minutes in (30, 15)
    )
    folder = run.add("base", first, second, nodes=2)
    (folder / "attempt-1/cell.yaml").write_text("nodes: 4\nranks_per_node: 2\n")
    assert run.only().measured.gpu_hours == pytest.approx(8 * 0.5 + 4 * 0.25)


def test_a_billion_tokens_cost_what_they_take_with_their_stalls(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    text = (ROOT / "recipes/cluster/soperator-b200.yaml").read_text()
    profile.write_text(text + "\nprice_per_gpu_hour: 3.6\n")
    speeds = ["100"] * 4 + ["1000"] * 3 + ["100"]
    log = "".join(metrics_line(step, tps=tps) for step, tps in enumerate(speeds, 1))
    run.add("base", log, cluster="mine", files={"cluster": str(profile)})
    # Of the 6 measured steps three took ten times as long: 6,000 tokens in 33 s at best.
    seconds = (3 / 1000 + 3 / 100) / 6 * 1e9
    assert run.only().measured.cost_per_billion_tokens == pytest.approx(3.6 * seconds / 3600)


@pytest.mark.parametrize(
    ("options", "routing"),
    [
        ({}, "trained"),
        ({"debug.moe_force_load_balance": True}, "round_robin"),
        ({"debug.moe_routing": "random"}, "random"),
    ],
)
def test_the_routing_is_a_condition(run: Run, options: dict[str, Any], routing: str) -> None:
    run.add("base", metrics_line(1), options=options)
    assert routing_of(run.only().record) == routing
    assert f"routing: {routing}" in facts(run.collect())
    run.add("other", metrics_line(1), options={"debug.moe_routing": "other"})
    assert f"routing: {routing} in base; other in other" in facts(run.collect())


def test_rounds_turn_their_order_and_leave_out_what_is_refused() -> None:
    request = CellRequest(load_cluster("soperator-b200"), nodes=1)
    cells = expand_sweep(load_sweep("smoke"), request)[:2]
    refused = replace(cells[0], name="refused", refused="no GPU")
    assert len(in_rounds([refused, *cells], 3)) == 1 + 3 * 2
    names = [cell.name for cell in in_rounds(cells, 3)]
    a, b = (cell.name for cell in cells)
    assert names == [a, b, f"{b}-r2", f"{a}-r2", f"{a}-r3", f"{b}-r3"]
    last = in_rounds(cells, 3)[-1]
    assert (last.repeat_of, last.repeat, last.baseline) == (b, 3, a)
    assert (last.record().repeat_of, last.record().repeat) == (b, 3)
    assert in_rounds(cells, 3)[0].record().repeat_of is None


def steady_log(tps: float, loss: float = 3.0, steps: int = 20) -> str:
    return "".join(metrics_line(s, tps=f"{tps:g}", loss=f"{loss}") for s in range(1, steps + 1))


def add_repeats(
    run: Run, name: str, *speeds: float, losses: tuple[float, ...] = (), **cell: object
) -> None:
    for number, speed in enumerate(speeds, 1):
        folder = name if number == 1 else f"{name}-r{number}"
        again = {} if number == 1 else {"repeat_of": name, "repeat": number}
        loss = losses[number - 1] if losses else 3.0
        run.add(folder, steady_log(speed, loss), **again, **cell)  # type: ignore[arg-type]


def test_repeats_are_one_cell_with_a_speed_up_over_pairs(run: Run) -> None:
    add_repeats(run, "base", 100, 110, 120)
    add_repeats(run, "fast", 150, 165, 183)
    results = run.collect()
    base, fast = results.cells
    speed = fast.judged.speed
    assert (base.name, fast.name) == ("base", "fast")
    repeats = fast.repeats
    assert [one.name for one in repeats] == ["fast", "fast-r2", "fast-r3"]
    assert [one.measured.tokens_per_second_per_gpu for one in repeats] == [150, 165, 183]
    assert fast.measured.tokens_per_second_per_gpu == 165
    assert fast.measured.throughput is not None and fast.measured.throughput.num_steps == 45
    # 1.5, 1.5 and 1.525: the noise between runs, not that between steps, which is none here.
    assert speed is not None and speed.low is not None and speed.high is not None
    assert fast.judged.speedup == speed.ratio == pytest.approx((1.5 * 1.5 * 1.525) ** (1 / 3))
    assert (speed.basis, speed.num) == ("repeats", 3)
    assert speed.high - speed.low == pytest.approx(2 * 4.303 * 0.025 / 3, rel=0.02)
    assert base.judged.speedup == 1.0 and base.judged.speed is None


@pytest.mark.parametrize("other", [{BATCH: 4}, {BATCH: 8, "optimizer.lr": 1e-4}])
def test_a_repeat_that_was_resumed_with_other_options_is_a_cell_of_its_own(
    run: Run, other: dict[str, Any]
) -> None:
    add_repeats(run, "base", 100, 110, 120, options={BATCH: 8})
    add_repeats(run, "fast", 150, 165, 183, options={BATCH: 8})
    path = run.folder / "fast-r2/cell.yaml"
    replace(read_record(path), options=other).write(path)
    _, fast, alone = (results := run.collect()).cells
    assert ([one.name for one in fast.repeats], alone.name) == (["fast", "fast-r3"], "fast-r2")
    assert fast.judged.speedup == pytest.approx((1.5 * 1.525) ** 0.5)
    assert alone.judged.speedup == 1.5
    said = "fast-r2: a cell of its own, because it ran with other options than fast"
    assert said in notes(results)
    # With a round of the baseline alone, compare the others. An explicit default is no difference.
    for name, options in (
        ("base", other),
        ("fast-r2", {BATCH: 8, "profiling.enable_profiling": False}),
    ):
        path = run.folder / name / "cell.yaml"
        replace(read_record(path), options=options).write(path)
    _, base, fast = run.collect().cells
    assert (fast.judged.baseline, len(fast.repeats), base.judged.speed) == ("base-r2", 3, None)
    assert fast.judged.speedup == pytest.approx((1.5 * 1.525) ** 0.5)


def test_one_pair_alone_is_judged_by_its_steps(run: Run) -> None:
    add_repeats(run, "base", 100, 100)
    run.add("fast", state="failed", reason="out of memory")
    run.add("fast-r2", steady_log(150), repeat_of="fast", repeat=2)
    results = run.collect()
    _, fast = results.cells
    assert (fast.measured.status, fast.measured.reason) == ("failed", "repeat 1: out of memory")
    assert {one.name: len(one.lines) for one in charts_of(results)}["loss"] == 2
    assert fast.judged.speed is not None
    assert (fast.judged.speed.basis, fast.judged.speed.num) == ("steps", 15)
    assert fast.judged.speedup == pytest.approx(1.5)


def test_stalls_and_restarts_of_every_repeat_are_told(run: Run) -> None:
    """The first goes well; the second stalls twice, its job starts again, and it is slower."""
    timed = {"training.steps": 20, "training.seq_len": 64, "training.local_batch_size": 2}
    run.add("base", steady_log(100), options=timed)
    before = "".join(metrics_line(s, tps="25" if s == 6 else "60") for s in range(1, 10))
    after = "".join(metrics_line(s, tps="25" if s == 14 else "60") for s in range(8, 17))
    run.add("base-r2", before, after, options=timed, repeat_of="base", repeat=2)
    results = run.collect()
    (cell,) = results.cells
    first, second = cell.repeats
    # Of its own median: a slow repeat has no more stalls than others.
    assert [
        one.measured.throughput and one.measured.throughput.stalls for one in (first, second)
    ] == [(), (6, 14)]
    assert cell.measured.throughput is not None and cell.measured.throughput.stalls == (6, 14)
    # Not a median with the loss of the second, which got to step 16.
    assert (second.measured.final_loss, cell.measured.final_loss) == (3.5, 3.0)
    assert [len(one.measured.history.attempts) for one in (first, second)] == [1, 2]
    assert len(cell.measured.history.attempts) == 3
    assert (first.measured.history.steps_lost, cell.measured.history.steps_lost) == (0, 2)
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
