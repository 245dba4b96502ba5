"""What the results of a run are: plain data, for the report, the page and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cookbook.observe.curve import CurveStep
from cookbook.observe.history import History
from cookbook.observe.router_load import LoadStep
from cookbook.results.load import LoadSummary
from cookbook.results.loss import LossVerdict
from cookbook.results.speed import SpeedUp, Throughput
from cookbook.run.resumption import Resumption
from cookbook.run.run import RunRecord

# Batches of one corpus differ by less; beyond this factor, masks are not the same.
SAME_MASK = 1.25


@dataclass(frozen=True, slots=True)
class Repeat:
    """One of several runs of a cell; `name` is its folder's."""

    name: str
    status: str | None
    steps: int | None
    tokens_per_second_per_gpu: float | None
    final_loss: float | None
    stalls: tuple[int, ...] = ()
    """Its logged steps that took 1.5 times its median one or more."""
    resumptions: tuple[Resumption, ...] = ()
    history: History = field(default_factory=History)


@dataclass(frozen=True, slots=True)
class Result:
    """What one cell of a run came to; a value that is not known is None, never 0."""

    name: str
    recipe: str | None
    precision: str | None
    ep_backend: str | None
    status: str | None
    """queued, running, finished, failed, cancelled or refused."""
    reason: str | None
    steps: int | None
    """The last step reached."""
    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    """Percent of the BF16 peak, also for quantized cells; None on a CPU, which has no peak here."""
    memory_gib: float | None
    final_loss: float | None
    """Loss of the last step; None, with the reason saying so, where it is NaN or infinite."""
    speedup: float | None
    """Throughput over the baseline cell's; 1.0 for the baseline itself."""
    published_tokens_per_second_per_gpu: float | None
    attention: str | None
    """What computed attention: `flex`, `sdpa`, `flash_attention_4`, or its reference on a CPU."""
    mean_attended_length: float | None
    """Tokens that a token attended to, on average over the first step: the mask's cost."""
    emulated: bool
    """Whether software computed what a kernel would, so that only the loss counts."""
    active: dict[str, Any] | None
    """What the training process said was active, None until it did."""
    resumptions: tuple[Resumption, ...] = ()
    """Where its attempts continued, and which damaged checkpoints they passed over."""
    history: History = field(default_factory=History)
    """Its attempts, why each ended, the steps lost, the effective training time; of all repeats."""
    throughput: Throughput | None = None
    """Spread, stalls and number of the steps behind `tokens_per_second_per_gpu`."""
    speed: SpeedUp | None = None
    """`speedup` with its interval; None for the baseline itself."""
    loss: LossVerdict | None = None
    """Whether the whole loss curve is the baseline's; None for the baseline itself."""
    loss_last_tenth: LossVerdict | None = None
    gpu_hours: float | None = None
    """Of all attempts (and repeats), from TorchTitan's first line to its last; None on a CPU."""
    cost_per_billion_tokens: float | None = None
    """At this speed with its stalls, by the cluster's `price_per_gpu_hour`."""
    predicted_tokens_per_second_per_gpu: float | None = None
    predicted_largest: str | None = None
    """The term of the predicted step that takes most."""
    router_load: LoadSummary | None = None
    """How even the router's load was at the end; None where it was not logged."""
    profiled: bool = False
    """Whether TorchTitan's profiler was on in one of its attempts, which slows it down."""
    repeats: tuple[Repeat, ...] = ()
    """The runs behind these figures, in order, where the sweep repeats its cells."""


@dataclass(frozen=True, slots=True)
class CellSetting:
    """What a reader must know about a cell to judge its Result."""

    total_steps: int | None
    device: str | None
    stand_in_for: str | None
    """The recipe that was asked for, where this machine runs another in its stead."""
    baseline: str | None
    published_speedup: float | None
    raw_final_loss: float | None
    """As in Result, but NaN and infinity kept."""
    tokens_per_step_per_gpu: float | None = None
    """Divided by `tokens_per_second` of a CurveStep: the seconds that a step took."""
    world: int = 1
    """GPUs, or ranks, of the newest attempt."""
    published_source: str | None = None
    """Where the published numbers are from."""
    repeat_of: str | None = None
    """The cell that this one repeats."""

    @property
    def batch(self) -> float | None:
        """Tokens of a step, over all ranks: of unequal batches a step is elsewhere in the texts."""
        tokens = self.tokens_per_step_per_gpu
        return tokens * self.world if tokens is not None else None


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run's cells in run order with what the run was."""

    run: RunRecord
    cells: tuple[Result, ...]
    settings: Mapping[str, CellSetting]
    curves: Mapping[str, Sequence[CurveStep]] = field(default_factory=dict)
    """Every logged step of each folder's loss rank, rising, with its attempt: by name of the cell,
    and for its further repeats by those in `Result.repeats`."""
    loads: Mapping[str, Sequence[LoadStep]] = field(default_factory=dict)
    """The router's load at each folder's logged steps, by the same names."""


def masks_differ(one: Result, other: Result) -> bool:
    """Whether two cells are known to have been trained on texts of other lengths."""
    lengths = [cell.mean_attended_length for cell in (one, other) if cell.mean_attended_length]
    return len(lengths) == 2 and max(lengths) > SAME_MASK * min(lengths)
