"""In: a run directory, finished or not. Out: one Result per cell, in the run's order.

How the figures are made:

- The loss rank's lines count: rank 0, or with PP the first rank of the last stage, since the ranks
  of other stages print no real loss. Where the console doesn't show that rank, its own log does.
- Throughput, TFLOPs and MFU are medians over the logged steps after warm-up. Warm-up is the first
  quarter of the logged steps, at least 1 and at most 10: they hold compilation and allocation.
- Memory is the peak over all ranks, steps and attempts.
- A resumed attempt goes back to its checkpoint, so its first step replaces that step and all
  later ones of the attempts before it.
- Speed-up needs a baseline cell of the same recipe and device with a throughput, and no emulated
  numerics on either side.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cookbook.base.errors import InputError
from cookbook.log.curve import collect_steps, metrics_logs, option_count
from cookbook.log.failure import find_reason
from cookbook.log.lines import StepMetrics, read_active, read_peak_memory
from cookbook.run.rundir import attempts, cell_names

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EMULATED_REASON = "emulated numerics: the throughput says nothing about real MXFP8"

StatusOverride = Mapping[str, tuple[str, str | None]]


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
    emulated: bool
    active: dict[str, Any] | None
    """What the training process said was active, None until it did."""


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

    run: str
    sweep: str | None
    created: str | None
    user: str | None
    commit: str | None
    cluster: str | None
    stack: str | None
    baseline: str | None
    cells: tuple[Result, ...]
    settings: Mapping[str, CellSetting]


def collect_results(run_dir: Path, statuses: StatusOverride | None = None) -> RunResults:
    """Read a run directory; `statuses` (cell -> state, reason) wins over stale status files.

    Raises:
        InputError: `run_dir` holds no readable run.json.
    """
    run = _read_run(run_dir)
    cells: list[Result] = []
    settings: dict[str, CellSetting] = {}
    for name in cell_names(run_dir, run["cells"]):
        state = (statuses or {}).get(name)
        result, setting = _collect_cell(run_dir / name, state, _text(run.get("baseline")))
        cells.append(result)
        settings[name] = setting
    by_name = {cell.name: cell for cell in cells}
    for position, cell in enumerate(cells):
        baseline = by_name.get(settings[cell.name].baseline or "")
        setting = settings[cell.name]
        if baseline is not None:
            device = settings[baseline.name].device
            comparable = cell.recipe == baseline.recipe and setting.device == device
            if comparable and not cell.emulated and not baseline.emulated:
                speedup = _ratio(cell.tokens_per_second_per_gpu, baseline.tokens_per_second_per_gpu)
                cells[position] = replace(cell, speedup=speedup)
            settings[cell.name] = replace(
                setting,
                published_speedup=_ratio(
                    cell.published_tokens_per_second_per_gpu,
                    baseline.published_tokens_per_second_per_gpu,
                ),
            )
    return RunResults(
        run=_text(run.get("run")) or run_dir.name,
        sweep=_text(run.get("sweep")),
        created=_text(run.get("created")),
        user=_text(run.get("user")),
        commit=_text(run.get("commit")),
        cluster=_text(run.get("cluster")),
        stack=_text(run.get("stack")),
        baseline=_text(run.get("baseline")),
        cells=tuple(cells),
        settings=settings,
    )


def warm_up(num_steps: int) -> int:
    """How many of the first logged steps throughput leaves out: a quarter, but 1 to 10."""
    return min(10, max(1, num_steps // 4))


def _collect_cell(
    cell_dir: Path, status: tuple[str, str | None] | None, run_baseline: str | None
) -> tuple[Result, CellSetting]:
    cell, problem = _read_cell(cell_dir / "cell.yaml")
    state, reason = status or _read_status(cell_dir / "status.json", cell)
    steps = collect_steps(cell_dir, cell)
    measured = steps[warm_up(len(steps)) :]
    folders = attempts(cell_dir)
    active = next(filter(None, map(_read_attempt_active, reversed(folders))), None)
    emulated = bool(cell.get("emulated")) or bool((active or {}).get("emulated"))
    device = _text(cell.get("device"))
    final_loss = steps[-1].loss if steps else None
    reasons = [reason, problem]
    if state == "failed" and folders:
        found = find_reason(folders[-1])
        reasons.append(found if found and found not in (reason or "") else None)
    reasons.append(_non_finite(steps))
    if emulated and state != "refused":
        reasons.append(_EMULATED_REASON)
    logs = [path for attempt in folders for path in metrics_logs(attempt)]
    result = Result(
        name=cell_dir.name,
        recipe=_text(cell.get("recipe")),
        precision=_text(cell.get("precision")),
        ep_backend=_text(cell.get("ep_backend")),
        status=state,
        reason="; ".join(dict.fromkeys(part for part in reasons if part)) or None,
        steps=steps[-1].step if steps else None,
        tokens_per_second_per_gpu=_median(step.tokens_per_second for step in measured),
        tflops_per_gpu=_median(step.tflops for step in measured),
        # TorchTitan falls back to an A100's peak where it doesn't know the device.
        mfu=None if device == "cpu" else _median(step.mfu for step in measured),
        memory_gib=read_peak_memory(logs),
        final_loss=final_loss if final_loss is not None and math.isfinite(final_loss) else None,
        speedup=None,
        published_tokens_per_second_per_gpu=_float(cell.get("published_tokens_per_second_per_gpu")),
        emulated=emulated,
        active=active,
    )
    setting = CellSetting(
        total_steps=option_count(cell, "training.steps"),
        device=device,
        stand_in_for=_text(cell.get("stand_in_for")),
        baseline=_text(cell.get("baseline")) or run_baseline,
        published_speedup=None,
        raw_final_loss=final_loss,
    )
    return result, setting


def _read_attempt_active(attempt: Path) -> dict[str, Any] | None:
    log = attempt / "train.log"
    active = read_active(log) if log.is_file() else None
    return active or _read_json(attempt / "environment.json")


def _non_finite(steps: list[StepMetrics]) -> str | None:
    """Since which step the loss is NaN or infinite, None where the last one is a number."""
    since = None
    for metrics in reversed(steps):
        if metrics.loss is None or math.isfinite(metrics.loss):
            break
        since = metrics
    return f"loss is {since.loss} since step {since.step}" if since else None


def _read_run(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "run.json"
    if not path.is_file():
        raise InputError(str(run_dir), "no run.json, so this is no run directory", "name a run")
    run = _read_json(path)
    names = run.get("cells") if run else None
    if run is None or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise InputError(
            str(path), "not a JSON object with a list of cells", "restore or delete it"
        )
    return run


def _read_cell(path: Path) -> tuple[dict[str, Any], str | None]:
    """The mapping, empty with the problem where it can't be read: the cell must still appear."""
    try:
        # Safe as well, and the C one reads a run of 1,000 cells several times faster.
        cell = yaml.load(path.read_text(encoding="utf-8"), Loader=_YamlLoader)  # noqa: S506
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}, f"{path.name} cannot be read"
    return (cell, None) if isinstance(cell, dict) else ({}, f"{path.name} holds no mapping")


def _read_status(path: Path, cell: Mapping[str, Any]) -> tuple[str | None, str | None]:
    status = _read_json(path) or {}
    refused = _text(cell.get("refused"))
    state = _text(status.get("state")) or ("refused" if refused else None)
    return state, _text(status.get("reason")) or (refused if state == "refused" else None)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value)


def _float(value: object) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(str(value)) if number and math.isfinite(float(str(value))) else None
