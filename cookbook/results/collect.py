"""Collect the results of a run, finished or not: one Result per cell, in run order.

- Metrics come from the log of the loss rank: rank 0, or with PP the first rank of the last stage.
- Throughput, TFLOPs and MFU are medians over the logged steps after warm-up (`measured_steps`).
- Speed and memory come only from attempts with the newest attempt's nodes, layout and options.
- If several attempts trained the same step, the newest attempt's metrics count.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from cookbook.base.errors import InputError
from cookbook.config.cluster import load_cluster
from cookbook.config.resolve import cell_from_record
from cookbook.observe import metrics
from cookbook.observe.failure import find_reason
from cookbook.observe.history import collect_history
from cookbook.predict.step import StepTime, predict_step
from cookbook.results.compare import against_baseline
from cookbook.results.result import LoadSummary, Result, RunResults
from cookbook.results.run_differences import asked_facts, seen_facts, speed_facts, texts_of
from cookbook.results.verdicts import Throughput, measure, measured_steps, median_of
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, attempt_records, read_record
from cookbook.run.run import Run
from cookbook.run.states import CellState
from cookbook.run.status import FAILED, REFUSED, UNKNOWN, read_json, read_resumptions

_EMULATED = "emulated numerics: the throughput says nothing about real MXFP8"
_BY_REFERENCE = "attention by a reference: the throughput says nothing about FlashAttention-4"
_OF_RECORD = "recipe precision ep_backend device stand_in_for prediction world repeat_of repeat "
_OF_RECORD += "published_tokens_per_second_per_gpu published_source tokens_per_step_per_gpu"


def collect_results(run: Run, states: Iterable[CellState]) -> RunResults:
    """Collect the results of a run from its metrics and logs, given the states of its cells."""
    known = {state.cell: state for state in states}
    cells = [_collect_cell(folder, known[folder.name], run.record.baseline) for folder in run.cells]
    return RunResults(run.record, tuple(against_baseline(cells)))


def _collect_cell(folder: CellFolder, state: CellState, run_baseline: str | None) -> Result:
    problem = None
    try:
        record = read_record(folder.record)
    except InputError as error:
        record, problem = CellRecord(), str(error)
    attempts = folder.attempts()
    curve, loads = metrics.collect_steps(folder, record), metrics.collect_router_load(folder)
    records = attempt_records(folder, record)
    facts, asked = {k: asked_facts(one) for k, one in records.items()}, asked_facts(record)
    newest = [one for one in attempts if speed_facts(facts[one.number]) == speed_facts(asked)]
    numbers = {one.number for one in newest}
    timed = [step for step in curve if step.attempt in numbers]
    measured, throughput = measured_steps(timed), measure(timed)
    environments = [read_json(attempt.environment) for attempt in reversed(attempts)]
    active = next(filter(None, environments), {})
    attention = active.get("attention") or None
    by_reference = attention is not None and "reference" in attention
    is_low_precision_emulated = record.emulated or bool(active.get("emulated"))
    validated = (one.validation_loss for one in reversed(curve))
    texts = {number: texts_of(one) for number, one in records.items()}
    step = expected_step(folder.name, record)
    status = None if state.state == UNKNOWN else state.state
    reasons = [state.reason, problem]
    if status is None and record.refused:
        status, reasons = REFUSED, [record.refused]
    if status == FAILED and attempts:
        found = find_reason(attempts[-1].path)
        reasons.append(found if found and found not in (state.reason or "") else None)
    if bad := [*takewhile(lambda one: not math.isfinite(one.loss or 0.0), reversed(curve))]:
        reasons.append(f"loss is {bad[-1].loss} since step {bad[-1].step}")
    if status != REFUSED:
        reasons.append(_EMULATED if is_low_precision_emulated else None)
        reasons.append(_BY_REFERENCE if by_reference else None)
    options = record.options
    is_profiled = options.get("profiling.enable_profiling") is True
    routing = None
    if record.name is not None or record.recipe is not None:
        is_forced = options.get("debug.moe_force_load_balance") is True
        routing = options.get("debug.moe_routing") or ("round_robin" if is_forced else "trained")
    return Result(
        name=folder.name,
        **{name: getattr(record, name) for name in _OF_RECORD.split()},
        status=status,
        reason="; ".join(dict.fromkeys(part for part in reasons if part)) or None,
        steps=curve[-1].step if curve else None,
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=median_of(step.tflops for step in measured),
        # On a CPU, ignore TorchTitan's MFU: it assumes the peak of an A100.
        mfu=None if record.device == "cpu" else median_of(step.mfu for step in measured),
        memory_gib=metrics.read_peak_memory(log for attempt in newest for log in attempt.logs()),
        final_loss=curve[-1].loss if curve else None,
        validation_loss=next((loss for loss in validated if loss is not None), None),
        attention=attention,
        mean_attended_length=active.get("mean_attended_length") or None,
        emulated=is_low_precision_emulated or by_reference,
        active={name: value for name, value in active.items() if name != "nodes"} or None,
        resumptions=tuple(read_resumptions(attempts)),
        history=collect_history(folder, record),
        throughput=throughput,
        gpu_hours=gpu_hours(folder, records),
        cost_per_billion_tokens=cost_per_billion_tokens(record, throughput),
        predicted_tokens_per_second_per_gpu=step.tokens_per_second_per_gpu if step else None,
        predicted_largest=step.largest if step else None,
        router_load=summarize_load(loads),
        profiled=any(is_profiled or attempt.traces.is_dir() for attempt in newest),
        total_steps=record.steps,
        baseline=record.baseline or run_baseline,
        routing=routing,
        asked=asked,
        seen=seen_facts(active),
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


def gpu_hours(folder: CellFolder, records: Mapping[int, CellRecord]) -> float | None:
    """Return the GPU hours of all attempts, each from its first TorchTitan log line to its last.

    The minute or so before the first line is not counted. None on a CPU or without logs.
    """
    seconds = (
        (metrics.logged_seconds(folder.attempt(number).log) or 0.0) * record.world
        for number, record in records.items()
        if record.device != "cpu"
    )
    return sum(seconds) / 3600 or None


def cost_per_billion_tokens(record: CellRecord, throughput: Throughput | None) -> float | None:
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


def expected_step(name: str, record: CellRecord) -> StepTime | None:
    """Return the step time predicted for a cell; None if there is no valid prediction."""
    if record.device != "cuda" or record.emulated or record.refused:
        return None
    try:
        return predict_step(cell_from_record(name, record, name, None, {}))
    except InputError:
        return None


def summarize_load(steps: Sequence[metrics.LoadStep]) -> LoadSummary | None:
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
