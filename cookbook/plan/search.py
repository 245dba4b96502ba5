"""Looks at layouts one by one: does it fit, and how fast is it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import LAYERS_KEPT, Cell
from cookbook.config.options import Options
from cookbook.predict.documents import Documents
from cookbook.predict.memory import StageMemory, predict_memory, verdict
from cookbook.predict.rank import Rank, describe_ranks
from cookbook.predict.step import StepTime, predict_step

FITS, TIGHT, TOO_LARGE = "fits", "tight", "will not fit"
_BATCH = "training.local_batch_size"


@dataclass(frozen=True)
class Candidate:
    """A layout that the rules allow.

    Attributes:
        memory: of the stage that needs most.
        verdict: as in `check`: `fits`, `tight` or `will not fit`.
        step: None where it does not fit well, or its time is not modelled (`unknown` says why).
    """

    cell: Cell
    memory: StageMemory
    verdict: str
    step: StepTime | None = None
    unknown: str = ""

    @property
    def speed(self) -> float:
        """Predicted tokens/s/GPU; 0 where it is not known."""
        return self.step.tokens_per_second_per_gpu if self.step else 0.0

    def times(self, base: Candidate | None) -> float | None:
        """Return how many times as fast as `base` it is predicted to be."""
        return round(self.speed / base.speed, 2) if base and base.speed and self.speed else None


@dataclass
class Found:
    """The candidates of a search, or those until it was interrupted.

    `larger` layouts need no less memory than one that does not fit.
    """

    candidates: list[Candidate] = field(default_factory=list)
    larger: int = 0
    interrupted: bool = False

    @property
    def looked_at(self) -> int:
        """Layouts whose verdict is known."""
        return len(self.candidates) + self.larger

    def ranked(self) -> list[Candidate]:
        """Return those that fit, the fastest first."""
        known = [one for one in self.candidates if one.step]
        return sorted(known, key=lambda one: -one.speed)

    def front(self) -> list[Candidate]:
        """Return the Pareto front over speed and memory, the fastest first."""
        front: list[Candidate] = []
        for one in self.ranked():
            if not front or one.memory.total < front[-1].memory.total:
                front.append(one)
        return front

    def count(self, verdict: str) -> int:
        """Return how many have this verdict."""
        return sum(one.verdict == verdict for one in self.candidates)


def search(
    cells: Iterable[Cell],
    documents: Documents | None = None,
    on_progress: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Look at every cell; Ctrl-C ends it and keeps the candidates.

    A layout with a larger batch, or with less recomputation, than one that does not fit is counted
    without a look: it needs no less.
    """
    found, known = Found(), KnownRanks()
    too_large: dict[str, int] = {}
    try:
        for cell in cells:
            batch, mode = cell.options[_BATCH], _mode(cell)
            keys = [_structure(cell, one) for one in {mode, "full"}]
            if any(too_large.get(key, batch + 1) <= batch for key in keys):
                found.larger += 1
                continue
            candidate = evaluate(cell, documents, known)
            if candidate.verdict == TOO_LARGE:
                too_large[_structure(cell, mode)] = batch
            found.candidates.append(candidate)
            on_progress(found)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _mode(cell: Cell) -> str:
    """Return how layers are recomputed; plain `full` needs least."""
    section = "activation_checkpoint"
    words = [cell.options[f"{section}.mode"], *sorted(cell.saves)]
    if words == ["selective"]:
        words.append(f"every {cell.options[f'{section}.selective_ac_option']}")
    if words == ["memory_budget"]:
        words.append(str(cell.options[f"{section}.memory_budget"]))
    if kept := cell.options[LAYERS_KEPT]:
        words.append(f"keeps {kept}")
    return " ".join(words)


def _structure(cell: Cell, mode: str) -> str:
    """Return all settings as a key, but for the batch and recomputation."""
    rest = [
        (name, value)
        for name, value in sorted(cell.options.values.items())
        if name != _BATCH and not name.startswith("activation_checkpoint.")
    ]
    return json.dumps([cell.pair, mode, rest], default=str)


class _Recorder(Options):
    """Options that note, in order, the names that are read and their values."""

    read: dict[str, Any]

    def __init__(self, options: Options) -> None:
        super().__init__(options.stack, options.settings)
        object.__setattr__(self, "read", {})

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.setdefault(name, value)
        return value


class KnownRanks:
    """The ranks of layouts of one recipe and cluster, which differ in a few options alone.

    The values read so far decide which option `describe_ranks` reads next: a tree whose leaves are
    ranks. Layouts share those that were counted from the same values.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, ...], str | tuple[Rank, ...]] = {}

    def ranks(self, cell: Cell) -> tuple[Rank, ...]:
        """Return the ranks of `cell`, counted where no layout before had the same."""
        values: tuple[str, ...] = ()
        while isinstance(found := self._next.get(values), str):
            values += (str(cell.options[found]),)
        if found is not None:
            return found
        recorder = _Recorder(cell.options)
        ranks = describe_ranks(replace(cell, options=recorder))
        values = ()
        for name, value in recorder.read.items():
            self._next[values] = name
            values += (str(value),)
        self._next[values] = ranks
        return ranks


def evaluate(
    cell: Cell, documents: Documents | None = None, known: KnownRanks | None = None
) -> Candidate:
    """Look at one layout; `known` are ranks that layouts share."""
    ranks = (known or KnownRanks()).ranks(cell)
    memory = max((predict_memory(cell, rank) for rank in ranks), key=lambda stage: stage.total)
    gpu = cell.cluster.gpu
    fits = verdict(memory.total, gpu.memory_gib, cell.options) if gpu else FITS
    if fits != FITS:
        return Candidate(cell, memory, fits)
    try:
        return Candidate(cell, memory, FITS, predict_step(cell, ranks, documents))
    except InputError as error:
        return Candidate(cell, memory, FITS, unknown=str(error))
