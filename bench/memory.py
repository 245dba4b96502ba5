"""Compare predicted memory with the measured jobs of docs/memory.json.

    python -m bench.memory        # the table of docs/memory.md, anywhere

Commit bbdf732 has the script that measured them (bench/gpu_memory.py). A job of your own is
measured by `submit.py run`; its report has the largest `memory` of any rank.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.base.tables import markdown_table
from cookbook.config.cell import Cell
from cookbook.config.options import Options
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.stack import load_stack
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks

MEASURED = ROOT / "docs/memory.json"
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_FULL = {"activation_checkpoint.mode": "full"}
_NONE = {"activation_checkpoint.mode": "none"}
_BY_OPERATION = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
_EVERY_SECOND = {**_BY_OPERATION, "activation_checkpoint.selective_ac_option": "2"}
_EAGER = {"compile.enable": False}
_PP2 = {"parallelism.pipeline_parallel_degree": 2, "parallelism.expert_parallel_degree": 2}
_INTERLEAVED = {**_PP2, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
_TP2 = {"parallelism.tensor_parallel_degree": 2}
_EIGHT = {"model.flavor": "16B_8layers"}
_CHUNKED = {"loss.num_chunks": 8}
_SAVED = {
    **_BY_OPERATION,
    "activation_checkpoint.op_sac_save_list": ["attention", "communication", "grouped_mm"],
}
_FOUR: dict[str, Any] = {"model.flavor": "16B_4layers", "parallelism.expert_parallel_degree": 2}
_OF_FOUR: dict[str, dict[str, Any]] = {
    "full": _FULL,
    "full chunked": {**_FULL, **_CHUNKED},
    "selective op chunked": {**_BY_OPERATION, **_CHUNKED},
    "saved chunked": {**_SAVED, **_CHUNKED},
    "none chunked": {**_NONE, **_CHUNKED},
    "full chunked eager loss": {**_FULL, **_CHUNKED, "compile.components": ["model"]},
}
_DEBUG = {"model.flavor": "debugmodel", "training.seq_len": 4096, **_EAGER}


@dataclass(frozen=True)
class Point:
    """A measured job: a recipe on some GPUs with these options; the 16B at EP 4, balanced."""

    name: str
    batch: int
    options: Mapping[str, Any]
    ep_backend: str = "standard"
    recipe: str = "deepseek_v3_16b"
    precision: str = "bf16"
    ranks: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name in the data file and the table."""
        return f"{self.name}, batch {self.batch}"


_PIPELINED = {**_EIGHT, **_FULL, **_INTERLEAVED}
POINTS = (
    Point("16B full", 4, _FULL),
    Point("16B TP 2", 4, {**_FULL, **_TP2}),
    Point("16B none", 1, _NONE),
    Point("16B PP 2 1F1B", 4, {**_FULL, **_PP2}),
    Point("16B selective op", 4, _BY_OPERATION),
    Point("16B full DeepEP", 4, _FULL, "deepep"),
    Point("16B full", 8, _FULL),
    Point("8 layers none", 2, {**_EIGHT, **_NONE}),
    Point("8 layers selective op", 2, {**_EIGHT, **_BY_OPERATION}),
    Point("8 layers every 2nd", 4, {**_EIGHT, **_EVERY_SECOND}),
    Point("8 layers eager", 2, {**_EIGHT, **_FULL, **_EAGER}),
    Point("8 layers PP 2 interleaved", 8, _PIPELINED),
    Point("debug none", 16, {**_DEBUG, **_NONE}),
    Point("debug full TP 2", 16, {**_DEBUG, **_FULL, **_TP2}),
    Point("16B TP 2 DeepEP", 4, {**_FULL, **_TP2}, "deepep"),
    Point("proxy", 16, _NONE, recipe="proxy", ranks=1),
    Point("proxy MXFP8, emulated", 16, _NONE, recipe="proxy", precision="mxfp8", ranks=1),
    Point("debug recipe", 2, {}, recipe="debug", ranks=2),
    Point("debug recipe DeepEP", 2, {}, "deepep", recipe="debug", ranks=2),
    Point("16B full expandable", 4, _FULL, environment=_EXPANDABLE),
    Point("16B selective op expandable", 4, _BY_OPERATION, environment=_EXPANDABLE),
    Point("8 layers none DeepEP", 2, {**_EIGHT, **_NONE}, "deepep"),
    Point("8 layers PP 2 interleaved expandable", 8, _PIPELINED, environment=_EXPANDABLE),
    Point("16B full DeepEP expandable", 4, _FULL, "deepep", environment=_EXPANDABLE),
    *(
        Point(f"4 layers {name}", 4, {**_FOUR, **options}, ranks=2, environment=_EXPANDABLE)
        for name, options in _OF_FOUR.items()
    ),
)


@dataclass(frozen=True)
class Comparison:
    """A measured job, in GiB that its allocators reserved, with the predicted peak."""

    name: str
    measured: float
    predicted: float
    moment: str
    terms: Mapping[str, float]
    earlier: bool

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1


def cell_of(point: Point, gpu: Gpu) -> Cell:
    """Return the point as a cell on a machine with such GPUs."""
    options: dict[str, Any] = {
        "training.local_batch_size": point.batch,
        "training.dataset": "c4_test",
        "training.dataset_path": "assets/local/corpus",
        "model.hf_assets_path": "assets/local/tokenizer",
        "checkpoint.enable": False,
        "metrics.enable_tensorboard": False,
    }
    if point.recipe == "deepseek_v3_16b":
        options |= {"parallelism.expert_parallel_degree": 4, "debug.moe_force_load_balance": True}
    machine = this_machine(point.ranks, gpu, point.environment)
    options |= point.options
    cell = cell_on(machine, point.recipe, point.precision, point.ep_backend, options)
    stack = load_stack()
    flavors, known = stack.models["deepseek_v3"], stack.model_args["deepseek_v3"]
    # TorchTitan has no such flavor; the measured jobs added it.
    four = {"16B_4layers": dataclasses.replace(flavors["16B"], n_layers=4)}
    stack = dataclasses.replace(
        stack,
        models={**stack.models, "deepseek_v3": {**flavors, **four}},
        model_args={
            **stack.model_args,
            "deepseek_v3": {**known, "16B_4layers": {**known["16B"], "n_layers": 4}},
        },
    )
    return dataclasses.replace(cell, options=Options(stack, cell.options.settings))


def compare(measured: Mapping[str, Any], points: Sequence[Point] = POINTS) -> list[Comparison]:
    """Predict all points that the file has, also those of its earlier machine."""
    gpu, found = Gpu(**measured["gpu"]), []
    for run, earlier in ((measured["points"], False), (measured["earlier"]["points"], True)):
        for point in points:
            if not (reserved := run.get(point.key, {}).get("reserved_gib")):
                continue
            cell = cell_of(point, gpu)
            stages = [predict_memory(cell, view, cell.environment) for view in describe_ranks(cell)]
            peak = max(stages, key=lambda stage: stage.reserved)
            found.append(
                Comparison(point.key, reserved, peak.reserved, peak.moment, peak.terms, earlier)
            )
    return found


def read_measured(path: Path = MEASURED) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def render() -> str:
    """Return the predictions beside the measurements and their errors, as Markdown."""
    comparisons = compare(read_measured())
    rows = []
    for one in comparisons:
        largest = sorted(one.terms.items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
        sizes = [f"{one.predicted:.1f}", f"{one.measured:.1f}", f"{one.error:+.0%}"]
        rows.append([one.name + " (earlier)" * one.earlier, *sizes, one.moment, terms])
    head = ["job", "predicted GiB", "measured GiB", "error", "peak at", "largest terms"]
    errors = [one.error for one in comparisons]
    return (
        f"{markdown_table(head, rows, 'lrrrll')}\n\n"
        f"{len(errors)} jobs: off by {statistics.fmean(map(abs, errors)):.1%} on average, "
        f"{min(errors):+.0%} to {max(errors):+.0%}."
    )


if __name__ == "__main__":
    print(render())
