"""In: a cell's attempts. Out: the steps of the rank that knows the loss, as one rising curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.log.lines import StepMetrics, read_last_step, read_log
from cookbook.run.rundir import attempts


def loss_rank(cell: Mapping[str, Any]) -> int:
    """The global rank whose metrics lines hold the real loss, from a cell.yaml's mapping."""
    degree = option_count(cell, "parallelism.pipeline_parallel_degree") or 1
    # V-shaped schedules end where they began.
    if degree == 1 or _option(cell, "parallelism.pipeline_parallel_schedule") == "ZBVZeroBubble":
        return 0
    world = (_count(cell.get("nodes")) or 1) * (_count(cell.get("ranks_per_node")) or 1)
    return world // degree * (degree - 1)


def collect_steps(cell_dir: Path, cell: Mapping[str, Any]) -> list[StepMetrics]:
    """The loss rank's steps over all attempts, rising: the cell's loss curve."""
    steps: list[StepMetrics] = []
    for attempt in attempts(cell_dir):
        for metrics in _attempt_steps(attempt, cell):
            while steps and steps[-1].step >= metrics.step:
                steps.pop()
            steps.append(metrics)
    return steps


def last_step(cell_dir: Path, cell: Mapping[str, Any]) -> StepMetrics | None:
    """The newest step of the loss rank; asked for again and again, so only a log's end is read."""
    for attempt in reversed(attempts(cell_dir)):
        if found := read_last_step(attempt / "train.log", loss_rank(cell)):
            return found
    steps = collect_steps(cell_dir, cell)
    return steps[-1] if steps else None


def metrics_logs(attempt: Path) -> list[Path]:
    """Every log of an attempt that may hold metrics lines, of all ranks that there are."""
    logs = [attempt / "train.log", *attempt.glob("ranks/*/attempt_*/*/stdout.log")]
    return [log for log in logs if log.is_file()]


def option_count(cell: Mapping[str, Any], option: str) -> int | None:
    """A TorchTitan option of the cell that is a positive whole number, None for anything else."""
    return _count(_option(cell, option))


def _attempt_steps(attempt: Path, cell: Mapping[str, Any]) -> list[StepMetrics]:
    rank = loss_rank(cell)
    log = attempt / "train.log"
    shown = list(read_log(log, rank)) if log.is_file() else []
    if shown:
        return shown
    # A rank's own log carries no global rank: of the nodes, take one that printed a real loss.
    local_rank = rank % (_count(cell.get("ranks_per_node")) or rank + 1)
    logged = []
    for launch in sorted((attempt / "ranks").glob("*")):
        tries = _numbered(launch.glob("attempt_*"), "_")
        files = [path / str(local_rank) / "stdout.log" for path in tries]
        logged.append([step for file in files if file.is_file() for step in read_log(file)])
    if real := [steps for steps in logged if steps and not any(map(_has_stage_loss, steps))]:
        return max(real, key=len)
    if not log.is_file():
        return []
    # Lines without a rank (another prefix, or none), or of ranks that hold no real loss.
    lines = list(read_log(log))
    first = min((line.rank for line in lines if line.rank is not None), default=None)
    chosen = [line for line in lines if line.rank == first]
    if all(map(_has_stage_loss, chosen)):
        return [replace(line, loss=None) for line in chosen]
    return [line for line in chosen if not _has_stage_loss(line)]


def _has_stage_loss(metrics: StepMetrics) -> bool:
    """Whether this is the negative number that ranks outside the last PP stage print."""
    return metrics.loss is not None and metrics.loss < 0


def _numbered(paths: Iterable[Path], separator: str) -> list[Path]:
    """Directories named `...<separator><number>` by their number: 10 comes after 9."""
    numbered = ((path.name.rpartition(separator)[2], path) for path in paths)
    return [path for _, path in sorted((int(n), path) for n, path in numbered if n.isdigit())]


def _option(cell: Mapping[str, Any], option: str) -> object:
    options = cell.get("options")
    return options.get(option) if isinstance(options, dict) else None


def _count(value: object) -> int | None:
    """A positive whole number, also where YAML holds it as text."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
