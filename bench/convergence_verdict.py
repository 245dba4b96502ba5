"""In: loss curves of BF16 and MXFP8, several seeds each. Out: a verdict by rule, and a figure.

The rule is an equivalence test on pairs. The runs of one seed start from the same weights and see
the same data, so the difference of their last losses is what the precision did, and chance. Over
the seeds, the 90% confidence interval of the mean difference must lie inside plus or minus MARGIN
of BF16's loss: two one-sided t-tests at 5% each.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.files import write_whole

PRECISIONS = ("bf16", "mxfp8_wgrad_hp", "mxfp8")
SEEDS = (42, 43, 44, 45, 46)

# DeepSeek-V3 (arXiv:2412.19437, section 3.3) holds FP8 training to BF16 by this relative distance.
MARGIN = 0.0025

Curves = Mapping[tuple[str, int], Sequence[float]]


@dataclass(frozen=True)
class Verdict:
    """How far a precision's loss is from BF16's.

    Attributes:
        loss: mean of the seeds' mean losses over the last tenth of the steps.
        differences: that of each seed, minus BF16's with the same seed.
        half_width: of the 90% confidence interval of their mean.
        limit: what the interval must lie within, on both sides of 0.
    """

    precision: str
    loss: float
    differences: tuple[float, ...]
    half_width: float
    limit: float

    @property
    def difference(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def word(self) -> str:
        if not math.isfinite(self.difference):
            return "different"
        if abs(self.difference) + self.half_width <= self.limit:
            return "equal"
        if abs(self.difference) - self.half_width > self.limit:
            return "different"
        return "undecided"


def curve_name(precision: str, seed: int) -> str:
    return f"{precision}-seed{seed}"


def read_curve(path: Path) -> list[float]:
    """The losses of steps 1, 2, ..."""
    with path.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def judge(curves: Curves) -> list[Verdict]:
    """The verdict on each precision but BF16, by the rule above."""
    from scipy.stats import t

    tails = {key: last_tenth(curve) for key, curve in curves.items()}
    base = [tails["bf16", seed] for seed in SEEDS]
    quantile = float(t.ppf(0.95, len(SEEDS) - 1))
    found = []
    for precision in PRECISIONS[1:]:
        losses = [tails[precision, seed] for seed in SEEDS]
        differences = tuple(a - b for a, b in zip(losses, base, strict=True))
        finite = all(map(math.isfinite, differences))
        error = statistics.stdev(differences) / math.sqrt(len(SEEDS)) if finite else math.inf
        limit = MARGIN * statistics.fmean(base)
        mean = statistics.fmean(losses)
        found.append(Verdict(precision, mean, differences, quantile * error, limit))
    return found


def last_tenth(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-(len(curve) // 10) :])


def smooth(values: Sequence[float], width: int = 25) -> list[float]:
    return [statistics.fmean(values[i - width + 1 : i + 1]) for i in range(width - 1, len(values))]


def render(curves: Curves) -> str:
    """Markdown: the verdicts, then the last losses of every seed."""
    verdicts = judge(curves)
    lines = ["| precision | loss | minus BF16 | 90% interval | allowed | verdict |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
    base = statistics.fmean(last_tenth(curves["bf16", seed]) for seed in SEEDS)
    lines.append(f"| bf16 | {base:.4f} | | | | |")
    for found in verdicts:
        low, high = (found.difference + sign * found.half_width for sign in (-1, 1))
        interval = f"{low:+.4f} to {high:+.4f}"
        cells = [found.precision, f"{found.loss:.4f}", f"{found.difference:+.4f}", interval]
        lines.append("| " + " | ".join([*cells, f"±{found.limit:.4f}", found.word]) + " |")
    lines += ["", f"| seed | bf16 | {' | '.join(f'{p}, minus bf16' for p in PRECISIONS[1:])} |"]
    lines.append("| ---: | ---: |" + " ---: |" * len(verdicts))
    for number, seed in enumerate(SEEDS):
        cells = [f"{found.differences[number]:+.4f}" for found in verdicts]
        row = [str(seed), f"{last_tenth(curves['bf16', seed]):.4f}", *cells]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def draw(out: Path, target: Path) -> None:
    """Write curves.svg and verdict.md, and the data beside them, to `target`."""
    keys = [(precision, seed) for precision in PRECISIONS for seed in SEEDS]
    files = {key: out / f"{curve_name(*key)}.csv" for key in keys}
    curves = {key: read_curve(file) for key, file in files.items()}
    target.mkdir(parents=True, exist_ok=True)
    if out.resolve() != target.resolve():
        for file in files.values():
            write_whole(target / file.name, file.read_text())
    text = render(curves)
    write_whole(target / "verdict.md", text)
    print(text, end="")
    _draw_figure(curves, target / "curves.svg")


def _draw_figure(curves: Curves, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "curves"  # the same bytes for the same data
    from matplotlib import pyplot

    mean = {
        precision: smooth(
            [statistics.fmean(step) for step in zip(*_of(curves, precision), strict=True)]
        )
        for precision in PRECISIONS
    }
    steps = range(25, 25 + len(mean["bf16"]))
    figure, (whole, difference) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    styles: dict[str, dict[str, Any]] = {
        "bf16": {"color": "black", "linewidth": 2.2, "alpha": 0.45},
        "mxfp8_wgrad_hp": {"color": "tab:blue", "linestyle": "--"},
        "mxfp8": {"color": "tab:red", "linestyle": ":"},
    }
    for precision, style in styles.items():
        whole.plot(steps, mean[precision], label=precision, **{"linewidth": 1.3, **style})
    title = f"training loss, mean of {len(SEEDS)} seeds"
    whole.set(xlabel="step", ylabel="loss (mean of 25 steps)", title=title)

    limit = [MARGIN * value for value in mean["bf16"]]
    difference.fill_between(
        steps, [-v for v in limit], limit, color="0.88", label=f"±{MARGIN:.2%} of BF16's loss"
    )
    for number, curve in enumerate(_of(curves, "bf16")):
        gap = [a - b for a, b in zip(smooth(curve), mean["bf16"], strict=True)]
        label = None if number else "bf16, each seed"
        difference.plot(steps, gap, color="0.6", linewidth=0.6, label=label)
    for precision in PRECISIONS[1:]:
        gap = [a - b for a, b in zip(mean[precision], mean["bf16"], strict=True)]
        difference.plot(
            steps, gap, label=precision, color=styles[precision]["color"], linewidth=1.2
        )
    difference.set(xlabel="step", ylabel="loss minus BF16's mean", title="distance from BF16")
    difference.axhline(0, color="black", linewidth=0.8)
    difference.set_ylim(-0.08, 0.08)
    for axes in (whole, difference):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def _of(curves: Curves, precision: str) -> list[Sequence[float]]:
    return [curves[precision, seed] for seed in SEEDS]
