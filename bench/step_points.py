"""The points whose steps were measured, as cells, and what the model predicts of them beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.throughput_cells import CELLS, Trained, cell_of
from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.resolve import cell_on, this_machine
from cookbook.predict.documents import C4, LOCAL, Documents
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import StepTime, predict_step

POINTS = ROOT / "docs/time.json"
H200 = Gpu("NVIDIA H200", 9.0, 139.8)
DOCUMENTS: dict[str, Documents] = {"short": C4, "long": LOCAL}


@dataclass(frozen=True)
class Point:
    """A measured step, or one that is predicted before it is.

    Attributes:
        group: which machine, and which run.
        cell: a cell of `bench/throughput_cells.py`, or a recipe.
        fitted: the fact that the point was used to fit; empty for one that was held out.
        overlapped: measured with the code that computes beside DeepEP's exchanges.
        measured: tokens/s/GPU; None where it was not measured yet.
        foretold: what was predicted of it, tokens/s/GPU, when it was measured; None where that
            was not committed before.
    """

    group: str
    name: str
    cell: str
    documents: str = "short"
    options: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 4
    precision: str = "bf16"
    ep_backend: str = "deepep"
    released: bool = False
    overlapped: bool = True
    fitted: str = ""
    measured: float | None = None
    foretold: float | None = None
    note: str = ""

    def error_of(self, predicted: float | None) -> float | None:
        """That of a step's time that follows from `predicted` tokens/s/GPU."""
        return self.measured / predicted - 1 if self.measured and predicted else None


@dataclass(frozen=True)
class Comparison:
    """A point with what the model says of it."""

    point: Point
    predicted: StepTime

    @property
    def error(self) -> float | None:
        """Of the step's time, as a part of the measured one."""
        return self.point.error_of(self.predicted.tokens_per_second_per_gpu)


def read_points(path: Path = POINTS) -> list[Point]:
    """The points of the data file, in its order."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Point(**one) for one in content["points"]]


def compare(points: list[Point]) -> Iterator[Comparison]:
    """Each point with its prediction."""
    for point in points:
        cell = cell_of_point(point)
        views = describe_ranks(cell)
        yield Comparison(
            point,
            predict_step(cell, views, DOCUMENTS[point.documents], overlapped=point.overlapped),
        )


def cell_of_point(point: Point) -> Cell:
    """The point as a cell."""
    if point.cell in CELLS:
        base = CELLS[point.cell]
        trained = Trained(
            point.ep_backend, {**base.options, **point.options}, point.precision, base.recipe
        )
        machine = this_machine(point.gpus, H200)
        cell = cell_of(point.name, trained, machine, Path(), Path(), 10)
    else:
        cluster = load_cluster("soperator-b200")
        cell = cell_on(cluster, point.cell, point.precision, point.ep_backend, point.options)
    # What TorchTitan computes without the cookbook's corrections.
    return replace(cell, hooks="") if point.released else cell
