"""Looks at layouts one by one: does it fit, and how fast is it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import LAYERS_KEPT, Cell
from cookbook.predict.documents import Documents
from cookbook.predict.memory import StageMemory, predict_memory, verdict
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import StepTime, predict_step

FITS, TIGHT, TOO_LARGE = "fits", "tight", "will not fit"
_BATCH, _MODE = "training.local_batch_size", "activation_checkpoint.mode"
_EVERY = "activation_checkpoint.selective_ac_option"
_BUDGET = "activation_checkpoint.memory_budget"


@dataclass(frozen=True)
class Candidate:
    """A layout that the rules allow.

    Attributes:
        memory: of the stage that needs most.
        verdict: as `check` says it: `fits`, `tight` or `will not fit`.
        step: None where it does not fit well, or its time is not modelled (`unknown` says why).
    """

    cell: Cell
    memory: StageMemory
    verdict: str
    step: StepTime | None = None
    unknown: str = ""


@dataclass
class Found:
    """What a search came to, also where it was interrupted: the candidates looked at so far.

    `larger` layouts need no less memory than one that does not fit.
    """

    candidates: list[Candidate] = field(default_factory=list)
    larger: int = 0
    interrupted: bool = False

    def ranked(self) -> list[Candidate]:
        """Those that fit, the fastest first."""
        known = [one for one in self.candidates if one.step]
        return sorted(known, key=lambda one: -_speed(one))

    def front(self) -> list[Candidate]:
        """Those than which none is both faster and smaller, the fastest first."""
        front: list[Candidate] = []
        for one in self.ranked():
            if not front or one.memory.total < front[-1].memory.total:
                front.append(one)
        return front

    def count(self, verdict: str) -> int:
        """How many have this verdict."""
        return sum(one.verdict == verdict for one in self.candidates)


def _speed(candidate: Candidate) -> float:
    return candidate.step.tokens_per_second_per_gpu if candidate.step else 0.0


def search(
    cells: Iterable[Cell],
    documents: Documents | None = None,
    on_progress: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Look at every cell; Ctrl-C ends it, and what was found is kept.

    A layout with a larger batch, or with less computed again, than one that does not fit is not
    looked at: it needs no less. It is counted.
    """
    found = Found()
    counted: dict[str, tuple[Mapping[str, Any], ...]] = {}
    too_large: dict[str, int] = {}
    try:
        for cell in cells:
            batch = cell.options[_BATCH]
            keys = [_structure(cell, mode) for mode in {_mode(cell), "full"}]
            if any(too_large.get(key, batch + 1) <= batch for key in keys):
                found.larger += 1
                continue
            candidate = evaluate(cell, documents, counted)
            if candidate.verdict == TOO_LARGE:
                too_large[_structure(cell, _mode(cell))] = batch
            found.candidates.append(candidate)
            on_progress(found)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _mode(cell: Cell) -> str:
    """How layers are recomputed; plain `full` needs least."""
    words = [cell.options[_MODE], *sorted(cell.saves)]
    if words == ["selective"]:
        words.append(f"every {cell.options[_EVERY]}")
    if words == ["memory_budget"]:
        words.append(str(cell.options[_BUDGET]))
    if kept := cell.options[LAYERS_KEPT]:
        words.append(f"keeps {kept}")
    return " ".join(words)


def _structure(cell: Cell, mode: str) -> str:
    """All that is set, but for the batch and what is computed again."""
    rest = [
        (name, value)
        for name, value in sorted(cell.options.values.items())
        if name != _BATCH and not name.startswith("activation_checkpoint.")
    ]
    return json.dumps([cell.pair, mode, rest], default=str)


def evaluate(
    cell: Cell,
    documents: Documents | None = None,
    counted: dict[str, tuple[Mapping[str, Any], ...]] | None = None,
) -> Candidate:
    """One layout; `counted` keeps what layouts share."""
    counted = {} if counted is None else counted
    key = json.dumps([cell.options[name] for name in _COUNTED], default=str)
    if key not in counted:
        counted[key] = describe_ranks(cell)
    views = counted[key]
    memory = max((predict_memory(cell, view) for view in views), key=lambda stage: stage.total)
    gpu = cell.cluster.gpu
    fits = verdict(memory.total, gpu.memory_gib, cell.options) if gpu else FITS
    if fits != FITS:
        return Candidate(cell, memory, fits)
    return _timed(cell, views, memory, documents)


def _timed(
    cell: Cell,
    views: Sequence[Mapping[str, Any]],
    memory: StageMemory,
    documents: Documents | None,
) -> Candidate:
    try:
        return Candidate(cell, memory, FITS, predict_step(cell, views, documents))
    except InputError as error:
        return Candidate(cell, memory, FITS, unknown=str(error))


# What the counted ranks of a cell depend on; all else may differ between two that share them.
_COUNTED = (
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.expert_parallel_degree",
    "parallelism.expert_tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.module_fqns_per_model_part",
    _BATCH,
    "training.global_batch_size",
    "training.seq_len",
    "model.name",
    "model.flavor",
    _MODE,
    _EVERY,
    LAYERS_KEPT,
)
