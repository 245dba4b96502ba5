"""In: a machine with GPUs. Out: loss curves of BF16 and MXFP8 on the proxy model, and a verdict.

    python -m bench.gpu_convergence train OUT [--text FOLDER] [--steps 1500] [--seconds 570]
    python -m bench.gpu_convergence draw OUT docs/convergence

`train` runs the cells of `sweep convergence_proxy` with each of five seeds side by side, on each
GPU in turn, and writes each curve to OUT/<run>.csv as it grows; a curve that is there with all its
steps is kept. `draw` makes curves.svg and verdict.md of those that are whole.

The text is Python source: by default the corpus of set-up, else all that lies below FOLDER.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.convergence_verdict import PRECISIONS, SEEDS, curve_name, draw, read_curve
from cookbook.base.files import write_whole
from cookbook.base.gpus import visible_gpus
from cookbook.install.corpus import make_corpus
from cookbook.log.curve import collect_steps
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord

ROOT = Path(__file__).resolve().parent.parent
SUBMIT = [sys.executable, str(ROOT / "submit.py")]


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


def train(out: Path, text: Path | None, steps: int, seconds: float, words: Sequence[str]) -> int:
    """Run what is missing until all end or `seconds` have passed; write what there is of each."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    assets = out / "assets"
    make_corpus(assets, text)
    gpus = max(len(visible_gpus()), 1)
    running = {}
    for number, (precision, seed) in enumerate(missing(out, steps)):
        name = curve_name(precision, seed)
        command = [
            *(*SUBMIT, "run", "proxy", "--cluster", "local", "--precision", precision),
            *("--set", f"training.steps={steps}", "--set", f"debug.seed={seed}"),
            *("--set", f"training.dataset_path={assets / 'corpus'}"),
            *("--set", f"model.hf_assets_path={assets / 'tokenizer'}"),
            *words,
        ]
        environment = {**os.environ, "COOKBOOK_RUNS": str(out / "runs" / name)}
        if visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        with (out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        running[name] = (process, environment)
    while time.monotonic() < deadline and any(p.poll() is None for p, _ in running.values()):
        time.sleep(10)
        for name in running:  # what is there now is not lost if this machine is
            _write_curve(out, name)
    for name, (process, environment) in running.items():
        if process.poll() is None:
            subprocess.run([*SUBMIT, "cancel"], env=environment, check=False)
            process.wait(60)
        print(f"{name}: {_write_curve(out, name)} steps")
    return 1 if missing(out, steps) else 0


def _write_curve(out: Path, name: str) -> int:
    cells = sorted((out / "runs" / name).glob("*/proxy-*"))
    steps = collect_steps(CellFolder(cells[-1]), CellRecord()) if cells else []
    lines = [f"{step.step},{step.loss},{step.grad_norm}\n" for step in steps]
    write_whole(out / f"{name}.csv", "".join(["step,loss,grad_norm\n", *lines]))
    return len(steps)


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
    words = [word for setting in arguments.set for word in ("--set", setting)]
    return train(out, arguments.text, arguments.steps, arguments.seconds, words)


if __name__ == "__main__":
    sys.exit(main())
