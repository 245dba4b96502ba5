"""Judges by a rule whether the loss curves of MXFP8 are those of BF16, and draws them.

The rule is `cookbook.results.loss`'s for repeated runs, over the last tenth of the steps.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from cookbook.base.files import write_whole
from cookbook.base.tables import markdown_table
from cookbook.results.loss import MARGIN, LossVerdict, judge_repeats

PRECISIONS = ("bf16", "mxfp8_wgrad_hp", "mxfp8")
SEEDS = (42, 43, 44, 45, 46)

Curves = Mapping[tuple[str, int], Sequence[float]]


def curve_name(precision: str, seed: int) -> str:
    return f"{precision}-seed{seed}"


def read_curve(path: Path) -> list[float]:
    """The losses of steps 1, 2, ..."""
    with path.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def judge(curves: Curves) -> dict[str, LossVerdict]:
    """The verdict on each precision but BF16, over the last tenth of the steps."""
    runs = {
        precision: [dict(enumerate(curve, 1)) for curve in _of(curves, precision)]
        for precision in PRECISIONS
    }
    if max(map(len, runs.values())) < 2:
        raise SystemExit("no precision has two curves: what chance does is not known")
    return {name: last for name, (_, last) in judge_repeats(runs, "bf16").items()}


def last_tenth(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-(len(curve) // 10) :])


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square, over all steps, of two smoothed curves' distance."""
    pairs = zip(smooth(one), smooth(other), strict=True)
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in pairs))


def curves_apart(curves: Curves, precision: str) -> float:
    """How far a precision's curves lie from BF16's with the same seed; BF16's own, from others."""
    base = {seed: curve for (found, seed), curve in curves.items() if found == "bf16"}
    if precision == "bf16":
        pairs = list(combinations(base.values(), 2))
    else:
        same = [(curves.get((precision, seed)), curve) for seed, curve in base.items()]
        pairs = [(own, curve) for own, curve in same if own]
    return statistics.fmean(apart(a, b) for a, b in pairs) if pairs else math.nan


def smooth(values: Sequence[float], width: int = 25) -> list[float]:
    return [statistics.fmean(values[i - width + 1 : i + 1]) for i in range(width - 1, len(values))]


def render(curves: Curves) -> str:
    """Markdown: the verdicts, then the loss of every run."""
    head = ["precision", "seeds", "loss", "minus BF16", "90% interval", "allowed", "verdict"]
    base = [last_tenth(curve) for curve in _of(curves, "bf16")]
    cells = ["bf16", str(len(base)), f"{statistics.fmean(base):.4f}", "", "", "", ""]
    rows = [[*cells, f"{curves_apart(curves, 'bf16'):.4f}"]]
    for name, found in judge(curves).items():
        loss = statistics.fmean(last_tenth(curve) for curve in _of(curves, name))
        # Where a loss is no number there is no difference of them either.
        low, high, limit = (
            math.nan if x is None else x for x in (found.low, found.high, found.limit)
        )
        cells = [name, str(found.runs), f"{loss:.4f}", f"{(low + high) / 2:+.4f}"]
        cells += [f"{low:+.4f} to {high:+.4f}", f"±{limit:.4f}", found.verdict]
        cells.append(f"{curves_apart(curves, name):.4f}")
        rows.append(cells)
    judged = markdown_table([*head, "curves apart"], rows, "lrrrrrlr")
    runs = []
    for seed in sorted({seed for _, seed in curves}):
        found_of = [curves.get((precision, seed)) for precision in PRECISIONS]
        runs.append([str(seed), *(f"{last_tenth(c):.4f}" if c else "" for c in found_of)])
    by_seed = markdown_table(["seed", *PRECISIONS], runs, "r" * (1 + len(PRECISIONS)))
    return f"{judged}\n\n{by_seed}\n"


def read_curves(out: Path) -> dict[tuple[str, int], list[float]]:
    """Every curve that `out` holds with as many steps as the longest; the others are named."""
    keys = [(precision, seed) for precision in PRECISIONS for seed in SEEDS]
    files = {key: out / f"{curve_name(*key)}.csv" for key in keys}
    found = {key: read_curve(file) for key, file in files.items() if file.is_file()}
    length = max(map(len, found.values()), default=0)
    for key in [key for key, curve in found.items() if len(curve) < length]:
        print(f"left out: {curve_name(*key)} has {len(found.pop(key))} of {length} steps")
    if missing := [precision for precision in PRECISIONS if not _of(found, precision)]:
        raise SystemExit(f"{out} holds no whole curve of {', '.join(missing)}")
    return found


def draw(out: Path, target: Path) -> None:
    """Write curves.svg and verdict.md, and the data beside them, to `target`."""
    curves = read_curves(out)
    text = render(curves)
    target.mkdir(parents=True, exist_ok=True)
    _draw_figure(curves, target / "curves.svg")
    if out.resolve() != target.resolve():
        for key in curves:
            name = f"{curve_name(*key)}.csv"
            write_whole(target / name, (out / name).read_text())
    write_whole(target / "verdict.md", text)
    print(text, end="")


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
    title = "training loss, mean of each precision's seeds"
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
    difference.set_ylim(-0.06, 0.06)
    for axes in (whole, difference):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def _of(curves: Curves, precision: str) -> list[Sequence[float]]:
    return [curve for (found, _), curve in curves.items() if found == precision]
