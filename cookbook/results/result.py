"""A cell's result in three parts: what was asked, what was measured, and what follows.

What was measured is what the cell's attempts left: metrics, logs and environment.

- Metrics come from the log of the loss rank: rank 0, or with PP the first rank of the last stage.
- Throughput, TFLOPs and MFU are medians over the logged steps after warm-up (`measured_steps`).
- Speed and memory come only from attempts with the newest attempt's nodes, layout and options.
- If several attempts trained the same step, the newest attempt's metrics count.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Self

from cookbook.base.errors import InputError
from cookbook.config.cluster import load_cluster
from cookbook.config.facts import facts_of
from cookbook.observe import metrics
from cookbook.observe.failure import find_reason
from cookbook.observe.history import History, collect_history
from cookbook.observe.metrics import LoadStep, StepMetrics
from cookbook.predict.step import StepTime
from cookbook.results.recorded import speed_facts, texts_of
from cookbook.results.verdicts import (
    LossVerdict,
    SpeedUp,
    Throughput,
    measure,
    measured_steps,
    median_of,
)
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, attempt_records
from cookbook.run.run import RunRecord
from cookbook.run.status import FAILED, FINISHED, REFUSED, Resumption, read_json, read_resumptions

# Two cells have different attention masks if their mean attended lengths (how many tokens a token
# attends to) differ by more than this factor. Batches of the same texts differ by less.
SAME_MASK = 1.25
_EMULATED = "emulated numerics: the throughput says nothing about real kernels"
_BY_REFERENCE = "attention by a reference: the throughput says nothing about FlashAttention-4"


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
class Measured:
    """What was measured of a cell; an unknown value is None, never 0.

    `of_repeats` says how the values of a cell's repeats become the cell's.
    """

    status: str | None = None
    reason: str | None = None
    steps: int | None = None  # the last step reached
    throughput: Throughput | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None  # percent of the BF16 peak, even for quantized cells; None on a CPU
    memory_gib: float | None = None
    final_loss: float | None = None  # may be NaN or infinite; `reason` then says so
    validation_loss: float | None = None  # the last logged validation loss
    attention: str | None = None  # `flex`, `sdpa`, `flash_attention_4` or, on CPUs, its reference
    mean_attended_length: float | None = None  # mean number of tokens a token attends to, in step 1
    emulated: bool = False  # whether a kernel was emulated, which makes the speed meaningless
    environment: Mapping[str, Any] = field(default_factory=dict)  # newest `environment.json`
    resumptions: tuple[Resumption, ...] = ()
    history: History = field(default_factory=History)
    gpu_hours: float | None = None  # GPU hours of all attempts and repeats
    cost_per_billion_tokens: float | None = None
    router_load: LoadSummary | None = None
    profiled: bool = False  # whether a profiler slowed down the attempts whose speed counts
    curve: Sequence[StepMetrics] = ()  # logged steps, ascending
    # For each step, the recipe and options that determine which training texts the step reads.
    texts: Mapping[int, object] = field(default_factory=dict)
    timed: Sequence[StepMetrics] = ()  # those run with the newest attempt's nodes and options
    seconds: Mapping[int, float] = field(default_factory=dict)  # each step's duration, if known
    loads: Sequence[LoadStep] = ()

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        return self.throughput.median if self.throughput else None

    @property
    def active(self) -> dict[str, Any] | None:
        """The active features, as reported by the training process."""
        return {key: self.environment[key] for key in self.environment if key != "nodes"} or None


@dataclass(frozen=True, slots=True)
class Judged:
    """What follows for a cell: by prediction, and beside its baseline or another run's cell."""

    predicted: StepTime | None = None
    baseline: str | None = None  # the cell that it is compared with
    speedup: float | None = None  # throughput divided by the baseline's
    speed: SpeedUp | None = None  # `speedup` with its interval; None for the baseline
    loss: LossVerdict | None = None  # verdicts against the baseline's curve; None for the baseline
    loss_last_tenth: LossVerdict | None = None
    published_speedup: float | None = None
    # In a comparison of runs:
    run: str = ""
    reference_tokens: float | None = None  # throughput of the reference cell
    incomparable: str | None = None  # why its speed and its reference's cannot be compared
    is_slower: bool = False  # slower than allowed, or has no speed although the reference has one


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one cell, that is, of one training configuration in a run."""

    record: CellRecord  # its name is that of the cell's folder, even if nothing else is known
    measured: Measured
    judged: Judged = field(default_factory=Judged)
    repeats: tuple[Self, ...] = ()  # if the cell was repeated, the result of each repeat

    @property
    def name(self) -> str:
        return self.record.name or ""

    @property
    def is_baseline(self) -> bool:
        return self.name == self.judged.baseline

    @property
    def runs(self) -> Sequence[Self]:
        """The repeats of the cell, or the cell itself if it has none."""
        return self.repeats or (self,)


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run, and the results of all its cells in the run's order."""

    run: RunRecord
    cells: tuple[Result, ...]

    @property
    def unit(self) -> str:
        """The word after `tokens/s/`: `GPU`, or `rank` if every cell ran on a CPU."""
        return "rank" if {cell.record.device for cell in self.cells} == {"cpu"} else "GPU"


def masks_differ(one: Result, other: Result) -> bool:
    """Return whether the cells' masks differ in mean attended length; False if one is unknown."""
    found = (cell.measured.mean_attended_length for cell in (one, other))
    lengths = [length for length in found if length]
    return len(lengths) == 2 and max(lengths) > SAME_MASK * min(lengths)


def have_same_texts(one: Result, other: Result) -> bool:
    """Return whether both runs read the same texts in every step that both logged."""
    own, others = one.measured.texts, other.measured.texts
    return all(own[step] == others[step] for step in own.keys() & others)


def unlike(cell: Result, base: Result, where: str) -> str | None:
    """Return why the speeds of `cell` and `base` cannot be compared; None if they can.

    `where`: the phrase for `base` in the returned text, for example `in its baseline NAME`.
    """
    if cell.measured.emulated or base.measured.emulated:
        return "emulated numerics have no speed"
    if cell.record.recipe != base.record.recipe:
        return f"recipe {cell.record.recipe}, and {base.record.recipe} {where}"
    if cell.record.device != base.record.device:
        return f"ran on {cell.record.device}, and on {base.record.device} {where}"
    if masks_differ(cell, base):
        own, others = (f"{one.measured.mean_attended_length:,.0f}" for one in (cell, base))
        return f"other texts: a token attends to {own} tokens, and to {others} {where}"
    return None


def measure_cell(
    folder: CellFolder, record: CellRecord, status: str | None, reasons: Iterable[str | None]
) -> Measured:
    """Measure the cell in `folder`; `reasons` are known reasons for its status, or None."""
    attempts, why = folder.attempts(), list(reasons)
    curve, loads = metrics.collect_steps(folder), metrics.collect_router_load(folder)
    records = attempt_records(folder, record)
    asked = speed_facts(record)
    newest = [one for one in attempts if speed_facts(records[one.number]) == asked]
    numbers = {one.number for one in newest}
    timed = [step for step in curve if step.attempt in numbers]
    measured, throughput = measured_steps(timed), measure(timed)
    environments = [read_json(attempt.environment) for attempt in reversed(attempts)]
    environment = next(filter(None, environments), {})
    attention = environment.get("attention") or None
    by_reference = attention is not None and "reference" in attention
    is_low_precision_emulated = record.emulated or bool(environment.get("emulated"))
    if status == FAILED and attempts:
        found = find_reason(attempts[-1].path)
        why.append(found if found and found not in (why[0] or "") else None)
    if bad := [*takewhile(lambda one: not math.isfinite(one.loss or 0.0), reversed(curve))]:
        why.append(f"loss is {bad[-1].loss} since step {bad[-1].step}")
    if status != REFUSED:
        why.append(_EMULATED if is_low_precision_emulated else None)
        why.append(_BY_REFERENCE if by_reference else None)
    validated = (one.validation_loss for one in reversed(curve))
    texts = {number: texts_of(one) for number, one in records.items()}
    return Measured(
        status=status,
        reason="; ".join(dict.fromkeys(part for part in why if part)) or None,
        steps=curve[-1].step if curve else None,
        throughput=throughput,
        tflops_per_gpu=median_of(step.tflops for step in measured),
        # On a CPU, ignore TorchTitan's MFU: it assumes the peak of an A100.
        mfu=None if record.device == "cpu" else median_of(step.mfu for step in measured),
        memory_gib=metrics.read_peak_memory(log for attempt in newest for log in attempt.logs()),
        final_loss=curve[-1].loss if curve else None,
        validation_loss=next((loss for loss in validated if loss is not None), None),
        attention=attention,
        mean_attended_length=environment.get("mean_attended_length") or None,
        emulated=is_low_precision_emulated or by_reference,
        environment=environment,
        resumptions=tuple(read_resumptions(attempts)),
        history=collect_history(folder, record),
        gpu_hours=_gpu_hours(folder, records),
        cost_per_billion_tokens=_cost_per_billion_tokens(record, throughput),
        router_load=summarize_load(loads),
        profiled=any(facts_of(record).profiles or attempt.traces.is_dir() for attempt in newest),
        curve=curve,
        texts={one.step: texts[one.attempt] for one in curve},
        timed=timed,
        seconds={
            one.step: tokens / one.tokens_per_second
            for one in curve
            if (tokens := records[one.attempt].tokens_per_step_per_gpu) and one.tokens_per_second
        },
        loads=loads,
    )


def of_repeats(runs: Sequence[Measured], numbers: Sequence[int]) -> Measured:
    """Merge the measurements of a cell's repeats, which have these numbers.

    Throughput is measured over the steps of all repeats. TFLOPs and MFU are medians over all
    repeats, and memory is the maximum. Final and validation loss are medians over the repeats that
    reached the highest step. The status is `finished` only if every repeat has finished. Most other
    values, such as the loss curve, come from the repeat that `furthest` returns.
    """
    first = runs[furthest(runs)]
    alike = [run for run in runs if run.steps == first.steps]
    pairs = zip(numbers, runs, strict=True)
    reasons = [f"repeat {number}: {run.reason}" for number, run in pairs if run.reason]
    return replace(
        first,
        status=next((run.status for run in runs if run.status != FINISHED), FINISHED),
        reason=first.reason if len({run.reason for run in runs}) == 1 else "; ".join(reasons),
        steps=min((run.steps for run in runs if run.steps is not None), default=None),
        throughput=measure(*(run.timed for run in runs)),
        tflops_per_gpu=median_of(run.tflops_per_gpu for run in runs),
        mfu=median_of(run.mfu for run in runs),
        memory_gib=max((run.memory_gib for run in runs if run.memory_gib), default=None),
        final_loss=median_of(run.final_loss for run in alike) or first.final_loss,
        validation_loss=median_of(run.validation_loss for run in alike) or first.validation_loss,
        emulated=any(run.emulated for run in runs),
        environment=next((run.environment for run in runs if run.environment), {}),
        resumptions=tuple(one for run in runs for one in run.resumptions),
        history=_all_attempts([run.history for run in runs]),
        gpu_hours=sum(run.gpu_hours or 0.0 for run in runs) or None,
        cost_per_billion_tokens=median_of(run.cost_per_billion_tokens for run in runs),
        profiled=any(run.profiled for run in runs),
    )


def furthest(runs: Sequence[Measured]) -> int:
    """Return the place of the first run that reached the highest step; others may have failed."""
    return max(range(len(runs)), key=lambda place: runs[place].steps or 0)


def _all_attempts(histories: Sequence[History]) -> History:
    effective = elapsed = 0.0
    for history in histories:
        if history.effective:
            seconds = sum(attempt.effective_seconds for attempt in history.attempts)
            effective, elapsed = effective + seconds, elapsed + seconds / history.effective
    attempts = tuple(attempt for history in histories for attempt in history.attempts)
    lost = sum(history.steps_lost for history in histories)
    return History(attempts, lost, effective / elapsed if elapsed else None)


def _gpu_hours(folder: CellFolder, records: Mapping[int, CellRecord]) -> float | None:
    """Return the GPU hours of all attempts, each from its first TorchTitan log line to its last.

    The minute or so before the first line is not counted. None on a CPU or without logs.
    """
    seconds = (
        (metrics.logged_seconds(folder.attempt(number).log) or 0.0) * record.world
        for number, record in records.items()
        if record.device != "cpu"
    )
    return sum(seconds) / 3600 or None


def _cost_per_billion_tokens(record: CellRecord, throughput: Throughput | None) -> float | None:
    """Return the cost per 10^9 tokens at the cell's mean speed, which includes stalls.

    None if the cluster's profile is missing or has no `price_per_gpu_hour`.
    """
    if throughput is None or record.device == "cpu" or not record.cluster:
        return None
    try:
        price = load_cluster(record.files.get("cluster") or record.cluster).price_per_gpu_hour
    except InputError:
        return None
    return None if price is None else price * 1e9 / (3600 * throughput.mean)


def summarize_load(steps: Sequence[LoadStep]) -> LoadSummary | None:
    """Summarize the router load over the last tenth of the logged steps; None without steps."""
    if not steps:
        return None
    last = steps[-max(1, len(steps) // 10) :]
    by_layer = zip(*(step.busiest_over_mean for step in last), strict=True)
    busiest = [statistics.median(of_layer) for of_layer in by_layer]
    return LoadSummary(
        busiest_over_mean=max(busiest),
        layer=last[-1].layers[busiest.index(max(busiest))],
        median_over_layers=statistics.median(busiest),
        starved_experts=round(statistics.median(sum(step.starved_experts) for step in last)),
        layers=len(busiest),
        is_forced=any(step.is_forced for step in last),
        steps=(last[0].first_step, last[-1].step),
    )
