"""Run folders as a run leaves them give the right figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.paths import ROOT
from cookbook.base.yamlfile import Unchecked
from cookbook.results.report import facts, notes
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.run import take_submit_lock
from cookbook.run.status import AttemptEnd, Cause, write_attempt_end
from tests.made_up_run import Run, metrics_line

LOGS = Path(__file__).parent / "logs"
PP = "parallelism.pipeline_parallel_degree"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_that_was_profiled_is_said_to_be(run: Run) -> None:
    log = metrics_line(1)
    run.add("plain", log, options={"profiling.enable_profiling": False})
    run.add("asked", log, options={"profiling.enable_profiling": True})
    # By an option at the end of an sbatch line, which no record holds.
    traced = run.add("traced", log)
    (traced / "attempt-1" / "profile_traces" / "iteration_8").mkdir(parents=True)
    # Asked for, and nothing has run yet.
    run.add("waits", options={"profiling.enable_profiling": True}, state="queued")
    results = run.collect()
    assert [cell.name for cell in results.cells if cell.profiled] == ["asked", "traced"]
    said = [note.partition(": profiled, ")[0] for note in notes(results) if ": profiled, " in note]
    assert said == ["asked", "traced"]


def test_the_figures_of_a_real_run_on_two_h200(run: Run) -> None:
    run.add("base", (LOGS / "h200_stall.log").read_text())
    cell = run.only()
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


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ({}, {"emulated": True}),
        ({"emulated": True}, {}),
        ({}, {"recipe": "deepseek_v3_16b"}),
        ({}, {"device": "cpu"}),
    ],
)
def test_incomparable_cells(run: Run, base: dict[str, Any], other: dict[str, Any]) -> None:
    log = metrics_line(1) + metrics_line(2)
    run.add("base", log, **base)
    run.add("other", log, **other)
    assert run.collect().cells[1].speedup is None


@pytest.mark.parametrize("state", ["failed", "running"])
@pytest.mark.parametrize("name", ["base", "other"])
def test_only_cells_that_finished_have_a_speedup(run: Run, name: str, state: str) -> None:
    log = metrics_line(1) + metrics_line(2)
    for cell in ("base", "other"):
        run.add(cell, log, state=state if cell == name else "finished")
    base, other = run.collect().cells
    assert (base.speedup, other.speedup) == (None if name == "base" else 1.0, None)
    # What was measured is still shown.
    assert other.tokens_per_second_per_gpu == 100


def test_each_cell_may_name_its_own_baseline(run: Run) -> None:
    run.baseline = None
    log = metrics_line(1) + metrics_line(2)
    run.add("a", log, baseline="a")
    run.add("b", log.replace("tps: 100", "tps: 150"), baseline="a")
    run.add("c", log, baseline=None)
    assert [cell.speedup for cell in run.collect().cells] == [1.0, 1.5, None]


def log_of(**active: Any) -> str:
    line = f"cookbook active: {json.dumps(active)}\n"
    return metrics_line(1) + line + metrics_line(2)


def test_attention_by_a_reference_gets_no_speedup(run: Run) -> None:
    run.add("base", log_of(attention="flex"))
    run.add("reference", log_of(attention="flash_attention_4_reference"))
    run.add("kernels", log_of(attention="flash_attention_4"))
    base, reference, kernels = run.collect().cells
    assert (base.speedup, reference.speedup, kernels.speedup) == (1.0, None, 1.0)
    assert reference.emulated and not kernels.emulated
    assert reference.reason == (
        "attention by a reference: the throughput says nothing about FlashAttention-4"
    )


def test_a_loss_that_is_no_number_is_said(run: Run) -> None:
    losses = ["3.5", "nan", "3.0", "nan", "nan"]
    run.add("base", "".join(metrics_line(s, loss=v) for s, v in enumerate(losses, start=1)))
    cell = run.only()
    assert cell.final_loss is None
    assert cell.reason == "loss is nan since step 4"


def test_a_failed_cell_says_why(run: Run) -> None:
    log = (LOGS / "out_of_memory.log").read_text()
    run.add("base", log, state="failed", reason="exit code 1")
    cell = run.only()
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
    assert [cell.status for cell in cells] == ["queued", "refused", None, None, None]
    reasons = [cell.reason or "" for cell in cells]
    assert reasons[:2] == ["", "needs SM100"]
    assert "unknown/status.json: cannot be read: No such file" in reasons[2]
    assert "gone/cell.yaml: cannot be read: No such file" in reasons[3]
    assert "broken/cell.yaml:2:1: YAML syntax" in reasons[4]
    assert "broken/status.json: cannot be read" in reasons[4]
    numbers = [(c.steps, c.tokens_per_second_per_gpu, c.memory_gib, c.final_loss) for c in cells]
    assert set(numbers) == {(None, None, None, None)}


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
    run.add("other texts", log, **PLANNED | {"options": {"training.dataset_path": "/texts"}})
    run.add("no stack", log)
    cells = {cell.name: cell for cell in run.collect().cells}
    known = cells.pop("known")
    assert known.predicted_tokens_per_second_per_gpu
    assert 5_000 < known.predicted_tokens_per_second_per_gpu < 30_000
    assert known.predicted_largest
    for cell in cells.values():
        assert cell.predicted_tokens_per_second_per_gpu is None, cell.name
        assert cell.predicted_largest is None


def test_memory_is_the_peak_of_all_attempts(run: Run) -> None:
    first = "".join(metrics_line(step, memory="99.50") for step in (1, 2))
    run.add("base", first, metrics_line(2, memory="10.00"))
    assert run.only().memory_gib == 99.5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Of two nodes with eight ranks each.
        ({"training.local_batch_size": 4}, 4 * 512),
        (
            {
                "training.local_batch_size": 4,
                "parallelism.tensor_parallel_degree": 2,
                PP: 2,
                "parallelism.expert_parallel_degree": 8,
            },
            512,
        ),
        ({"training.local_batch_size": 4, "training.global_batch_size": 256}, 16 * 512),
        # TorchTitan's default.
        ({"training.global_batch_size": -1}, None),
    ],
)
def test_tokens_of_a_step_on_each_gpu(options: dict[str, int], expected: int | None) -> None:
    asked = Unchecked({"training.seq_len": 512, **options})
    assert CellRecord(nodes=2, ranks_per_node=8, options=asked).tokens_per_step_per_gpu == expected


def _timed(minutes: int) -> str:
    """Steps at the beginning and at the end of so many minutes."""
    lines = "".join(metrics_line(step) for step in (1, 2))
    return lines + metrics_line(3).replace("18:29:22", f"18:{29 + minutes}:22")


def test_gpu_hours_are_those_that_each_attempt_had(run: Run) -> None:
    """Half an hour on 8 GPUs, then 15 minutes on 4."""
    folder = run.add("base", _timed(30), _timed(15), nodes=2)
    (folder / "attempt-1/cell.yaml").write_text("nodes: 4\nranks_per_node: 2\n")
    assert run.only().gpu_hours == pytest.approx(8 * 0.5 + 4 * 0.25)


def test_a_billion_tokens_cost_what_they_take_with_their_stalls(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    text = (ROOT / "recipes/cluster/soperator-b200.yaml").read_text()
    profile.write_text(text + "\nprice_per_gpu_hour: 3.6\n")
    speeds = ["100"] * 4 + ["1000"] * 3 + ["100"]
    log = "".join(metrics_line(step, tps=tps) for step, tps in enumerate(speeds, 1))
    run.add("base", log, cluster="mine", files={"cluster": str(profile)})
    # Of the 6 measured steps three took ten times as long: 6,000 tokens in 33 s at best.
    seconds = (3 / 1000 + 3 / 100) / 6 * 1e9
    assert run.only().cost_per_billion_tokens == pytest.approx(3.6 * seconds / 3600)


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
    assert run.only().routing == routing
    assert f"routing: {routing}" in facts(run.collect())
    run.add("other", metrics_line(1), options={"debug.moe_routing": "other"})
    assert f"routing: {routing} in base; other in other" in facts(run.collect())
