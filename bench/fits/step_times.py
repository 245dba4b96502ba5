"""Compare predicted steps with the measured ones of docs/evidence/prediction/time.json.

    python -m bench.fits.step_times         # the tables of docs/evidence/predicted-steps.md

To foretell a step, commit the table before the run. Afterwards put `measured` and `foretold` into
time.json, where they stay when the model changes.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.resolve import cell_on, this_machine
from cookbook.predict.hardware import C4, LOCAL, Documents
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import StepTime, predict_step

POINTS = ROOT / "docs/evidence/prediction/time.json"
H200 = Gpu("NVIDIA H200", 9.0, 139.8)
DOCUMENTS: dict[str, Documents] = {"short": C4, "long": LOCAL}
# One node's share of the 16B recipe.
_NODE = {
    "training.local_batch_size": 4,
    "training.dataset": "c4_test",
    "training.dataset_path": ".",
    "model.hf_assets_path": ".",
    "training.steps": 10,
    "debug.moe_force_load_balance": True,
    "checkpoint.enable": False,
    "checkpoint.interval_minutes": 0,
    "metrics.enable_tensorboard": False,
    "comm.trace_buf_size": 0,
}


@dataclass(frozen=True)
class Point:
    """A step that was or will be measured.

    Attributes:
        group: the machine and the run.
        cell: the name of options under `cells` in the data file, or of a recipe.
        fitted: the hardware fact that the point was used to fit; empty if it was held out.
        overlapped: measured with the code that computes during DeepEP's exchanges.
        measured: tokens/s/GPU.
        foretold: the prediction of tokens/s/GPU that was committed before the run.
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
        """Return the relative error of the step time that `predicted` tokens/s/GPU imply."""
        return self.measured / predicted - 1 if self.measured and predicted else None


@dataclass(frozen=True)
class Comparison:
    """A point with its predicted step."""

    point: Point
    predicted: StepTime

    @property
    def error(self) -> float | None:
        """The relative error of the predicted step time."""
        return self.point.error_of(self.predicted.tokens_per_second_per_gpu)


def read_points() -> list[Point]:
    """Return the points of the data file, in its order."""
    return [Point(**one) for one in json.loads(POINTS.read_text(encoding="utf-8"))["points"]]


def cell_of_point(point: Point) -> Cell:
    """Return the cell that the point measures."""
    cells = json.loads(POINTS.read_text(encoding="utf-8"))["cells"]
    where, recipe, options = load_cluster("soperator-b200"), point.cell, dict(point.options)
    if point.cell in cells:
        where, recipe = this_machine(point.gpus, H200), "deepseek_v3_16b"
        ranks = {"parallelism.expert_parallel_degree": point.gpus}
        options = {**ranks, **_NODE, **cells[point.cell], **options}
    return cell_on(where, recipe, point.precision, point.ep_backend, options)


def compare(points: Sequence[Point]) -> Iterator[Comparison]:
    """Predict the step of each point."""
    for point in points:
        cell, documents = cell_of_point(point), DOCUMENTS[point.documents]
        views = describe_ranks(cell)
        step = predict_step(cell, views, documents, None, point.overlapped, point.released)
        yield Comparison(point, step)


def tables(comparisons: Sequence[Comparison]) -> str:
    """Return the tables of each group, measured and not, and the mean errors."""
    parts = []
    for group in dict.fromkeys(one.point.group for one in comparisons):
        own = [one for one in comparisons if one.point.group == group]
        if measured := [_measured_row(one) for one in own if one.error is not None]:
            head = ["cell", "documents", "measured ms", "predicted ms", "error"]
            head += ["predicted before", "largest terms, ms", "used"]
            parts += [f"**{group}**", markdown_table(head, measured, "llrrrrll")]
        if waiting := [_waiting_row(one) for one in own if one.error is None]:
            head = ["cell", "documents", "predicted tokens/s/GPU", "predicted ms"]
            table = markdown_table([*head, "largest terms, ms"], waiting, "llrrl")
            parts += [f"**{group}, not measured yet**", table]
    return "\n\n".join([*parts, *_summary(comparisons)]) + "\n"


def _measured_row(one: Comparison) -> list[str]:
    point, predicted, error = one.point, one.predicted, one.error
    assert point.measured is not None and error is not None
    foretold = point.error_of(point.foretold)
    return [
        f"{point.name} ({point.note})" if point.note else point.name,
        point.documents,
        f"{1000 * predicted.tokens_per_gpu / point.measured:,.0f}",
        f"{predicted.step_ms:,.0f}",
        f"{error:+.1%}",
        "" if foretold is None else f"{foretold:+.1%}",
        _largest(predicted),
        f"to fit {point.fitted}" if point.fitted else "held out",
    ]


def _waiting_row(one: Comparison) -> list[str]:
    times = [one.predicted.tokens_per_second_per_gpu, one.predicted.step_ms]
    numbers = [f"{time:,.0f}" for time in times]
    return [one.point.name, one.point.documents, *numbers, _largest(one.predicted)]


def _largest(predicted: StepTime) -> str:
    terms = sorted(predicted.terms_ms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {time_ms:,.0f}" for name, time_ms in terms[:4])


def _summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    known = [one for one in comparisons if one.error is not None and not one.point.note]
    foretold = [one.point.error_of(one.point.foretold) for one in known]
    for title, found in (
        ("used to fit something", [one.error for one in known if one.point.fitted]),
        ("held out", [one.error for one in known if not one.point.fitted]),
        ("predicted before they were measured, as predicted then", foretold),
    ):
        errors = [abs(error) for error in found if error is not None]
        if errors:
            mean = f"mean error {statistics.fmean(errors):.1%}"
            yield f"{len(errors)} points {title}: {mean}, worst {max(errors):.1%}."


if __name__ == "__main__":
    print(tables(list(compare(read_points()))), end="")
