"""A run that nobody made: folders, records and logs of four cells, for the tests of the report.

python -m tests.made_up_run FOLDER [--steps 1500] [--partly]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from cookbook.results.collect import collect_results
from cookbook.results.result import RunResults
from cookbook.run.run import Run, read_run
from cookbook.run.states import cell_states

NAME = "matrix-20261120-182922"
_TOKENS = {"bf16-standard": 655, "bf16-deepep": 853, "mxfp8-standard": 701, "mxfp8-deepep": 922}
_PUBLISHED = {"bf16-standard": 651, "bf16-deepep": 859, "mxfp8-deepep": 918}
_BEGIN = datetime(2026, 11, 20, 18, 29, 22, tzinfo=UTC)
# Tokens of a step on one GPU, as those of the 671B: 64 sequences of 8,192 over TP 2 and PP 2.
_STEP_TOKENS = 8192 * 64 / 4
RESTARTED, RESTART_STEP = "mxfp8-deepep", 901
STALLED, STALL_STEP = "bf16-deepep", 500
# The cells that log their router's load, of a tenth of the steps.
LOADED = ("bf16-standard", "mxfp8-deepep")
_MOE_LAYERS, _EXPERTS = range(3, 61), 256


def make_run(runs: Path, steps: int = 1500, partly: bool = False, repeats: int = 1) -> Path:
    """Write a run below `runs`.

    Args:
        repeats: how often each cell was trained.
        partly: one cell has finished, one runs, one has failed, one waits.
    """
    folder = runs / NAME
    states = dict.fromkeys(_TOKENS, "finished")
    if partly:
        words = ("finished", "running", "failed", "queued")
        states = dict(zip(_TOKENS, words, strict=True))
    cells = [f"671b-{pair}" for pair in _TOKENS]
    shared = random.Random(1)
    noise = [shared.gauss(0, 0.05) for _ in range(steps)]
    for number, (pair, state) in enumerate(states.items()):
        done = {"finished": steps, "running": steps // 3, "failed": steps // 2, "queued": 0}[state]
        _make_cell(folder / f"671b-{pair}", number, pair, state, steps, noise[:done])
        for repeat in range(2, repeats + 1):
            name = f"671b-{pair}-r{repeat}"
            _make_cell(folder / name, number + 4 * repeat, pair, state, steps, noise[:done], repeat)
            cells.append(name)
    record = {
        "run": NAME,
        "sweep": "matrix",
        "created": "2026-11-20T18:29:22Z",
        "user": "ada",
        "commit": "33acf20",
        "cluster": "soperator-b200",
        # What runs on this machine: nobody is to be asked about these jobs.
        "scheduler": "local",
        "stack": "2026.02",
        "baseline": "671b-bf16-standard",
        "cells": cells,
    }
    _write(folder / "run.json", json.dumps(record, indent=1))
    return folder


def results_of(folder: Path) -> tuple[Run, RunResults]:
    """The run in `folder` and its results."""
    run = read_run(folder)
    return run, collect_results(run, cell_states(run))


def _make_cell(
    folder: Path,
    number: int,
    pair: str,
    state: str,
    steps: int,
    noise: list[float],
    repeat: int = 1,
) -> None:
    precision, _, ep_backend = pair.partition("-")
    options: dict[str, Any] = {
        "model.flavor": "671B",
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.expert_parallel_comm_backend": ep_backend,
        "training.steps": steps,
        "training.seq_len": 8192,
        "training.local_batch_size": 64,
    }
    if precision == "mxfp8":
        options["quantize.grouped_mm.mx.recipe_name"] = "mxfp8"
    record = {
        "name": folder.name,
        "recipe": "deepseek_v3_671b",
        "precision": precision,
        "ep_backend": ep_backend,
        "cluster": "soperator-b200",
        "stack": "2026.02",
        "nodes": 32,
        "ranks_per_node": 8,
        "device": "cuda",
        "emulated": False,
        "published_tokens_per_second_per_gpu": _PUBLISHED.get(pair),
        "published_source": "https://example.org/article" if pair in _PUBLISHED else None,
        "baseline": "671b-bf16-standard",
        "options": options,
        "repeat": repeat,
        "repeat_of": f"671b-{pair}" if repeat > 1 else None,
    }
    _write(folder / "cell.yaml", yaml.safe_dump(record))
    reason = "rank 7: CUDA out of memory" if state == "failed" else None
    _write(folder / "status.json", json.dumps({"state": state, "reason": reason}))
    lines = _lines(pair, number, noise)
    cut = RESTART_STEP - 1
    attempts = [lines]
    if pair == RESTARTED and len(lines) > cut:
        # It ran on to 30 steps behind its checkpoint before a node was lost.
        attempts = [lines[: cut + 30], lines[cut:]]
    for attempt, kept in enumerate(attempts):
        if not noise:
            break
        path = folder / f"attempt-{attempt}"
        late = timedelta(minutes=20 * attempt)
        _write(
            path / "train.log", "".join(_line(step, when + late, *row) for step, when, *row in kept)
        )
        _write(path / "environment.json", json.dumps(_environment(precision, ep_backend)))
        if pair in LOADED:
            tens = [step for step, *_ in kept][9::10]
            _write(path / "router_load.jsonl", _load(tens, random.Random(number)))


def _lines(pair: str, number: int, noise: list[float]) -> list[Any]:
    """Step, time, loss, memory and tokens/s of each step."""
    own = random.Random(number + 2)
    when, lines = _BEGIN + timedelta(hours=number), []
    for step, common in enumerate(noise, start=1):
        pace = own.gauss(1, 0.008) * (0.2 if step == 1 else 0.9 if step < 6 else 1)
        if own.random() < 0.004 or (pair == STALLED and step == STALL_STEP):
            pace *= 0.3
        tokens = _TOKENS[pair] * pace
        when += timedelta(seconds=_STEP_TOKENS / tokens)
        loss = 2.6 + 9.2 * math.exp(-step / 90) + 1.1 * math.exp(-step / 700) + common
        loss *= 1 + own.gauss(0, 0.0006) + (0.0004 if pair.startswith("mxfp8") else 0)
        memory = 150.2 - 6 * number + (0 if step < 4 else 1.5)
        lines.append((step, when, loss, memory, tokens))
    return lines


def _line(step: int, when: datetime, loss: float, memory: float, tokens: float) -> str:
    stamp = f"{when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03}"
    return (
        f"[rank128]:[titan] {stamp} - root - INFO - step: {step:2}  loss: {loss:8.5f}  "
        f"grad_norm:  1.0000  memory: {memory:.2f}GiB({memory / 1.78:.2f}%)  tps: {tokens:,.0f}  "
        f"tflops: {tokens * 0.262:.2f}  mfu: {tokens * 0.0117:.2f}%\n"
    )


def _load(steps: list[int], own: random.Random) -> str:
    """The lines of a router that learns to be even, but for some layers."""
    lines = []
    for step in steps:
        uneven = {
            layer: (0.12 + 0.9 * math.exp(-step / 120) + (0.35 if layer % 19 == 3 else 0))
            * own.gauss(1, 0.04)
            for layer in _MOE_LAYERS
        }
        line: dict[str, Any] = {
            "first_step": step - 9,
            "step": step,
            "forced": False,
            "layers": list(_MOE_LAYERS),
            "busiest_over_mean": [round(math.exp(2.8 * spread), 4) for spread in uneven.values()],
            "starved_experts": [int(max(0, spread - 0.4) * 9) for spread in uneven.values()],
        }
        if step % 50 == 0:
            line["counts_from"] = step - 49
            line["counts"] = [
                [int(8192 * math.exp(own.gauss(0, spread))) for _ in range(_EXPERTS)]
                for spread in uneven.values()
            ]
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def _environment(precision: str, ep_backend: str) -> dict[str, Any]:
    return {
        "precision": precision,
        "ep_backend": ep_backend,
        "emulated": False,
        "device": "cuda",
        "gpu": "NVIDIA B200",
        "driver": "570.86.15",
        "grouped_gemms": precision,
        "linear_layers": "bf16",
        "dispatch": ep_backend,
        "corrections": ["deepep_tp_split"] if ep_backend == "deepep" else [],
        "versions": {
            "python": "3.12.4",
            "torch": "2.10.0+cu128",
            "torchtitan": "0.2.2",
            "torchao": "0.16.0",
            "deep_ep": "1.2.1+29d31c0" if ep_backend == "deepep" else None,
        },
        "nodes": [f"worker-{node}" for node in range(32 if ep_backend == "standard" else 33)][-32:],
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--partly", action="store_true")
    given = parser.parse_args()
    print(make_run(given.folder, given.steps, given.partly))
