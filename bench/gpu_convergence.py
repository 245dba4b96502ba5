"""In: a machine with GPUs. Out: loss curves of BF16 and MXFP8 on the proxy model, and a verdict.

    python -m bench.gpu_convergence train OUT [--text FOLDER] [--steps 1500] [--seconds 570]
    python -m bench.gpu_convergence draw OUT docs/convergence

`train` runs the cells of `sweep convergence_proxy` side by side, one on each GPU in turn, and three
seeds of BF16, whose distance from one another is what chance does. Each curve is written to
OUT/<run>.csv. `draw` makes curves.svg and verdict.md of them (it needs matplotlib).

The text is Python source: by default the corpus of set-up, else all that lies below FOLDER.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.corpus import make_corpus
from cookbook.curve import collect_steps
from cookbook.files import write_whole
from cookbook.machine import visible_gpus

ROOT = Path(__file__).resolve().parent.parent
SUBMIT = [sys.executable, str(ROOT / "submit.py")]


@dataclass(frozen=True)
class Training:
    """One curve: a precision and the seed of its initial weights."""

    precision: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.precision}-seed{self.seed}"


TRAININGS = (
    Training("mxfp8", 42),
    Training("mxfp8_wgrad_hp", 42),
    Training("bf16", 42),
    Training("bf16", 43),
    Training("bf16", 44),
)
BASELINE = Training("bf16", 42)


def train(out: Path, text: Path | None, steps: int, seconds: float, words: Sequence[str]) -> int:
    """Run all trainings until they end or `seconds` have passed; write what there is of each."""
    deadline = time.monotonic() + seconds
    assets = out / "assets"
    make_corpus(assets, text)
    gpus = max(len(visible_gpus()), 1)
    running = {}
    for number, training in enumerate(TRAININGS):
        runs = out / "runs" / training.name
        command = [
            *(*SUBMIT, "run", "proxy", "--cluster", "local", "--precision", training.precision),
            *("--set", f"training.steps={steps}", "--set", f"debug.seed={training.seed}"),
            *("--set", f"training.dataset_path={assets / 'corpus'}"),
            *("--set", f"model.hf_assets_path={assets / 'tokenizer'}"),
            *words,
        ]
        environment = {**os.environ, "COOKBOOK_RUNS": str(runs)}
        if visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        with (out / f"{training.name}.log").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        running[training] = (process, environment)
    while time.monotonic() < deadline and any(p.poll() is None for p, _ in running.values()):
        time.sleep(1)
    for training, (process, environment) in running.items():
        if process.poll() is None:
            subprocess.run([*SUBMIT, "cancel"], env=environment, check=False)
            process.wait(60)
        print(f"{training.name}: {_write_curve(out, training)} steps")
    return 0


def _write_curve(out: Path, training: Training) -> int:
    cells = list((out / "runs" / training.name).glob("*/proxy-*"))
    steps = collect_steps(cells[0], {"options": {}}) if cells else []
    lines = [f"{step.step},{step.loss},{step.grad_norm}\n" for step in steps]
    write_whole(out / f"{training.name}.csv", "".join(["step,loss,grad_norm\n", *lines]))
    return len(steps)


def read_curve(path: Path) -> list[float]:
    """The losses of steps 1, 2, ..."""
    with path.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


# Student's t, 97.5%, for two degrees of freedom: three seeds.
_T_THREE_SEEDS = 4.303


def verdict(curves: dict[str, list[float]]) -> tuple[list[tuple[str, float, float]], float]:
    """Each curve's mean loss over the last tenth of the steps, and how far it is from BF16's.

    Returns:
        (name, mean, mean minus that of BF16's seeds) of each curve, and the half width of the 95%
        prediction interval for one more seed of BF16: what a distance must exceed to mean anything.
    """
    length = min(map(len, curves.values()))
    tail = {name: _mean(curve[length - length // 10 : length]) for name, curve in curves.items()}
    seeds = [mean for name, mean in tail.items() if name.startswith("bf16")]
    base = _mean(seeds)
    spread = math.sqrt(sum((mean - base) ** 2 for mean in seeds) / (len(seeds) - 1))
    rows = [(name, mean, mean - base) for name, mean in tail.items()]
    return rows, _T_THREE_SEEDS * spread * math.sqrt(1 + 1 / len(seeds))


def distances(curves: dict[str, list[float]]) -> dict[str, float]:
    """Root mean square of each smoothed curve's distance from the baseline's, over all steps."""
    base = _smooth(curves[BASELINE.name])
    return {
        name: math.sqrt(_mean([(a - b) ** 2 for a, b in zip(_smooth(curve), base, strict=True)]))
        for name, curve in curves.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw(out: Path, target: Path) -> int:
    """Draw the curves and write the verdict; copy the data beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {t.name: read_curve(out / f"{t.name}.csv") for t in TRAININGS}
    length = min(map(len, curves.values()))
    target.mkdir(parents=True, exist_ok=True)
    figure, (whole, difference) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    colours = dict(zip(curves, ["tab:red", "tab:blue", "black", "0.55", "0.75"], strict=True))
    base = _smooth(curves[BASELINE.name][:length])
    for name, curve in curves.items():
        write_whole(target / f"{name}.csv", (out / f"{name}.csv").read_text())
        smooth = _smooth(curve[:length])
        steps = range(len(curve) - len(smooth) + 1, len(curve) + 1)
        # The curves lie on one another: MXFP8's on top, dashed, so that both are seen.
        style = {"zorder": 3, "linestyle": "--"} if name.startswith("mxfp8") else {"zorder": 2}
        whole.plot(steps, smooth, label=name, color=colours[name], linewidth=1.1, **style)
        if name != BASELINE.name:
            distance = [value - other for value, other in zip(smooth, base, strict=True)]
            order = style["zorder"]
            difference.plot(
                steps, distance, label=name, color=colours[name], linewidth=1.1, zorder=order
            )
    whole.set(xlabel="step", ylabel="loss (mean of 25 steps)", title="training loss")
    difference.set(xlabel="step", ylabel="loss minus BF16's (seed 42)", title="distance from BF16")
    difference.axhline(0, color="black", linewidth=0.8)
    difference.set_ylim(-0.1, 0.1)
    for axes in (whole, difference):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target / "curves.svg", metadata={"Date": None})
    equal = {name: curve[:length] for name, curve in curves.items()}
    rows, chance = verdict(equal)
    far = distances(equal)
    lines = ["| curve | mean loss, last tenth | minus BF16 | distance of the curves | verdict |"]
    lines.append("| --- | ---: | ---: | ---: | --- |")
    for name, mean, distance in rows:
        word = "BF16" if name.startswith("bf16") else "equal"
        if abs(distance) > chance:
            word = "different"
        lines.append(f"| {name} | {mean:.4f} | {distance:+.4f} | {far[name]:.4f} | {word} |")
    lines.append(f"\n{length} steps. One more seed of BF16 would lie within {chance:.4f} (95%).")
    write_whole(target / "verdict.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


def _smooth(values: Sequence[float], width: int = 25) -> list[float]:
    return [_mean(values[i - width + 1 : i + 1]) for i in range(width - 1, len(values))]


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
        return draw(arguments.out, arguments.target)
    out = arguments.out.resolve()
    words = [word for setting in arguments.set for word in ("--set", setting)]
    return train(out, arguments.text, arguments.steps, arguments.seconds, words)


if __name__ == "__main__":
    sys.exit(main())
