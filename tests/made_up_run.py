"""Runs that nobody made: folders, records and logs, for the tests of results.

python -m tests.made_up_run FOLDER: the run of four cells by which the page is looked at.
"""

import json
import math
import random
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from cookbook.results.collect import collect_results
from cookbook.results.result import Result, RunResults
from cookbook.run.run import Run as RunFolder
from cookbook.run.run import read_run
from cookbook.run.states import cell_states

NAME = "matrix-20261120-182922"
# The charts of these runs, which do not validate; tests/test_report.py has some that do.
DRAWN = ["throughput", "loss", "loss-difference", "step-time", "router-load"]
DRAWN += ["grad-norm", "learning-rate"]
_BEGIN = datetime(2026, 11, 20, 18, 29, 22, 279_000, tzinfo=UTC)


def metrics_line(
    step: int,
    rank: int | None = 0,
    loss: str = "3.5",
    tps: str = "100",
    memory: str = "10.00",
    when: datetime = _BEGIN,
    flops: str = "tflops: 2.00  mfu: 3.00%",
) -> str:
    """A line of TorchTitan's console."""
    prefix = "" if rank is None else f"[rank{rank}]:"
    stamp = f"{when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03}"
    return (
        f"{prefix}[titan] {stamp} - root - INFO - step: {step:2}  loss: {loss}  "
        f"grad_norm:  1.0000  memory: {memory}GiB(5.00%)  tps: {tps}  {flops}\n"
    )


_STEP = re.compile(r"(?m)^\[rank(\d+)\]:\[titan\] (.{23}) - root - INFO - (step: .*)")
_SHOWN = {"step": "step", "loss": "loss", "memory": "memory_gib", "tps": "tokens_per_second"}
_SHOWN |= {"grad_norm": "grad_norm", "tflops": "tflops", "mfu": "mfu"}


def steps_of(log: str) -> str:
    """What the hooks write of the steps that a console shows."""
    lines = []
    for rank, time, text in _STEP.findall(log):
        when = datetime.fromisoformat(time).timestamp()
        line: dict[str, Any] = {"rank": int(rank), "time": when}
        for name, value in re.findall(r"(\w+): +([\d.,]+|nan|inf)", text):
            line[_SHOWN[name]] = value.replace(",", "")
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


class Run:
    """A run folder under construction."""

    def __init__(self, folder: Path, baseline: str | None = "base", name: str = NAME) -> None:
        self.folder = folder / name
        self.baseline = baseline
        self.cells: list[str] = []

    def add(
        self,
        name: str,
        *attempts: str,
        state: str | None = "finished",
        reason: str | None = None,
        **cell: Any,
    ) -> Path:
        """A cell whose attempts, from number 1 on, have these console logs."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        self.cells.append(name)
        described: dict[str, Any] = {"name": name, "recipe": "debug", "precision": "bf16"}
        described |= {"ep_backend": "standard"}
        described |= {"nodes": 1, "ranks_per_node": 2, "device": "cuda", "emulated": False}
        described |= {"options": {"training.steps": 20}}
        (folder / "cell.yaml").write_text(yaml.safe_dump(described | cell))
        if state is not None:
            status = {"state": state, "reason": reason}
            (folder / "status.json").write_text(json.dumps(status))
        for number, log in enumerate(attempts, start=1):
            attempt = folder / f"attempt-{number}"
            attempt.mkdir()
            (attempt / "train.log").write_text(log)
            if lines := steps_of(log):
                (attempt / "metrics.jsonl").write_text(lines)
            # The hooks log this, and write the same into the attempt's folder.
            if active := re.findall(r"cookbook active: (.*)", log):
                (attempt / "environment.json").write_text(active[-1])
        return folder

    def write(self, **more: Any) -> None:
        """Write `run.json`, so that the local scheduler is asked about no job."""
        run = {"run": self.folder.name, "scheduler": "local", "sweep": "matrix"}
        content = run | {"baseline": self.baseline, "cells": self.cells} | more
        (self.folder / "run.json").write_text(json.dumps(content))

    def collect(self) -> RunResults:
        self.write()
        return results_of(self.folder)[1]

    def only(self) -> Result:
        (cell,) = self.collect().cells
        return cell


def results_of(folder: Path) -> tuple[RunFolder, RunResults]:
    """The run in `folder` and its results."""
    run = read_run(folder)
    return run, collect_results(run, cell_states(run))


_TOKENS = {"bf16-standard": 655, "bf16-deepep": 853, "mxfp8-standard": 701, "mxfp8-deepep": 922}
_PUBLISHED = {"bf16-standard": 651, "bf16-deepep": 859, "mxfp8-deepep": 918}
# Tokens of a step on one GPU, as those of the 671B: 64 sequences of 8,192 over TP 2 and PP 2.
_STEP_TOKENS = 8192 * 64 / 4
RESTARTED, RESTART_STEP = "mxfp8-deepep", 901
STALLED, STALL_STEP = "bf16-deepep", 500
# The cells that log their router's load, of a tenth of the steps.
LOADED = ("bf16-standard", "mxfp8-deepep")


def make_run(runs: Path, steps: int = 1500) -> Path:
    """Write a run of four finished cells below `runs`."""
    run = Run(runs, "671b-bf16-standard")
    shared = random.Random(1)
    noise = [shared.gauss(0, 0.05) for _ in range(steps)]
    for number, pair in enumerate(_TOKENS):
        _add_cell(run, number, pair, noise)
    created = {"created": "2026-11-20T18:29:22Z", "user": "ada", "commit": "33acf20"}
    run.write(**created, cluster="soperator-b200", stack="2026.02")
    return run.folder


def _add_cell(run: Run, number: int, pair: str, noise: list[float]) -> None:
    precision, _, ep_backend = pair.partition("-")
    options: dict[str, Any] = {
        "model.flavor": "671B",
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.expert_parallel_comm_backend": ep_backend,
        "training.steps": len(noise),
        "training.seq_len": 8192,
        "training.local_batch_size": 64,
    }
    if precision == "mxfp8":
        options["quantize.grouped_mm.mx.recipe_name"] = "mxfp8"
    attempts = [_steps(pair, number, noise)]
    cut = RESTART_STEP - 1
    if pair == RESTARTED and len(noise) > cut:
        # It ran on to 30 steps behind its checkpoint before a node was lost.
        attempts = [attempts[0][: cut + 30], attempts[0][cut:]]
    folder = run.add(
        f"671b-{pair}",
        *(
            "".join(
                _line(step, when + timedelta(minutes=20 * late), *row) for step, when, *row in kept
            )
            for late, kept in enumerate(attempts)
        ),
        recipe="deepseek_v3_671b",
        precision=precision,
        ep_backend=ep_backend,
        cluster="soperator-b200",
        stack="2026.02",
        nodes=32,
        ranks_per_node=8,
        published_tokens_per_second_per_gpu=_PUBLISHED.get(pair),
        published_source="https://example.org/article" if pair in _PUBLISHED else None,
        baseline=run.baseline,
        options=options,
    )
    for late, kept in enumerate(attempts, 1):
        path = folder / f"attempt-{late}"
        (path / "environment.json").write_text(json.dumps(_environment(precision, ep_backend)))
        lines = [
            _metrics(step, when + timedelta(minutes=20 * (late - 1)), *row)
            for step, when, *row in kept
        ]
        (path / "metrics.jsonl").write_text("".join(lines))
        if pair in LOADED:
            tens = [step for step, *_ in kept][9::10]
            (path / "router_load.jsonl").write_text(_load(tens, random.Random(number)))


def _steps(pair: str, number: int, noise: list[float]) -> list[Any]:
    own = random.Random(number + 2)
    when, steps = _BEGIN + timedelta(hours=number), []
    for step, common in enumerate(noise, start=1):
        pace = own.gauss(1, 0.008) * (0.2 if step == 1 else 0.9 if step < 6 else 1)
        if own.random() < 0.004 or (pair == STALLED and step == STALL_STEP):
            pace *= 0.3
        tokens = _TOKENS[pair] * pace
        when += timedelta(seconds=_STEP_TOKENS / tokens)
        loss = 2.6 + 9.2 * math.exp(-step / 90) + 1.1 * math.exp(-step / 700) + common
        loss *= 1 + own.gauss(0, 0.0006) + (0.0004 if pair.startswith("mxfp8") else 0)
        memory = 150.2 - 6 * number + (0 if step < 4 else 1.5)
        steps.append((step, when, loss, memory, tokens))
    return steps


def _line(step: int, when: datetime, loss: float, memory: float, tokens: float) -> str:
    flops = f"tflops: {tokens * 0.262:.2f}  mfu: {tokens * 0.0117:.2f}%"
    return metrics_line(step, 128, f"{loss:.5f}", f"{tokens:.0f}", f"{memory:.2f}", when, flops)


def _metrics(step: int, when: datetime, loss: float, memory: float, tokens: float) -> str:
    """The same, as the hooks write it, with what the console does not show."""
    noise = random.Random(step).gauss(0, 0.03)
    warm, late = min(1.0, step / 100), 0.5 + 0.5 * math.cos(step / 500)
    line = {"step": step, "rank": 128, "time": when.timestamp(), "loss": round(loss, 5)}
    line |= {"grad_norm": 0.3 + 2 * math.exp(-step / 60) + noise, "lr": 3e-4 * warm * late}
    line |= {"tokens_per_second": round(tokens), "tflops": round(tokens * 0.262, 2)}
    line |= {"mfu": round(tokens * 0.0117, 2), "memory_gib": round(memory, 2)}
    return json.dumps(line | {"tokens_seen": step * _STEP_TOKENS * 256}) + "\n"


def _load(steps: list[int], own: random.Random) -> str:
    layers, lines = list(range(3, 61)), []
    for step in steps:
        uneven = [
            (0.12 + 0.9 * math.exp(-step / 120) + (0.35 if layer % 19 == 3 else 0))
            * own.gauss(1, 0.04)
            for layer in layers
        ]
        line: dict[str, Any] = {
            "first_step": step - 9,
            "step": step,
            "forced": False,
            "layers": layers,
            "busiest_over_mean": [round(math.exp(2.8 * spread), 4) for spread in uneven],
            "starved_experts": [int(max(0, spread - 0.4) * 9) for spread in uneven],
        }
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def _environment(precision: str, ep_backend: str) -> dict[str, Any]:
    is_deepep = ep_backend == "deepep"
    versions = {"torch": "2.10.0+cu128", "deep_ep": "1.2.1+29d31c0" if is_deepep else None}
    return {
        "precision": precision,
        "ep_backend": ep_backend,
        "grouped_gemms": precision,
        "emulated": False,
        "device": "cuda",
        "gpu": "NVIDIA B200",
        "linear_layers": "bf16",
        "corrections": ["deepep_tp_split"] if is_deepep else [],
        "versions": versions,
        "nodes": [f"worker-{node}" for node in range(33 if is_deepep else 32)][-32:],
    }


if __name__ == "__main__":
    print(make_run(Path(sys.argv[1])))
