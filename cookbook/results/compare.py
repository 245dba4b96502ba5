"""Cells of several runs against the first run's, or against the published numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cookbook.results.loss import LossVerdict, judge_curves, losses_of
from cookbook.results.result import Result, RunResults, masks_differ
from cookbook.results.speed import SpeedUp, speed_up, speeds_of, unpaired_speed_up
from cookbook.run.status import FINISHED

PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell of a run beside the reference's; what is not known is None."""

    cell: str
    run: str
    status: str | None
    tokens_per_second_per_gpu: float | None
    reference_tokens_per_second_per_gpu: float | None
    speed: SpeedUp | None
    """Against the reference; None, with the `reason`, where the two cannot be compared."""
    loss: LossVerdict | None
    loss_last_tenth: LossVerdict | None
    gpu_hours: float | None
    cost_per_billion_tokens: float | None
    reason: str | None
    is_slower: bool
    """Slower than the tolerance allows, or without a speed where the reference has one."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All cells that the runs have in common with the reference, in its order."""

    reference: str
    """A run's name, or `published`."""
    tolerance: float
    """How many percent slower a cell may be."""
    cells: tuple[Compared, ...]
    differences: tuple[str, ...]
    """What else differs between the runs."""

    @property
    def slower(self) -> list[Compared]:
        """The cells that end a command with status 1."""
        return [cell for cell in self.cells if cell.is_slower]


def compare_runs(runs: Sequence[RunResults], tolerance: float) -> Comparison:
    """Compare the later runs with the first one, cell by cell of the same name."""
    reference, *others = runs
    cells: list[Compared] = []
    for base in reference.cells:
        cells.append(_alone(reference, base))
        for other in others:
            own = next((cell for cell in other.cells if cell.name == base.name), None)
            if own is not None:
                cells.append(_beside(other, own, reference, base, tolerance))
    differences = tuple(_differences(runs))
    return Comparison(reference.run.run, tolerance, tuple(cells), differences)


def compare_with_published(runs: Sequence[RunResults], tolerance: float) -> Comparison:
    """Compare every cell that is just what was published with the published number."""
    cells = [
        _beside_published(run, cell, published, tolerance)
        for run in runs
        for cell in run.cells
        if (published := cell.published_tokens_per_second_per_gpu) is not None
    ]
    return Comparison(PUBLISHED, tolerance, tuple(cells), tuple(_differences(runs)))


def _alone(run: RunResults, cell: Result) -> Compared:
    return _compared(run, cell, None, None, None, None, False)


def _beside(
    run: RunResults, cell: Result, reference: RunResults, base: Result, tolerance: float
) -> Compared:
    reason = _incomparable(run, cell, reference, base)
    if reason is not None:
        is_missing = base.status == FINISHED != cell.status
        return _compared(run, cell, base.tokens_per_second_per_gpu, None, None, reason, is_missing)
    speed = _speed(run, cell, reference, base)
    losses = None
    if run.settings[cell.name].batch == reference.settings[base.name].batch:
        own, other = run.curves[cell.name], reference.curves[base.name]
        losses = judge_curves(losses_of(own), losses_of(other))
    tokens = base.tokens_per_second_per_gpu
    is_slower = tokens is not None and _is_slower(speed, tolerance)
    return _compared(run, cell, tokens, speed, losses, None, is_slower)


def _beside_published(
    run: RunResults, cell: Result, published: float, tolerance: float
) -> Compared:
    reason = f"is {cell.status or 'of unknown status'}" if cell.status != FINISHED else None
    if cell.emulated:
        reason = "emulated numerics have no speed"
    if reason is not None:
        return _compared(run, cell, published, None, None, reason, cell.status != FINISHED)
    speeds = speeds_of(run.curves[cell.name])
    speed = speed_up(speeds, [published] * len(speeds))
    return _compared(run, cell, published, speed, None, None, _is_slower(speed, tolerance))


def _compared(
    run: RunResults,
    cell: Result,
    reference: float | None,
    speed: SpeedUp | None,
    losses: tuple[LossVerdict, LossVerdict] | None,
    reason: str | None,
    is_slower: bool,
) -> Compared:
    return Compared(
        cell=cell.name,
        run=run.run.run,
        status=cell.status,
        tokens_per_second_per_gpu=cell.tokens_per_second_per_gpu,
        reference_tokens_per_second_per_gpu=reference,
        speed=speed,
        loss=losses[0] if losses else None,
        loss_last_tenth=losses[1] if losses else None,
        gpu_hours=cell.gpu_hours,
        cost_per_billion_tokens=cell.cost_per_billion_tokens,
        reason=reason,
        is_slower=is_slower,
    )


def _incomparable(run: RunResults, cell: Result, reference: RunResults, base: Result) -> str | None:
    """Why the two speeds say nothing about one another, None where they do."""
    for result, of in ((cell, ""), (base, f"in {reference.run.run} it ")):
        if result.status != FINISHED:
            return f"{of}is {result.status or 'of unknown status'}"
    if cell.emulated or base.emulated:
        return "emulated numerics have no speed"
    if cell.recipe != base.recipe:
        return f"recipe {cell.recipe}, and {base.recipe} in {reference.run.run}"
    devices = run.settings[cell.name].device, reference.settings[base.name].device
    if devices[0] != devices[1]:
        return f"ran on {devices[0]}, and on {devices[1]} in {reference.run.run}"
    if masks_differ(cell, base):
        return (
            f"other texts: a token attends to {cell.mean_attended_length:,.0f} tokens, and to "
            f"{base.mean_attended_length:,.0f} in {reference.run.run}"
        )
    return None


def _speed(run: RunResults, cell: Result, reference: RunResults, base: Result) -> SpeedUp | None:
    own, other = _repeated(cell), _repeated(base)
    if len(own) > 1 and len(other) > 1:
        return unpaired_speed_up(own, other)
    return speed_up(_steps(run, cell), _steps(reference, base))


def _repeated(cell: Result) -> list[float]:
    """The throughputs of the repeats that finished."""
    return [
        repeat.tokens_per_second_per_gpu
        for repeat in cell.repeats
        if repeat.status == FINISHED and repeat.tokens_per_second_per_gpu
    ]


def _steps(run: RunResults, cell: Result) -> list[float]:
    return speeds_of(run.curves[cell.name])


def _is_slower(speed: SpeedUp | None, tolerance: float) -> bool:
    return speed is None or speed.ratio < 1 - tolerance / 100


def _differences(runs: Sequence[RunResults]) -> Iterator[str]:
    """What a reader must know besides the cells' names: a line for each thing that differs."""
    for name in ("cluster", "stack", "commit"):
        yield from _difference(name, {run.run.run: getattr(run.run, name) for run in runs})
    yield from _difference("GPUs", {run.run.run: _gpus(run) for run in runs})


def _difference(name: str, values: Mapping[str, str | None]) -> Iterator[str]:
    if len(set(values.values())) > 1:
        yield f"{name}: " + ", ".join(f"{value or '-'} in {run}" for run, value in values.items())


def _gpus(run: RunResults) -> str:
    """`256 x NVIDIA B200`, of every size and kind that a cell of the run had."""
    found = {
        f"{run.settings[cell.name].world} x {(cell.active or {}).get('gpu') or 'CPU rank'}": None
        for cell in run.cells
        if cell.active
    }
    return " and ".join(found)
