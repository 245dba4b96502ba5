"""A cell's result in three parts: what was asked, what was measured, and what follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from cookbook.predict.step import StepTime
from cookbook.results.measured import Measured
from cookbook.results.verdicts import LossVerdict, SpeedUp
from cookbook.run.record import CellRecord
from cookbook.run.run import RunRecord

# Two cells have different attention masks if their mean attended lengths (how many tokens a token
# attends to) differ by more than this factor. Batches of the same texts differ by less.
SAME_MASK = 1.25


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
