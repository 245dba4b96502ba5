"""The points whose memory is measured, as cells, and what `check` predicts of them beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.check.build import build_cells
from cookbook.config.cell import Cell
from cookbook.config.options import Options
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.stack import Stack, load_stack
from cookbook.predict.memory import predict_memory

STEPS = 4
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
_INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
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
    """One job: a recipe on some GPUs with these options over it; the 16B with EP 4 and balance."""

    name: str
    batch: int
    options: Mapping[str, Any]
    ep_backend: str = "standard"
    recipe: str = "deepseek_v3_16b"
    precision: str = "bf16"
    ranks: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


# The most telling first: a run that is cut short has them.
POINTS = (
    Point("16B full", 4, _FULL),
    Point("16B TP 2", 4, {**_FULL, **_TP2}),
    Point("16B none", 1, _NONE),
    Point("16B PP 2 1F1B", 4, {**_FULL, **_PP2}),
    Point("16B selective op", 4, _BY_OPERATION),
    Point("16B full DeepEP", 4, _FULL, ep_backend="deepep", alone=True),
    Point("16B full", 8, _FULL),
    Point("8 layers none", 2, {**_EIGHT, **_NONE}),
    Point("8 layers selective op", 2, {**_EIGHT, **_BY_OPERATION}),
    Point("8 layers every 2nd", 4, {**_EIGHT, **_EVERY_SECOND}),
    Point("8 layers eager", 2, {**_EIGHT, **_FULL, **_EAGER}),
    Point("8 layers PP 2 interleaved", 8, {**_EIGHT, **_FULL, **_PP2, **_INTERLEAVED}),
    Point("debug none", 16, {**_DEBUG, **_NONE}),
    Point("debug full TP 2", 16, {**_DEBUG, **_FULL, **_TP2}),
    Point("16B TP 2 DeepEP", 4, {**_FULL, **_TP2}, ep_backend="deepep", alone=True),
    Point("proxy", 16, _NONE, recipe="proxy", ranks=1),
    Point("proxy MXFP8, emulated", 16, _NONE, recipe="proxy", precision="mxfp8", ranks=1),
    Point("debug recipe", 2, {}, recipe="debug", ranks=2),
    Point("debug recipe DeepEP", 2, {}, ep_backend="deepep", recipe="debug", ranks=2, alone=True),
    Point("16B full expandable", 4, _FULL, environment=_EXPANDABLE),
    Point("16B selective op expandable", 4, _BY_OPERATION, environment=_EXPANDABLE),
    Point("8 layers none DeepEP", 2, {**_EIGHT, **_NONE}, ep_backend="deepep", alone=True),
    Point(
        "8 layers PP 2 interleaved expandable",
        8,
        {**_EIGHT, **_FULL, **_PP2, **_INTERLEAVED},
        environment=_EXPANDABLE,
    ),
    Point("16B full DeepEP expandable", 4, _FULL, "deepep", environment=_EXPANDABLE, alone=True),
    *(
        Point(f"4 layers {name}", 4, {**_FOUR, **options}, ranks=2, environment=_EXPANDABLE)
        for name, options in _OF_FOUR.items()
    ),
)
_TINY = {"model.flavor": "debugmodel", "training.seq_len": 128, **_EAGER}
_TINY |= {"parallelism.expert_parallel_degree": 2}
CPU_POINTS = (
    Point("debug none", 2, {**_TINY, **_NONE}, ranks=2),
    Point("debug full", 1, {**_TINY, **_FULL}, ranks=2),
)


def cell_of(point: Point, gpu: Gpu | None) -> Cell:
    """The point as a cell of the cookbook's recipe, on a machine with such GPUs."""
    options: dict[str, Any] = {
        "training.local_batch_size": point.batch,
        "training.steps": STEPS,
        "training.dataset": "c4_test",
        "training.dataset_path": "assets/local/corpus",
        "model.hf_assets_path": "assets/local/tokenizer",
        "checkpoint.enable": False,
        "metrics.enable_tensorboard": False,
        "experimental.custom_import": "bench.memory_probe",
    }
    if point.recipe == "deepseek_v3_16b":
        options |= {"parallelism.expert_parallel_degree": 4, "debug.moe_force_load_balance": True}
    cell = cell_on(
        this_machine(point.ranks, gpu, point.environment),
        point.recipe,
        point.precision,
        point.ep_backend,
        {**options, **point.options},
    )
    options_with_flavors = Options(_stack_with_flavors(), cell.options.settings)
    return dataclasses.replace(cell, options=options_with_flavors, hooks="bench.memory_probe")


@functools.cache
def _stack_with_flavors() -> Stack:
    """The stack, with what `memory_probe` adds to TorchTitan's flavors."""
    stack = load_stack()
    flavors = stack.models["deepseek_v3"]
    fewer = dataclasses.replace(flavors["16B"], n_layers=4)
    return dataclasses.replace(stack, models={"deepseek_v3": {**flavors, "16B_4layers": fewer}})


def key_of(point: Point) -> str:
    """A point's name in the file and the table."""
    return f"{point.name}, batch {point.batch}"


def predict(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What check says of each, or why it cannot."""
    answers: list[dict[str, Any]] = []
    for cell, built in zip(cells, build_cells(cells), strict=True):
        if not built.views:
            answers.append({"error": built.unavailable or str(built.failure)})
            continue
        stages = [predict_memory(cell, view, cell.environment) for view in built.views]
        peak = max(stages, key=lambda stage: stage.reserved)
        terms = {name: round(size, 2) for name, size in peak.terms.items()}
        answers.append(
            {"reserved_gib": round(peak.reserved, 2), "moment": peak.moment, "terms": terms}
        )
    return answers


@dataclass(frozen=True)
class Comparison:
    """A measured point: GiB that its allocators reserved, and what check says of it."""

    name: str
    measured: float
    predicted: float
    moment: str
    terms: Mapping[str, float]
    earlier: bool

    @property
    def error(self) -> float:
        """As a part of what was measured."""
        return self.predicted / self.measured - 1


def compare(measured: Mapping[str, Any], points: Sequence[Point] = POINTS) -> list[Comparison]:
    """All points that the file has, also those of an earlier machine."""
    runs = [(measured["points"], False), (measured.get("earlier", {}).get("points", {}), True)]
    found = [
        (point, run[key_of(point)]["reserved_gib"], earlier)
        for run, earlier in runs
        for point in points
        if not (result := run.get(key_of(point), {"error": "none"})).get("error")
        and result.get("reserved_gib")
    ]
    asked = list({key_of(point): point for point, _, _ in found}.values())
    gpu = Gpu(**measured["gpu"]) if measured["gpu"] else None
    predicted = predict([cell_of(point, gpu) for point in asked])
    answers = {key_of(point): answer for point, answer in zip(asked, predicted, strict=True)}
    for name, answer in answers.items():
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
    return [
        Comparison(
            key_of(point),
            reserved,
            answers[key_of(point)]["reserved_gib"],
            answers[key_of(point)]["moment"],
            answers[key_of(point)]["terms"],
            earlier,
        )
        for point, reserved, earlier in found
    ]
