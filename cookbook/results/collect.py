"""The results of a run, finished or not: one Result for each cell, in the run's order.

How the figures are made:

- The loss rank's lines count: rank 0, or with PP the first rank of the last stage, since the ranks
  of other stages print no real loss. Where the console doesn't show that rank, its own log does.
- Throughput, TFLOPs and MFU are medians over the logged steps after warm-up. Warm-up is the first
  quarter of the logged steps, at least 1 and at most 10: they hold compilation and allocation.
- Memory is the peak over all ranks, steps and attempts.
- A resumed attempt goes back to its checkpoint, so its first step replaces that step and all
  later ones of the attempts before it.
- Speed-up needs a baseline cell of the same recipe and device with a throughput. Both must have
  finished, without emulated numerics.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.log.curve import collect_steps
from cookbook.log.failure import find_reason
from cookbook.log.history import History, collect_history
from cookbook.log.lines import StepMetrics, read_active, read_peak_memory
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.resumption import Resumption, read_resumptions
from cookbook.run.run import Run, RunRecord
from cookbook.run.states import CellState
from cookbook.run.status import FAILED, FINISHED, REFUSED, UNKNOWN, read_json

_EMULATED_REASON = "emulated numerics: the throughput says nothing about real MXFP8"
_REFERENCE_REASON = "attention by a reference: the throughput says nothing about FlashAttention-4"


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
    """Its attempts, why each ended, the steps lost, the effective training time."""


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


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run's cells in run order with what the run was."""

    run: RunRecord
    cells: tuple[Result, ...]
    settings: Mapping[str, CellSetting]


def collect_results(run: Run, states: Iterable[CellState]) -> RunResults:
    """Read a run's logs; `states` are those of its cells."""
    known = {state.cell: state for state in states}
    cells: list[Result] = []
    settings: dict[str, CellSetting] = {}
    for folder in run.cells:
        result, setting = _collect_cell(folder, known[folder.name], run.record.baseline)
        cells.append(result)
        settings[folder.name] = setting
    by_name = {cell.name: cell for cell in cells}
    for position, cell in enumerate(cells):
        setting = settings[cell.name]
        baseline = by_name.get(setting.baseline or "")
        if baseline is None:
            continue
        device = settings[baseline.name].device
        comparable = cell.recipe == baseline.recipe and setting.device == device
        # The median of a few steps is no result: a cell that failed may have been slow, or broken.
        measured = cell.status == FINISHED == baseline.status
        if comparable and measured and not cell.emulated and not baseline.emulated:
            speedup = _ratio(cell.tokens_per_second_per_gpu, baseline.tokens_per_second_per_gpu)
            cells[position] = replace(cell, speedup=speedup)
        settings[cell.name] = replace(
            setting,
            published_speedup=_ratio(
                cell.published_tokens_per_second_per_gpu,
                baseline.published_tokens_per_second_per_gpu,
            ),
        )
    return RunResults(run.record, tuple(cells), settings)


def warm_up(num_steps: int) -> int:
    """How many of the first logged steps throughput leaves out: a quarter, but 1 to 10."""
    return min(10, max(1, num_steps // 4))


def _collect_cell(
    folder: CellFolder, state: CellState, run_baseline: str | None
) -> tuple[Result, CellSetting]:
    record, problem = _read(folder)
    steps = collect_steps(folder, record)
    measured = steps[warm_up(len(steps)) :]
    attempts = folder.attempts()
    active = next(filter(None, map(_read_attempt_active, reversed(attempts))), None)
    observed = active or {}
    attention = _text(observed.get("attention"))
    by_reference = attention is not None and "reference" in attention
    is_low_precision_emulated = record.emulated or bool(observed.get("emulated"))
    final_loss = steps[-1].loss if steps else None
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
    result = Result(
        name=folder.name,
        recipe=record.recipe,
        precision=record.precision,
        ep_backend=record.ep_backend,
        status=status,
        reason="; ".join(dict.fromkeys(part for part in reasons if part)) or None,
        steps=steps[-1].step if steps else None,
        tokens_per_second_per_gpu=_median(step.tokens_per_second for step in measured),
        tflops_per_gpu=_median(step.tflops for step in measured),
        # TorchTitan falls back to an A100's peak where it doesn't know the device.
        mfu=None if record.device == "cpu" else _median(step.mfu for step in measured),
        memory_gib=read_peak_memory(log for attempt in attempts for log in attempt.logs()),
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
        history=collect_history(folder, record),
    )
    setting = CellSetting(
        total_steps=record.steps,
        device=record.device,
        stand_in_for=record.stand_in_for,
        baseline=record.baseline or run_baseline,
        published_speedup=None,
        raw_final_loss=final_loss,
    )
    return result, setting


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


def _read_attempt_active(attempt: Attempt) -> dict[str, Any] | None:
    active = read_active(attempt.log) if attempt.log.is_file() else None
    try:
        return active or read_json(attempt.environment)
    except InputError:
        return None


def _non_finite(steps: list[StepMetrics]) -> str | None:
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


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
