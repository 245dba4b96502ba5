"""The loss curves of the convergence experiments: where they lie, and what is measured of them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.convergence_plan import END, LAST, REFERENCE, WHOLE
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT

DATA = ROOT / "docs" / "convergence"
FIRST = DATA / "first"
# Of the first experiment, which ended before this one was planned.
FIRST_SEEDS = (42, 43, 44, 45, 46)
FIRST_PRECISIONS = ("bf16", "mxfp8", "mxfp8_wgrad_hp")

Curve = Sequence[float]
"""The losses of steps 1, 2, ..."""
Curves = Mapping[tuple[str, int], Curve]
"""By arm and seed."""


def measure(name: str, curve: Curve) -> float:
    """The mean loss over the last tenth of the steps, or over all."""
    steps = {END: curve[-(len(curve) // LAST) :], WHOLE: curve}[name]
    return statistics.fmean(steps) if all(map(math.isfinite, steps)) else math.nan


def differences(curves: Curves, seeds: Sequence[int], name: str, arm: str) -> list[float]:
    """Of each seed, the relative difference of an arm's measure from its reference's.

    Infinite where the arm's loss is no number, none where the reference's is.
    """
    found = []
    for seed in seeds:
        own, base = (measure(name, curves[one, seed]) for one in (arm, REFERENCE[arm]))
        found.append(math.inf if math.isnan(own) and not math.isnan(base) else own / base - 1)
    return found


def read_first() -> dict[tuple[str, int], list[float]]:
    """The 15 curves of the first experiment, 1,500 steps each."""
    found = {}
    for precision in FIRST_PRECISIONS:
        for seed in FIRST_SEEDS:
            with (FIRST / f"{precision}-seed{seed}.csv").open(newline="") as file:
                found[precision, seed] = [float(row["loss"]) for row in csv.DictReader(file)]
    return found


def read_arms(folder: Path) -> dict[tuple[str, int], list[float]]:
    """An experiment's curves, from `<arm>.csv`: a row for each step, a column for each seed."""
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for seed in row.keys() - {"step"}:
                    found.setdefault((path.stem, int(seed)), []).append(float(row[seed]))
    return found


def write_arms(curves: Curves, folder: Path) -> None:
    """The opposite of `read_arms`."""
    for arm in sorted({arm for arm, _ in curves}):
        seeds = sorted(seed for found, seed in curves if found == arm)
        steps = zip(*(curves[arm, seed] for seed in seeds), strict=True)
        rows = [",".join(map(str, (step, *row))) for step, row in enumerate(steps, 1)]
        head = ",".join(["step", *map(str, seeds)])
        write_whole(folder / f"{arm}.csv", "\n".join([head, *rows]) + "\n")
