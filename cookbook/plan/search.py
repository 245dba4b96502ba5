"""Predict the memory and speed of layouts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.facts import Facts
from cookbook.predict.hardware import Documents
from cookbook.predict.memory import FITS, TIGHT, TOO_LARGE, StageMemory, predict_memory, verdict
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import StepTime, predict_step


@dataclass(frozen=True)
class Candidate:
    """A valid layout, with the `memory` of the pipeline stage that needs the most.

    `step` is None if the layout does not fit, or if its time is not modelled (`unknown` says why).
    """

    cell: Cell
    memory: StageMemory
    verdict: str
    step: StepTime | None = None
    unknown: str = ""

    @property
    def speed(self) -> float:
        """Predicted tokens/s/GPU; 0 if unknown."""
        return self.step.tokens_per_second_per_gpu if self.step else 0.0

    def times(self, base: Self | None) -> float | None:
        """Return the predicted speed relative to `base`; None if either speed is unknown."""
        return round(self.speed / base.speed, 2) if base and base.speed and self.speed else None


@dataclass
class SearchResult:
    """The candidates found so far; `larger` counts layouts skipped as too large (see `search`)."""

    candidates: list[Candidate] = field(default_factory=list)
    larger: int = 0

    def ranked(self) -> list[Candidate]:
        """Return the candidates with a known speed, fastest first."""
        return sorted((one for one in self.candidates if one.step), key=lambda one: -one.speed)

    def counts(self) -> dict[str, int]:
        of = Counter(one.verdict for one in self.candidates)
        counts = {"looked_at": of.total() + self.larger, "fit": of[FITS], "tight": of[TIGHT]}
        return counts | {"too_large": of[TOO_LARGE] + self.larger}


# The options of recomputation.
_RECOMPUTATION = (
    *(Facts.ac_mode, Facts.ac_selective, Facts.ac_budget),
    *(Facts.ac_save_list, Facts.ac_layers_kept),
)


def recomputation(cell: Cell) -> str:
    """Describe recomputation: its mode or saved operators, and how many layers are exempt."""
    facts, mode = cell.facts, cell.facts.ac_mode
    if facts.budget is not None:
        mode += f" {facts.budget:g}"
    elif facts.saves:
        mode = f"saves {', '.join(sorted(facts.saves))}"
    elif mode == "selective":
        mode = f"1 layer in {facts.ac_selective}"
    kept = facts.ac_layers_kept
    return f"{mode}; keeps {kept} layers" if kept else mode


def search(cells: Iterable[Cell], documents: Documents | None = None) -> SearchResult:
    """Predict memory and speed of every cell; Ctrl-C returns the results so far.

    If a cell does not fit, do not predict those that differ from it only in options with which they
    need even more memory: count them as too large.
    """
    found, too_large = SearchResult(), dict[tuple[str, str], int]()
    try:
        for cell in cells:
            batch, mode = cell.facts.local_batch, recomputation(cell)
            settings = sorted(cell.options.values.items())
            rest = [one for one in settings if one[0] not in (Facts.local_batch, *_RECOMPUTATION)]
            structure = str([cell.pair, rest])
            if any(too_large.get((structure, m), batch + 1) <= batch for m in (mode, "full")):
                found.larger += 1
                continue
            candidate = evaluate(cell, documents)
            if candidate.verdict == TOO_LARGE:
                too_large[structure, mode] = batch
            found.candidates.append(candidate)
    except KeyboardInterrupt:
        pass
    return found


def evaluate(cell: Cell, documents: Documents | None = None) -> Candidate:
    ranks = describe_ranks(cell)
    memory = max((predict_memory(cell, rank) for rank in ranks), key=lambda stage: stage.total)
    gpu = cell.cluster.gpu
    fits = verdict(memory.total, gpu.memory_gib, cell.facts) if gpu else FITS
    if fits != FITS:
        return Candidate(cell, memory, fits)
    try:
        return Candidate(cell, memory, FITS, predict_step(cell, ranks, documents))
    except InputError as error:
        return Candidate(cell, memory, FITS, unknown=str(error))
