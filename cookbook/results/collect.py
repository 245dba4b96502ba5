"""The results of a run, finished or not: one Result for each cell, in the run's order.

How the figures are made:

- The loss rank's lines count: rank 0, or with PP the first rank of the last stage, since the ranks
  of other stages print no real loss. Where the console doesn't show that rank, its own log does.
- Throughput, TFLOPs and MFU are medians over the logged steps after warm-up. Warm-up is the first
  quarter of the logged steps of each attempt, at least 1 and at most 10: they hold compilation and
  allocation.
- Memory is the peak over all ranks, steps and attempts.
- A resumed attempt goes back to its checkpoint, so its first step replaces that step and all
  later ones of the attempts before it.
- Speed-up needs a baseline cell of the same recipe and device with a throughput. Both must have
  finished, without emulated numerics.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.observe.curve import CurveStep, collect_steps, scan_attempts
from cookbook.observe.failure import find_reason
from cookbook.observe.history import collect_history
from cookbook.observe.lines import StepMetrics
from cookbook.observe.memory import read_peak_memory
from cookbook.observe.router_load import LoadStep, collect_router_load
from cookbook.observe.scan import LogScan
from cookbook.results.against import against_baseline
from cookbook.results.cost import cost_per_billion_tokens, gpu_hours
from cookbook.results.expected import expected_step
from cookbook.results.load import summarize_load
from cookbook.results.result import CellSetting, Result, RunResults
from cookbook.results.speed import measure, measured_steps
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.resumption import read_resumptions
from cookbook.run.run import Run
from cookbook.run.states import CellState
from cookbook.run.status import FAILED, REFUSED, UNKNOWN, read_json

_EMULATED_REASON = "emulated numerics: the throughput says nothing about real MXFP8"
_REFERENCE_REASON = "attention by a reference: the throughput says nothing about FlashAttention-4"


def collect_results(run: Run, states: Iterable[CellState]) -> RunResults:
    """Read a run's logs; `states` are those of its cells."""
    known = {state.cell: state for state in states}
    cells: list[Result] = []
    settings: dict[str, CellSetting] = {}
    curves: dict[str, list[CurveStep]] = {}
    loads: dict[str, list[LoadStep]] = {}
    for folder in run.cells:
        record, problem = _read(folder)
        scans = scan_attempts(folder, record)
        curve = collect_steps(folder, record, scans)
        state = known[folder.name]
        load = collect_router_load(folder)
        result = _result(folder, record, problem, state, curve, scans)
        cells.append(replace(result, router_load=summarize_load(load)))
        loads[folder.name] = load
        settings[folder.name] = _setting(record, curve, run.record.baseline)
        curves[folder.name] = curve
    return against_baseline(RunResults(run.record, tuple(cells), settings, curves, loads))


def _result(
    folder: CellFolder,
    record: CellRecord,
    problem: str | None,
    state: CellState,
    steps: Sequence[CurveStep],
    scans: Mapping[int, LogScan],
) -> Result:
    measured, throughput = measured_steps(steps), measure(steps)
    attempts = folder.attempts()
    said = (_active(attempt, scans.get(attempt.number)) for attempt in reversed(attempts))
    active = next(filter(None, said), None)
    observed = active or {}
    attention = _text(observed.get("attention"))
    by_reference = attention is not None and "reference" in attention
    is_low_precision_emulated = record.emulated or bool(observed.get("emulated"))
    final_loss = steps[-1].loss if steps else None
    expected = expected_step(folder.name, record)
    reasons = [state.reason, problem]
    status = None if state.state == UNKNOWN else state.state
    if status is None and record.refused:
        status, reasons = REFUSED, [record.refused]
    if status == FAILED and attempts:
        found = find_reason(attempts[-1].path)
        reasons.append(found if found and found not in (state.reason or "") else None)
    reasons.append(_non_finite(steps))
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
        steps=steps[-1].step if steps else None,
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=_median(step.tflops for step in measured),
        # TorchTitan falls back to an A100's peak where it doesn't know the device.
        mfu=None if record.device == "cpu" else _median(step.mfu for step in measured),
        memory_gib=_peak_memory(attempts, scans),
        final_loss=final_loss if final_loss is not None and math.isfinite(final_loss) else None,
        speedup=None,
        # What was published is for the cell as it was first asked for.
        published_tokens_per_second_per_gpu=None
        if record.changes
        else record.published_tokens_per_second_per_gpu,
        attention=attention,
        mean_attended_length=_length(observed.get("mean_attended_length")),
        emulated=is_low_precision_emulated or by_reference,
        active=active,
        resumptions=tuple(read_resumptions(attempts)),
        throughput=throughput,
        gpu_hours=gpu_hours(folder, record),
        cost_per_billion_tokens=cost_per_billion_tokens(record, throughput),
        predicted_tokens_per_second_per_gpu=expected.tokens_per_second_per_gpu
        if expected
        else None,
        predicted_largest=expected.largest if expected else None,
        history=collect_history(folder, record, scans),
        profiled=any(_was_profiled(record, attempt) for attempt in attempts),
    )


def _setting(
    record: CellRecord, steps: Sequence[CurveStep], run_baseline: str | None
) -> CellSetting:
    return CellSetting(
        total_steps=record.steps,
        device=record.device,
        stand_in_for=record.stand_in_for,
        baseline=record.baseline or run_baseline,
        published_speedup=None,
        raw_final_loss=steps[-1].loss if steps else None,
        tokens_per_step_per_gpu=record.tokens_per_step_per_gpu,
        world=record.world,
        published_source=record.published_source,
        repeat_of=record.repeat_of,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _length(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < math.inf else None


def _read(folder: CellFolder) -> tuple[CellRecord, str | None]:
    """The record, empty with the problem where it can't be read: the cell must still appear."""
    try:
        return read_record(folder.record), None
    except InputError as error:
        return CellRecord(), str(error)


def _active(attempt: Attempt, scan: LogScan | None) -> dict[str, Any] | None:
    try:
        return (scan.active if scan else None) or read_json(attempt.environment)
    except InputError:
        return None


def _peak_memory(attempts: Iterable[Attempt], scans: Mapping[int, LogScan]) -> float | None:
    shown = max((scan.memory_gib for scan in scans.values()), default=0.0)
    others = (log for attempt in attempts for log in attempt.logs() if log != attempt.log)
    return max(shown, read_peak_memory(others) or 0.0) or None


def _was_profiled(record: CellRecord, attempt: Attempt) -> bool:
    asked = record.as_of(attempt.number).options.get("profiling.enable_profiling") is True
    # An sbatch line may have turned it on, behind the script's name.
    return asked or attempt.traces.is_dir()


def _non_finite(steps: Sequence[StepMetrics]) -> str | None:
    """Since which step the loss is NaN or infinite, None where the last one is a number."""
    since = None
    for metrics in reversed(steps):
        if metrics.loss is None or math.isfinite(metrics.loss):
            break
        since = metrics
    return f"loss is {since.loss} since step {since.step}" if since else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None
