"""Collect the results of a run, finished or not: one Result for each cell, in the run's order.

- Metrics are those of the loss rank: rank 0, or with PP the first rank of the last stage.
- Throughput, TFLOPs and MFU are medians over the logged steps after warm-up. Warm-up is the first
  quarter of the logged steps of each attempt, at least 1 and at most 10: they hold compilation and
  allocation.
- Memory is the peak over all ranks, steps and attempts.
- The first step of a resumed attempt replaces that step and all later ones of earlier attempts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from cookbook.base.errors import InputError
from cookbook.config.cluster import load_cluster
from cookbook.config.resolve import cell_from_record
from cookbook.observe.failure import find_reason
from cookbook.observe.history import collect_history
from cookbook.observe.metrics import (
    LoadStep,
    StepMetrics,
    collect_router_load,
    collect_steps,
    logged_seconds,
    read_peak_memory,
)
from cookbook.predict.step import StepTime, predict_step
from cookbook.results.compare import against_baseline
from cookbook.results.result import LoadSummary, Result, RunResults
from cookbook.results.run_differences import asked_facts, seen_facts
from cookbook.results.verdicts import Throughput, measure, measured_steps, median_of
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run
from cookbook.run.states import CellState
from cookbook.run.status import FAILED, REFUSED, UNKNOWN, read_json, read_resumptions

_EMULATED_REASON = "emulated numerics: the throughput says nothing about real MXFP8"
_REFERENCE_REASON = "attention by a reference: the throughput says nothing about FlashAttention-4"


def collect_results(run: Run, states: Iterable[CellState]) -> RunResults:
    """Read a run's metrics and logs; `states` are those of its cells."""
    known = {state.cell: state for state in states}
    cells = [_collect_cell(folder, known[folder.name], run.record.baseline) for folder in run.cells]
    return RunResults(run.record, tuple(against_baseline(cells)))


def _collect_cell(folder: CellFolder, state: CellState, run_baseline: str | None) -> Result:
    problem = None
    try:
        record = read_record(folder.record)
    except InputError as error:
        # The cell must still appear.
        record, problem = CellRecord(), str(error)
    attempts = folder.attempts()
    curve, loads = collect_steps(folder, record), collect_router_load(folder)
    measured, throughput = measured_steps(curve), measure(curve)
    environments = [read_json(attempt.environment) for attempt in reversed(attempts)]
    active = next(filter(None, environments), {})
    attention = active.get("attention") or None
    by_reference = attention is not None and "reference" in attention
    is_low_precision_emulated = record.emulated or bool(active.get("emulated"))
    raw_loss = curve[-1].loss if curve else None
    validated = [one.validation_loss for one in curve if one.validation_loss is not None]
    step = expected_step(folder.name, record)
    predicted, largest = (step.tokens_per_second_per_gpu, step.largest) if step else (None, None)
    status = None if state.state == UNKNOWN else state.state
    reasons = [state.reason, problem]
    if status is None and record.refused:
        status, reasons = REFUSED, [record.refused]
    if status == FAILED and attempts:
        found = find_reason(attempts[-1].path)
        reasons.append(found if found and found not in (state.reason or "") else None)
    # An sbatch line may have turned it on after the script's name.
    is_asked = bool(attempts) and record.options.get("profiling.enable_profiling") is True
    profiled = is_asked or any(attempt.traces.is_dir() for attempt in attempts)
    reasons.append(_non_finite(curve))
    if status != REFUSED:
        reasons.append(_EMULATED_REASON if is_low_precision_emulated else None)
        reasons.append(_REFERENCE_REASON if by_reference else None)
    return Result(
        name=folder.name,
        recipe=record.recipe,
        precision=record.precision,
        ep_backend=record.ep_backend,
        status=status,
        reason="; ".join(dict.fromkeys(part for part in reasons if part)) or None,
        steps=curve[-1].step if curve else None,
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=median_of(step.tflops for step in measured),
        # TorchTitan falls back to an A100's peak for unknown devices.
        mfu=None if record.device == "cpu" else median_of(step.mfu for step in measured),
        memory_gib=read_peak_memory(log for attempt in attempts for log in attempt.logs()),
        final_loss=raw_loss if raw_loss is not None and math.isfinite(raw_loss) else None,
        validation_loss=validated[-1] if validated else None,
        published_tokens_per_second_per_gpu=record.published_tokens_per_second_per_gpu,
        attention=attention,
        mean_attended_length=active.get("mean_attended_length") or None,
        emulated=is_low_precision_emulated or by_reference,
        active={name: value for name, value in active.items() if name != "nodes"} or None,
        resumptions=tuple(read_resumptions(attempts)),
        history=collect_history(folder, record),
        throughput=throughput,
        gpu_hours=gpu_hours(folder, record),
        cost_per_billion_tokens=cost_per_billion_tokens(record, throughput),
        predicted_tokens_per_second_per_gpu=predicted,
        predicted_largest=largest,
        router_load=summarize_load(loads),
        profiled=profiled,
        total_steps=record.steps,
        device=record.device,
        stand_in_for=record.stand_in_for,
        baseline=record.baseline or run_baseline,
        prediction=record.prediction,
        published_source=record.published_source,
        raw_final_loss=raw_loss,
        tokens_per_step_per_gpu=record.tokens_per_step_per_gpu,
        world=record.world,
        routing=_routing(record),
        repeat_of=record.repeat_of,
        asked=asked_facts(record),
        seen=seen_facts(active),
        curve=curve,
        loads=loads,
    )


def _routing(record: CellRecord) -> str | None:
    """Return the routing of the newest attempt; None where no record was read."""
    if record.name is None and record.recipe is None:
        return None
    options = record.options
    is_forced = options.get("debug.moe_force_load_balance") is True
    return str(options.get("debug.moe_routing") or ("round_robin" if is_forced else "trained"))


def _non_finite(steps: Sequence[StepMetrics]) -> str | None:
    """Return since which step the loss is NaN or infinite; None where the last one is a number."""
    since = None
    for metrics in reversed(steps):
        if metrics.loss is None or math.isfinite(metrics.loss):
            break
        since = metrics
    return f"loss is {since.loss} since step {since.step}" if since else None


def gpu_hours(folder: CellFolder, record: CellRecord) -> float | None:
    """Return hours of all attempts times their GPUs, from TorchTitan's first line to its last.

    None on a CPU, and without logs. The minute or so before the first line is not in it.
    """
    if record.device == "cpu":
        return None
    hours = 0.0
    for attempt in reversed(folder.attempts()):
        # Those before a change of the request have another one.
        record = read_record(attempt.record) if attempt.record.exists() else record
        hours += (logged_seconds(attempt.log) or 0.0) / 3600 * record.world
    return hours or None


def cost_per_billion_tokens(record: CellRecord, throughput: Throughput | None) -> float | None:
    """Return the cost at the cell's speed with stalls, by the cluster's `price_per_gpu_hour`.

    None without a price, or where the cluster's profile is not here.
    """
    if throughput is None or record.device == "cpu" or not record.cluster:
        return None
    try:
        price = load_cluster(record.files.get("cluster") or record.cluster).price_per_gpu_hour
    except InputError:
        return None
    return None if price is None else price * 1e9 / (3600 * throughput.mean)


def expected_step(name: str, record: CellRecord) -> StepTime | None:
    """Return the predicted step of the cell as last asked for; None where it cannot be predicted.

    A cell that was refused, ran on a CPU, or was emulated has no meaningful time.
    """
    if record.device != "cuda" or record.emulated or record.refused:
        return None
    try:
        return predict_step(cell_from_record(name, record, name, None, {}))
    except InputError:
        # Its files are gone, or its documents or GPU are unknown.
        return None


def summarize_load(steps: Sequence[LoadStep]) -> LoadSummary | None:
    """Summarize the last tenth of the logged steps, at least one; None without any."""
    if not steps:
        return None
    last = steps[-max(1, len(steps) // 10) :]
    by_layer = zip(*(step.busiest_over_mean for step in last), strict=True)
    busiest = [statistics.median(of_layer) for of_layer in by_layer]
    most = max(busiest)
    return LoadSummary(
        busiest_over_mean=most,
        layer=last[-1].layers[busiest.index(most)],
        median_over_layers=statistics.median(busiest),
        starved_experts=round(statistics.median(sum(step.starved_experts) for step in last)),
        layers=len(busiest),
        is_forced=any(step.is_forced for step in last),
        steps=(last[0].first_step, last[-1].step),
    )
