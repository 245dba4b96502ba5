"""What check makes of the ranks that were built, and of those that could not be; no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cookbook.base.gpus import Gpu
from cookbook.check import check
from cookbook.check.build import Built
from cookbook.check.check import CellCheck, check_cells
from cookbook.check.report import render_json, render_text
from cookbook.config.cell import Cell
from cookbook.config.resolve import this_machine
from cookbook.predict.rank import describe_ranks
from tests.predict_machine import on_gpus

ACTIVE = {"grouped_gemms": "bf16", "linear_layers": "bf16", "attention": "flex"}
TP2 = {"parallelism.tensor_parallel_degree": 2}


def built(cell: Cell, **changed: Any) -> Built:
    views = tuple(
        {**view, "active": ACTIVE, "warnings": []} | changed for view in describe_ranks(cell)
    )
    return Built(views=views, seconds=1.0, not_exercised=("kernels",))


def checked(
    cells: Sequence[Cell], answers: Sequence[Built], monkeypatch: pytest.MonkeyPatch
) -> list[CellCheck]:
    monkeypatch.setattr(check, "build_cells", lambda wanted: list(answers[: len(wanted)]))
    return check_cells([replace(cell, name=f"cell-{place}") for place, cell in enumerate(cells)])


def test_one_refused_cell_is_told_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = on_gpus(4, {"metrics.log_freq": 7})
    message = "log_freq is odd"
    failure = {"error": message, "rank": 1, "place": "torchtitan/a.py:3", "kind": "ValueError"}
    found = checked([cell, cell], [built(cell), Built(failure=failure)], monkeypatch)
    content = json.loads(render_json(found))
    assert content["may_run"] is False
    assert [one["may_run"] for one in content["cells"]] == [True, False]
    good, refused = content["cells"]
    assert good["memory"]["verdict"] == "fits" and good["built"] and good["step"]["step_ms"] > 0
    peak = found[0].peak
    assert peak and good["memory"]["total_gib"] == round(peak.total, 2)
    assert (refused["memory"], refused["step"], refused["built"]) == (None, None, False)
    assert json.loads(render_json(found[:1]))["may_run"] is True
    (error,) = [one for one in refused["findings"] if one["level"] == "error"]
    assert (error["rule"], error["option"]) == ("torchtitan", "metrics.log_freq")
    assert error["reason"].endswith("refuses it: log_freq is odd (rank 1, torchtitan/a.py:3)")
    assert error["reference"].endswith("/torchtitan/a.py")


def test_a_failure_is_put_at_the_most_particular_option(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = on_gpus(4, {**TP2, "checkpoint.interval": 7})
    message = "tensor_parallel_degree must not be an interval"
    failure = {"error": message, "rank": 3, "place": "torchtitan/train.py:12", "kind": "ValueError"}
    (found,) = checked([cell], [Built(failure=failure)], monkeypatch)
    (error,) = found.judged.errors
    assert error.option == "parallelism.tensor_parallel_degree"
    assert f"refuses it: {message} (rank 3, torchtitan/train.py:12)" in error.reason
    assert error.reference.endswith("/torchtitan/train.py")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "use more GPUs: parameters, gradients and optimizer state alone take 59 GiB"),
        (
            {"activation_checkpoint.mode": "none"},
            "set activation_checkpoint.mode full, or lower training.local_batch_size",
        ),
        (
            {"training.local_batch_size": 64, "loss.num_chunks": 8},
            "lower training.local_batch_size",
        ),
        (
            {"training.local_batch_size": 16, "compile.components": ["model"]},
            "lower training.local_batch_size, or compile the loss",
        ),
    ],
)
def test_what_lowers_the_largest_term_is_the_remedy(
    options: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = on_gpus(4, options)
    small = replace(cell, cluster=this_machine(4, Gpu("NVIDIA H200", 9.0, 20.0)))
    (found,) = checked([small], [built(cell)], monkeypatch)
    assert found.judged.errors[0].remedy == remedy


def test_bytes_are_told_in_gib_and_warnings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = on_gpus(4)
    said = ["Warmup steps exceed", "something is odd", "something is odd"]
    (found,) = checked([cell], [built(cell, warnings=said)], monkeypatch)
    texts = [one.reason for one in found.findings if one.rule == "torchtitan"]
    assert texts == ["TorchTitan warns: something is odd"]
    text = render_text("mine", [found])
    assert found.work
    sent = found.work.traffic["fsdp"].nvlink / 2**30
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("FSDP  ")]
    assert row == ["FSDP", f"{sent:.1f}", "0.0"]
    (row,) = [line.split() for line in text.splitlines() if "this cell" in line]
    assert row[:2] == ["EP", "standard"]
    assert "attention flex" in text and "not exercised:\n    kernels" in text
