"""The results of a run: one row type for text, HTML and JSON reports and for comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from cookbook.base.files import json_text
from cookbook.observe.history import History
from cookbook.observe.metrics import LoadStep, StepMetrics
from cookbook.results.verdicts import LossVerdict, SpeedUp, Throughput
from cookbook.run.run import RunRecord
from cookbook.run.status import Resumption

# Two cells have different attention masks if their mean attended lengths (how many tokens a token
# attends to) differ by more than this factor. Batches of the same texts differ by less.
SAME_MASK = 1.25


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """How tokens were spread over experts in the last tenth of the logged steps."""

    busiest_over_mean: float  # load of the busiest expert in `layer` divided by the mean load
    layer: int  # the layer in which this ratio (the median over the steps) is highest
    median_over_layers: float  # the median of the layers' ratios
    starved_experts: int  # number of experts with less than a tenth of their layer's mean load
    layers: int
    is_forced: bool  # whether experts were assigned to tokens, not chosen by the router
    steps: tuple[int, int]  # first and last training step of this summary


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one cell, that is, of one training configuration in a run.

    An unknown value is None, never 0. The JSON report has the fields up to `profiled`. The last
    four fields are set only if the run is compared with another run or with published numbers.
    """

    name: str
    recipe: str | None = None
    precision: str | None = None
    ep_backend: str | None = None
    status: str | None = None
    reason: str | None = None
    steps: int | None = None  # the last step reached, of `total_steps`
    tokens_per_second_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None  # percent of the BF16 peak, even for quantized cells; None on a CPU
    memory_gib: float | None = None
    final_loss: float | None = None  # a loss that is NaN or infinite (see `reason`) is null in JSON
    validation_loss: float | None = None  # the last logged validation loss
    speedup: float | None = None  # throughput divided by the baseline's
    published_tokens_per_second_per_gpu: float | None = None
    attention: str | None = None  # `flex`, `sdpa`, `flash_attention_4` or, on CPUs, its reference
    mean_attended_length: float | None = None  # mean number of tokens a token attends to, in step 1
    emulated: bool = False  # whether a kernel was emulated, which makes the speed meaningless
    active: dict[str, Any] | None = None  # active features, as reported by the training process
    resumptions: tuple[Resumption, ...] = ()
    history: History = field(default_factory=History)
    throughput: Throughput | None = None
    speed: SpeedUp | None = None  # `speedup` with its interval; None for the baseline
    loss: LossVerdict | None = None  # verdicts against the baseline's curve; None for the baseline
    loss_last_tenth: LossVerdict | None = None
    gpu_hours: float | None = None  # GPU hours of all attempts and repeats
    cost_per_billion_tokens: float | None = None
    predicted_tokens_per_second_per_gpu: float | None = None
    predicted_largest: str | None = None
    router_load: LoadSummary | None = None
    profiled: bool = False  # whether a profiler slowed down the attempts whose speed counts
    total_steps: int | None = None
    device: str | None = None  # for the fields from here to `prediction` see run/record.py
    stand_in_for: str | None = None
    baseline: str | None = None
    prediction: str | None = None
    published_speedup: float | None = None
    published_source: str | None = None
    tokens_per_step_per_gpu: float | None = None
    world: int = 1
    routing: str | None = None  # trained, round_robin or random
    repeat_of: str | None = None  # the cell that this folder repeats
    repeat: int = 1
    repeats: tuple[Self, ...] = ()  # if the cell was repeated, the result of each repeat
    asked: Mapping[str, str] = field(default_factory=dict)  # recipe, layout and options, as text
    seen: Mapping[str, str] = field(default_factory=dict)  # the newest attempt's versions and GPUs
    curve: Sequence[StepMetrics] = ()  # logged steps, ascending
    # For each step, the recipe and options that determine which training texts the step reads.
    texts: Mapping[int, object] = field(default_factory=dict)
    timed: Sequence[StepMetrics] = ()  # those run with the newest attempt's nodes and options
    seconds: Mapping[int, float] = field(default_factory=dict)  # each step's duration, if known
    loads: Sequence[LoadStep] = ()
    run: str = ""
    reference_tokens: float | None = None  # throughput of the reference cell
    incomparable: str | None = None  # why its speed and its reference's cannot be compared
    is_slower: bool = False  # slower than allowed, or has no speed although the reference has one

    @property
    def is_baseline(self) -> bool:
        return self.name == self.baseline

    @property
    def runs(self) -> Sequence[Self]:
        """The repeats of the cell, or the cell itself if it has none."""
        return self.repeats or (self,)

    def as_mapping(self) -> dict[str, Any]:
        """Return the fields as plain values, but leave repeats, steps and loads empty."""
        return asdict(replace(self, repeats=(), curve=(), texts={}, timed=(), seconds={}, loads=()))


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run, and the results of all its cells in the run's order."""

    run: RunRecord
    cells: tuple[Result, ...]

    @property
    def unit(self) -> str:
        """The word after `tokens/s/`: `GPU`, or `rank` if every cell ran on a CPU."""
        return "rank" if {cell.device for cell in self.cells} == {"cpu"} else "GPU"


def masks_differ(one: Result, other: Result) -> bool:
    """Return whether the cells' masks differ in mean attended length; False if one is unknown."""
    lengths = [cell.mean_attended_length for cell in (one, other) if cell.mean_attended_length]
    return len(lengths) == 2 and max(lengths) > SAME_MASK * min(lengths)


def unlike(cell: Result, base: Result, where: str) -> str | None:
    """Return why the speeds of `cell` and `base` cannot be compared; None if they can.

    `where`: the phrase for `base` in the returned text, for example `in its baseline NAME`.
    """
    if cell.emulated or base.emulated:
        return "emulated numerics have no speed"
    if cell.recipe != base.recipe:
        return f"recipe {cell.recipe}, and {base.recipe} {where}"
    if cell.device != base.device:
        return f"ran on {cell.device}, and on {base.device} {where}"
    if masks_differ(cell, base):
        own, others = (f"{one.mean_attended_length:,.0f}" for one in (cell, base))
        return f"other texts: a token attends to {own} tokens, and to {others} {where}"
    return None


def render_json(results: RunResults) -> str:
    """Return the report as one JSON object; unknown, NaN and infinite values are null."""
    names = [one.name for one in fields(Result)]
    keys = names[: names.index("profiled") + 1]
    of_repeat = ("name", "status", "steps", "tokens_per_second_per_gpu", "final_loss")
    cells = []
    for cell in results.cells:
        content = cell.as_mapping()
        repeats = [{key: getattr(run, key) for key in of_repeat} for run in cell.repeats]
        cells.append({**{key: content[key] for key in keys}, "repeats": repeats})
    run = results.run
    return json_text({"run": run.run, "sweep": run.sweep, "cells": cells, "baseline": run.baseline})
