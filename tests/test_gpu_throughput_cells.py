"""The cells of the benchmark of throughput: those it knows, and those a command line defines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import throughput_plan
from bench.corpora import Corpus
from bench.throughput_cells import CELLS, Trained, cell_of, choose, seq_len_of
from bench.throughput_plan import Plan
from bench.torchrun import Job, released_argv, torchrun_command
from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu
from cookbook.config.cluster import Cluster
from cookbook.config.resolve import this_machine
from cookbook.run.folder import CellFolder

H200 = this_machine(4, Gpu("NVIDIA H200", 9.0, 139.8))
LONG = Corpus("long", "/text/long", 10, 100, 10.0, 9.0, 8192, 7.0)


def jobs_of(cells: Mapping[str, Trained], out: Path, machine: Cluster = H200) -> dict[str, Job]:
    asked = Plan(out, cells, (LONG,), machine, repeats=1, warm_up=1, steps=3, deadline=0.0)
    return asked.jobs(LONG)


def job_of(name: str, out: Path) -> Job:
    return jobs_of({name: CELLS[name]}, out)[name]


@pytest.mark.titan
@pytest.mark.parametrize("name", CELLS)
def test_torchtitan_trains_what_a_cell_says(name: str, tmp_path: Path) -> None:
    from cookbook.config.cell import train_argv
    from tests.titan_config import parse

    job = job_of(name, tmp_path)
    found = parse(released_argv(job.cell) if job.released else train_argv(job.cell))
    assert job.released is name.startswith("released")
    assert found["training.dataset_path"] == "/text/long"
    assert (found["training.seq_len"], found["training.steps"]) == (8192, 4)
    assert found["debug.moe_force_load_balance"] is not name.endswith("real")
    assert found["parallelism.expert_parallel_comm_backend"] == CELLS[name].ep_backend


def test_a_cell_can_be_defined_by_another_and_options(tmp_path: Path) -> None:
    defined = [
        ["real", "released-standard", "debug.moe_force_load_balance=false"],
        ["kept", "real", "activation_checkpoint.mode=none", "training.local_batch_size=3"],
    ]
    chosen = choose(["kept", "released-standard", "real"], defined)
    assert list(chosen) == ["kept", "released-standard", "real"]
    jobs = jobs_of(chosen, tmp_path)
    kept, base = jobs["kept"], jobs["released-standard"]
    assert kept.released and kept.cell.ep_backend.name == "standard"
    changed = {
        "debug.moe_force_load_balance": (True, False),
        "activation_checkpoint.mode": ("full", "none"),
        "training.local_batch_size": (4, 3),
    }
    both = base.cell.options.values, kept.cell.options.values
    differ = {name: (both[0][name], both[1][name]) for name in both[0]}
    assert {name: pair for name, pair in differ.items() if pair[0] != pair[1]} == changed
    # The same on a CPU: what was asked for is not made smaller there.
    cpu = jobs_of(chosen, tmp_path, this_machine(2, None))["kept"]
    assert cpu.cell.options["training.seq_len"] == 128
    assert cpu.cell.options["training.local_batch_size"] == 3


@pytest.mark.parametrize(
    ("names", "defined", "said"),
    [
        (["deepep"], ["deepep", "standard"], "there is a cell of this name"),
        (["a"], ["a"], "unknown cell ''"),
        (["a"], ["a", "deepp"], "did you mean 'deepep'"),
        (["a"], ["a", "deepep", "training.local_batch=2"], "training.local_batch_size"),
        (
            ["a"],
            ["a", "deepep", "training.local_batch_size=two"],
            "--cell a: training.local_batch_size: found",
        ),
        (["deepep"], ["a", "deepep"], "is not among the cells"),
        (["../a"], ["../a", "deepep"], "letters, digits"),
        (["deepep", "deepep"], None, "named twice"),
    ],
)
def test_a_wrong_definition_is_refused(
    names: list[str], defined: list[str] | None, said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        choose(names, [defined] if defined else [])


def test_what_is_wrong_on_gpus_is_said_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput_plan, "first_gpu", lambda needed, instead: H200.gpu)
    hooked = "parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8"
    for words, said in (
        (["deepep", "--steps", "9"], "--steps: found 9, allowed: 10 or more"),
        (["a", "--cell", "a", "released-standard", hooked], "released, parallelism"),
    ):
        with pytest.raises(SystemExit, match="2"):
            throughput_plan.read_plan("", [str(tmp_path / "out"), *words])
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_declares_what_it_turns_on(name: str, tmp_path: Path) -> None:
    job = job_of(name, tmp_path)
    found = torchrun_command(job, CellFolder(tmp_path).next_attempt())
    declared = {
        word
        for word in found
        if word.startswith("--cookbook.") and not word.endswith(("emulated", "row_kernels"))
    }
    if name.startswith("released"):
        assert not declared
        return
    backend, precision = CELLS[name].ep_backend, CELLS[name].precision
    quantized = precision == "float8"
    assert declared == {
        f"--cookbook.precision={precision}",
        f"--cookbook.ep_backend={backend}",
        f"--cookbook.dispatch={backend}",
        f"--cookbook.grouped_gemms={'fp8_rowwise' if quantized else 'bf16'}",
        f"--cookbook.linear_layers={precision}",
    }


def test_sequences_of_two_lengths_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = dataclasses.replace(CELLS["deepep"], options={"training.seq_len": 4096})
    monkeypatch.setitem(CELLS, "shorter", shorter)
    assert seq_len_of(choose(["standard", "deepep"], []), H200) == 8192
    with pytest.raises(ValueError, match=r"\[4096, 8192\]"):
        seq_len_of(choose(["standard", "shorter"], []), H200)


@pytest.mark.parametrize("gpus", [2, 4])
def test_experts_are_divided_among_all_gpus_of_the_machine(gpus: int) -> None:
    machine = this_machine(gpus, Gpu("NVIDIA H200", 9.0, 139.8))
    cell = cell_of("deepep", CELLS["deepep"], machine, Path("text"), Path("tokenizer"), 13)
    assert (cell.world, cell.layout.ep) == (gpus, gpus)
