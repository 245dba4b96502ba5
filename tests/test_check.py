"""Where check's verdicts turn, its advice, and its report of what TorchTitan built; no torch."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.base.gpus import Gpu
from cookbook.check import check, warnings
from cookbook.check.check import Built, CellCheck, check_cells
from cookbook.check.report import render_json, render_text
from cookbook.config.cell import Cell, Finding
from cookbook.config.cluster import load_cluster
from cookbook.config.resolve import this_machine
from cookbook.predict import memory
from cookbook.predict.memory import StageMemory
from cookbook.predict.rank import describe_ranks
from tests.cells import Point
from tests.check_cells import cell_of, cluster_of, with_options
from tests.predict_machine import on_gpus

BIG, SMALL = "deepseek_v3_671b", "deepseek_v3_16b"
TP, PP, EP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "expert"))
BATCH, MINUTES = "training.local_batch_size", "checkpoint.interval_minutes"
MODE = "activation_checkpoint.mode"
ACTIVE = {"grouped_gemms": "bf16", "linear_layers": "bf16", "attention": "flex"}


def built(cell: Cell, *active: dict[str, Any], **changed: Any) -> Built:
    """TorchTitan's answer for `cell`; `active` are changes on each stage."""
    return Built(
        tuple(
            {"active": ACTIVE | one, "warnings": [], "not_exercised": ["kernels"], **changed}
            for one in active or [{}] * cell.layout.pp
        ),
        seconds=1.0,
    )


def checked(
    cells: Sequence[Cell], answers: Sequence[Built], monkeypatch: pytest.MonkeyPatch
) -> list[CellCheck]:
    monkeypatch.setattr(check, "build_cells", lambda wanted: list(answers[: len(wanted)]))
    named = [dataclasses.replace(one, name=f"cell-{place}") for place, one in enumerate(cells)]
    return check_cells(named)


@pytest.mark.parametrize(
    ("gib", "stages", "verdict"),
    [
        (920.0, 1, "fits"),
        (920.1, 1, "tight"),
        (880.0, 2, "fits"),
        (880.1, 2, "tight"),
        (1050.0, 2, "tight"),
        (1050.1, 1, "will not fit"),
    ],
)
def test_verdicts_turn_at_92_or_88_and_105_percent(gib: float, stages: int, verdict: str) -> None:
    assert memory.verdict(gib, 1000.0, cell_of(SMALL, {PP: stages}).facts) == verdict


@pytest.mark.parametrize(
    ("totals", "gib", "level"),
    [
        ((90.0, 95.0, 30.0), 110.0, None),
        ((95.0, 90.0), 100.0, "warning"),
        ((30.0, 90.0, 95.0), 90.0, "error"),
    ],
)
def test_the_fullest_stage_decides_wherever_it_is(
    totals: tuple[float, ...], gib: float, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = on_gpus(4)
    small = dataclasses.replace(cell, cluster=this_machine(4, Gpu("NVIDIA H200", 9.0, gib)))
    (rank,) = describe_ranks(cell)
    ranks = [dataclasses.replace(rank, rank=place) for place in range(len(totals))]
    monkeypatch.setattr(check, "describe_ranks", lambda cell: ranks)
    monkeypatch.setattr(
        check,
        "predict_memory",
        lambda cell, one: StageMemory(one.rank, "the loss", {"activations": totals[one.rank]}, 0.0),
    )
    (found,) = checked([small], [built(cell)], monkeypatch)
    assert found.peak and found.peak.total == 95
    told = [one for one in found.findings if one.rule == "memory"]
    assert [one.level for one in told] == ([level] if level else [])
    assert all(f"rank {totals.index(95.0)}, at the loss" in one.reason for one in told)
    assert found.may_run is (level != "error")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "use more GPUs: parameters, gradients and optimizer state alone take 59 GiB"),
        ({MODE: "none"}, f"set {MODE} full, or lower {BATCH}"),
        ({BATCH: 64, "loss.num_chunks": 8}, f"lower {BATCH}"),
        ({BATCH: 16, "compile.components": ["model"]}, f"lower {BATCH}, or compile the loss"),
    ],
)
def test_the_remedy_lowers_the_largest_term(
    options: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = on_gpus(4, options)
    small = dataclasses.replace(cell, cluster=this_machine(4, Gpu("NVIDIA H200", 9.0, 20.0)))
    (found,) = checked([small], [built(cell)], monkeypatch)
    assert found.judged.errors[0].remedy == remedy


@pytest.mark.parametrize(("host_gib", "fits"), [(2, True), (0.2, False)])
def test_on_a_cpu_the_machines_memory_counts_and_the_verdict_stands_last(
    host_gib: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(total=host_gib * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("words")
    texts = {"training.dataset": "text", "data.files": [str(tmp_path)]}
    cell = with_options(Point("debug", "bf16", "standard", "local").cell(), texts)
    (found,) = checked([cell], [built(cell)], monkeypatch)
    assert found.verdict == ("fits" if fits else "will not fit")
    text = render_text("debug", [found])
    verdict = next(line for line in text.splitlines() if line.startswith("  cell-0"))
    assert text.endswith(f"\n{verdict}\n") and "389 MiB" in verdict
    assert "memory, MiB a rank" in text and "16.5 M parameters" in text
    assert "NVLink" not in text and " 0.0 " not in text and "GPU" not in text
    assert "read: tokenizer and texts" in text


def test_one_refused_cell_is_told_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = on_gpus(4, {"metrics.log_freq": 7})
    failure = {"error": "log_freq is odd", "rank": 1, "place": "torchtitan/a.py:3", "kind": "E"}
    found = checked([cell, cell], [built(cell), Built(failure=failure)], monkeypatch)
    content = json.loads(render_json(found))
    assert content["may_run"] is False
    good, refused = content["cells"]
    assert (good["may_run"], refused["may_run"]) == (True, False)
    assert good["memory"]["verdict"] == "fits" and good["built"] and good["step"]["step_ms"] > 0
    peak = found[0].peak
    assert peak and good["memory"]["total_gib"] == round(peak.total, 2)
    assert (refused["memory"], refused["step"], refused["built"]) == (None, None, False)
    assert json.loads(render_json(found[:1]))["may_run"] is True
    (error,) = [one for one in refused["findings"] if one["level"] == "error"]
    assert (error["rule"], error["option"]) == ("torchtitan", "metrics.log_freq")
    assert error["reference"].endswith("/torchtitan/a.py")


@pytest.mark.parametrize(
    ("message", "option"),
    [("tensor_parallel_degree must not be an interval", TP), ("something else", "")],
)
def test_option_of_a_failure(message: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = on_gpus(4, {TP: 2, "checkpoint.interval": 7})
    failure = {"error": message, "rank": 3, "place": "torchtitan/train.py:12", "kind": "E"}
    (found,) = checked([cell], [Built(failure=failure)], monkeypatch)
    assert found.judged.errors[0].option == option
    assert f"refuses it: {message} (rank 3, torchtitan/train.py:12)" in found.summary


def test_a_model_that_is_not_counted_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = with_options(on_gpus(4), {"optimizer.implementation": "for-loop"})
    (found,) = checked([cell], [built(cell)], monkeypatch)
    assert found.may_run and found.is_built and found.stages and not found.step
    assert "not fused: its time is not modelled" in found.no_step


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([{"grouped_gemms": "mxfp8"}], ""),
        ([{}], "grouped_gemms mxfp8, and bf16 is active in the model that TorchTitan builds"),
        ([{"grouped_gemms": "mxfp8"}, {"grouped_gemms": None}], ""),
        ([{"grouped_gemms": "mxfp8"}, {}], "and bf16 and mxfp8 is active"),
        ([{"grouped_gemms": "mxfp8", "linear_layers": "mx"}], "expects linear_layers bf16"),
    ],
)
def test_kernels_other_than_expected_refuse_a_cell(
    stages: list[dict[str, Any]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(BIG, precision="mxfp8", options={PP: 1, TP: 1, BATCH: 1})
    (found,) = checked([cell], [built(cell, *stages)], monkeypatch)
    reasons = [one.reason for one in found.judged.errors if one.rule == "expectation"]
    assert len(reasons) == bool(told) and all(told in reason for reason in reasons)


ASYNC = {"checkpoint.enable": True, "checkpoint.async_mode": "async"}
SYNC = {"checkpoint.enable": True, "checkpoint.async_mode": "disabled"}


def hints(
    options: dict[str, Any], rate: float | None = None, days: float | None = 320
) -> list[Finding]:
    """A model of 16 B parameters in FP32: 192 GB with Adam's moments, on 32 nodes of 8 GPUs."""
    cluster = dataclasses.replace(
        cluster_of("soperator-b200"), node_failure_days=days, write_gb_per_s=rate
    )
    cell = cell_of(SMALL, options, cluster=cluster)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warnings, "count_parameters", lambda model: (16_000_000_000, 0))
        return list(warnings.saving(cell))


@pytest.mark.parametrize(
    ("options", "rate", "minutes", "best"),
    [
        # Only the copy counts: 0.75 GB a GPU at 10 GB/s; one of 32 nodes fails every 10 days.
        (ASYNC, None, 60.0, math.sqrt(2 * 0.075 * 864_000) / 60),
        (ASYNC, None, 1.0, math.sqrt(2 * 0.075 * 864_000) / 60),
        # No save is to begin before the last one is written: 192 GB at 0.1 GB/s.
        (ASYNC, 0.1, 1.0, 32),
        (SYNC, 20.0, 5.0, math.sqrt(2 * 192 / 20 * 864_000) / 60),
    ],
)
def test_the_best_interval_is_young_and_dalys(
    options: dict[str, Any], rate: float | None, minutes: float, best: float
) -> None:
    (finding,) = hints(options | {MINUTES: minutes}, rate)
    assert finding.option == MINUTES
    assert f"saved every {minutes:g} minutes; a save of 192 GB" in finding.reason
    assert "one of 32 nodes fails about every 10 days" in finding.reason
    assert finding.remedy.startswith(f"set it to about {round(best)} (")


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({}, True),
        ({"lr_scheduler.warmup_steps": 100}, False),
        (
            {"checkpoint.initial_load_in_hf": False, "checkpoint.initial_load_model_only": False},
            False,
        ),
    ],
)
def test_a_cold_adam_is_warned_of(options: dict[str, Any], is_warned: bool) -> None:
    loads = {"checkpoint.enable": True, "checkpoint.initial_load_path": "x"}
    cell = cell_of("debug", loads | {"checkpoint.initial_load_in_hf": True} | options)
    assert bool([*warnings.cold_optimizer(cell)]) is is_warned
    assert not [*warnings.cold_optimizer(dataclasses.replace(cell, resumes=True))]
    lower = cell_of("debug", loads | options | {"optimizer.lr": 1e-5})
    assert not [*warnings.cold_optimizer(lower)]


def test_no_hint_near_the_best_interval_or_where_nothing_is_known_or_saved() -> None:
    for near in (3.0, 6.0, 15.0):
        assert not hints(ASYNC | {MINUTES: near})
    assert not hints(ASYNC | {MINUTES: 999.0}, days=None)
    assert not hints({"checkpoint.enable": False, MINUTES: 999.0})
    (unknown,) = hints(SYNC | {MINUTES: 5.0})
    assert (unknown.option, unknown.remedy) == ("checkpoint.async_mode", "set it to async")


@pytest.mark.parametrize(
    ("time", "told"), [(None, 300), ("8", 120), ("08:00", 120), ("00:10:00", 150), ("1-0", 300)]
)
def test_a_short_job_is_told_late_to_stop(time: str | None, told: int) -> None:
    cluster = dataclasses.replace(load_cluster("soperator-b200"), time=time)
    assert cluster.grace_seconds == told
    assert 0 < cluster.late_seconds < told
