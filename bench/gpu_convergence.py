"""Trains the proxy model in BF16 and MXFP8 with five seeds each, and judges their loss curves.

    python -m bench.gpu_convergence train OUT [--text FOLDER] [--steps 1500] [--seconds 570]
    python -m bench.gpu_convergence draw OUT docs/convergence

`train` runs the cells of `sweep convergence_proxy` with each of five seeds side by side, on each
GPU in turn, and writes each curve to OUT/<run>.csv as it grows; a curve that is there with all its
steps is kept. `draw` makes curves.svg and verdict.md of those that are whole.

The text is Python source: by default the corpus of set-up, else all that lies below FOLDER.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cells import gpu_ids
from bench.convergence_verdict import PRECISIONS, SEEDS, curve_name, draw, read_curve
from bench.torchrun import Job
from bench.training import Outcome, train_all
from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.cells.cell import Cell
from cookbook.cells.cluster import Cluster, load_cluster
from cookbook.cells.expand import CellRequest, command_line_settings, expand_sweep
from cookbook.cells.sweep import load_sweep
from cookbook.install.corpus import make_corpus
from cookbook.log.lines import StepMetrics


def missing(out: Path, steps: int) -> list[tuple[str, int]]:
    """The trainings without a whole curve in `out`, the slowest precision first.

    On each of 2 or 4 GPUs in turn they then take about the same time.
    """
    wanted = [(precision, seed) for precision in reversed(PRECISIONS) for seed in SEEDS]
    return [
        (precision, seed)
        for precision, seed in wanted
        if not (path := out / f"{curve_name(precision, seed)}.csv").is_file()
        or len(read_curve(path)) < steps
    ]


def cell_of(precision: str, seed: int, steps: int, assets: Path, words: Sequence[str]) -> Cell:
    """The cell of `sweep convergence_proxy` with that precision, on one GPU of this machine."""
    settings = [
        f"training.steps={steps}",
        f"debug.seed={seed}",
        f"training.dataset_path={assets / 'corpus'}",
        f"model.hf_assets_path={assets / 'tokenizer'}",
        *words,
    ]
    request = CellRequest(
        _one_gpu(load_cluster("local")),
        precision=precision,
        overrides=command_line_settings(settings),
    )
    (cell,) = expand_sweep(load_sweep("convergence_proxy"), request)
    if cell.refused:
        raise InputError(cell.name, cell.refused)
    return replace(cell, name=curve_name(precision, seed))


def _one_gpu(cluster: Cluster) -> Cluster:
    return replace(cluster, gpus_per_node=1) if cluster.gpu else cluster


def train(out: Path, text: Path | None, steps: int, seconds: float, words: Sequence[str]) -> int:
    """Run what is missing until all end or `seconds` have passed; write what there is of each."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    assets = out / "assets"
    make_corpus(assets, text)
    gpus = gpu_ids()
    jobs = [
        Job(
            cell_of(precision, seed, steps, assets, words),
            folder=out / "runs" / curve_name(precision, seed),
            caches=out,
            environment={"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {},
        )
        for number, (precision, seed) in enumerate(missing(out, steps))
    ]

    def note(job: Job, outcome: Outcome) -> None:
        _write_curve(out, job, outcome.steps)
        why = f": {outcome.reason}" if outcome.reason else ""
        print(f"{job.cell.name}: {len(outcome.steps)} steps{why}", flush=True)

    train_all(
        jobs,
        note,
        deadline=deadline,
        may_start=lambda job, running: True,
        # What is there now is not lost if this machine is.
        look=lambda job, done: _write_curve(out, job, done),
    )
    return 1 if missing(out, steps) else 0


def _write_curve(out: Path, job: Job, steps: Sequence[StepMetrics]) -> None:
    lines = [f"{step.step},{step.loss},{step.grad_norm}\n" for step in steps]
    write_whole(out / f"{job.cell.name}.csv", "".join(["step,loss,grad_norm\n", *lines]))


def main() -> int:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("train")
    trained.add_argument("out", type=Path)
    trained.add_argument("--text", type=Path)
    trained.add_argument("--steps", type=int, default=1500)
    trained.add_argument("--seconds", type=float, default=570)
    trained.add_argument("--set", action="append", default=[], help="as for `submit.py run`")
    drawn = commands.add_parser("draw")
    drawn.add_argument("out", type=Path)
    drawn.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        try:
            draw(arguments.out, arguments.target)
        except ModuleNotFoundError as error:
            sys.exit(f"draw needs the package {error.name}; run: ./setup.sh --local --dev")
        return 0
    out = arguments.out.resolve()
    try:
        return train(out, arguments.text, arguments.steps, arguments.seconds, arguments.set)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
