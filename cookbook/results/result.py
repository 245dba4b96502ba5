"""The results of a run: plain data, for the report, the page and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cookbook.base.files import json_text
from cookbook.observe.console import StepMetrics
from cookbook.observe.history import History
from cookbook.observe.router_load import LoadStep
from cookbook.results.loss import LossVerdict
from cookbook.results.speed import SpeedUp, Throughput
from cookbook.run.attempts import Resumption
from cookbook.run.run import RunRecord

# Batches of one corpus differ by less; beyond this factor the masks differ.
SAME_MASK = 1.25

Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The router's load over the last tenth of the logged steps.

    Attributes:
        busiest_over_mean: tokens of the busiest expert over the mean of its layer's experts: median
            over these steps, in the layer where that is most. 1 is even.
        layer: that layer.
        median_over_layers: the same of the median layer.
        starved_experts: experts below a tenth of their layer's mean, over all layers.
        is_forced: the balance was forced, so this says nothing about the router.
        steps: first and last training step.
    """

    busiest_over_mean: float
    layer: int
    median_over_layers: float
    starved_experts: int
    layers: int
    is_forced: bool
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one cell; an unknown value is None, never 0. Its fields are the JSON's keys.

    Attributes:
        status: queued, running, finished, failed, cancelled or refused.
        steps: the last step reached.
        mfu: percent of the BF16 peak, also for quantized cells; None on a CPU.
        final_loss: None, with the reason, where it is NaN or infinite.
        speedup: throughput over the baseline's; 1.0 for the baseline itself.
        attention: `flex`, `sdpa`, `flash_attention_4`, or its reference on a CPU.
        mean_attended_length: tokens that a token attended to, mean over the first step.
        emulated: software computed what a kernel would, so only the loss counts.
        active: the training process's own report of what was active.
        resumptions: where attempts continued, and damaged checkpoints that they passed over.
        history: attempts, why each ended, steps lost, effective training time; of all repeats.
        throughput: spread, stalls and number of steps behind `tokens_per_second_per_gpu`.
        speed: `speedup` with its interval; None for the baseline.
        loss, loss_last_tenth: verdicts against the baseline's curve; None for the baseline.
        gpu_hours: of all attempts and repeats, from TorchTitan's first line to its last.
        cost_per_billion_tokens: at this speed with stalls, by the cluster's `price_per_gpu_hour`.
        predicted_largest: the largest term of the predicted step.
        profiled: TorchTitan's profiler was on in an attempt, which slows it down.
    """

    name: str
    recipe: str | None
    precision: str | None
    ep_backend: str | None
    status: str | None
    reason: str | None
    steps: int | None
    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    memory_gib: float | None
    final_loss: float | None
    speedup: float | None
    published_tokens_per_second_per_gpu: float | None
    attention: str | None
    mean_attended_length: float | None
    emulated: bool
    active: dict[str, Any] | None
    resumptions: tuple[Resumption, ...] = ()
    history: History = field(default_factory=History)
    throughput: Throughput | None = None
    speed: SpeedUp | None = None
    loss: LossVerdict | None = None
    loss_last_tenth: LossVerdict | None = None
    gpu_hours: float | None = None
    cost_per_billion_tokens: float | None = None
    predicted_tokens_per_second_per_gpu: float | None = None
    predicted_largest: str | None = None
    router_load: LoadSummary | None = None
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class CellSetting:
    """The conditions of a cell's Result.

    Attributes:
        stand_in_for: the recipe that was asked for, where this machine ran another.
        raw_final_loss: as in Result, but NaN and infinity kept.
        tokens_per_step_per_gpu: over `tokens_per_second` of a StepMetrics: the seconds of a step.
        world: GPUs, or ranks, of the newest attempt.
        repeat_of: the cell that this one repeats.
        asked: recipe, layout and options, as text; `defaults`: of options that are not set.
        seen: versions, GPUs and nodes, as the newest attempt's training process saw them.
    """

    total_steps: int | None
    device: str | None
    stand_in_for: str | None
    baseline: str | None
    published_speedup: float | None
    raw_final_loss: float | None
    tokens_per_step_per_gpu: float | None = None
    world: int = 1
    published_source: str | None = None
    repeat_of: str | None = None
    asked: Facts = field(default_factory=dict)
    defaults: Facts = field(default_factory=dict)
    seen: Facts = field(default_factory=dict)

    @property
    def batch(self) -> float | None:
        """Tokens of a step over all ranks; with unequal batches equal steps saw other texts."""
        tokens = self.tokens_per_step_per_gpu
        return tokens * self.world if tokens is not None else None


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run's cells in run order.

    Attributes:
        curves: every logged step of each folder's loss rank, rising, with its attempt.
        loads: the router's load at each folder's logged steps.
        repeats: the runs of each cell that was trained several times, in order.
    """

    run: RunRecord
    cells: tuple[Result, ...]
    settings: Mapping[str, CellSetting]
    curves: Mapping[str, Sequence[StepMetrics]] = field(default_factory=dict)
    loads: Mapping[str, Sequence[LoadStep]] = field(default_factory=dict)
    repeats: Mapping[str, Sequence[Result]] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """The unit that throughput is per: `GPU`, or `rank` where every cell ran on a CPU."""
        devices = {setting.device for setting in self.settings.values()}
        return "rank" if devices == {"cpu"} else "GPU"

    def runs_of(self, cell: Result) -> Sequence[Result]:
        """The repeats of a cell, or itself."""
        return self.repeats.get(cell.name, (cell,))


def masks_differ(one: Result, other: Result) -> bool:
    """Whether two cells are known to have trained on texts of other lengths."""
    lengths = [cell.mean_attended_length for cell in (one, other) if cell.mean_attended_length]
    return len(lengths) == 2 and max(lengths) > SAME_MASK * min(lengths)


def render_json(results: RunResults) -> str:
    """The report as one JSON object; unknown, NaN and infinite values are null."""
    report = {
        "run": results.run.run,
        "sweep": results.run.sweep,
        "cells": [
            {
                **asdict(cell),
                "repeats": [
                    {
                        "name": run.name,
                        "status": run.status,
                        "steps": run.steps,
                        "tokens_per_second_per_gpu": run.tokens_per_second_per_gpu,
                        "final_loss": run.final_loss,
                    }
                    for run in results.repeats.get(cell.name, ())
                ],
            }
            for cell in results.cells
        ],
        "baseline": results.run.baseline,
    }
    return json_text(report)
