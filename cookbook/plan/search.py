"""The search over layouts that result from varying the options of a recipe's cell.

A layout's memory and speed are predicted, and nothing is run.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cookbook.base.errors import InputError, named_at
from cookbook.config.cell import Cell
from cookbook.config.facts import EXCHANGES, Facts
from cookbook.config.options import Setting, Settings
from cookbook.config.recipe import Overlay, load_ep_backend, load_precision
from cookbook.config.resolve import merge_config
from cookbook.config.validate import validation_errors, wrong_value
from cookbook.predict.hardware import Documents, Hardware
from cookbook.predict.memory import FITS, TIGHT, TOO_LARGE, StageMemory, predict_memory, verdict
from cookbook.predict.rank import describe_ranks, model_of
from cookbook.predict.step import StepTime, predict_step, refuse_unmodelled

_STRUCTURE = (
    *(Facts.tp, Facts.pp, Facts.ep, Facts.schedule, Facts.layers_per_stage, Facts.local_batch),
    Facts.ac_mode,
)
# Options that only one recomputation mode reads, each mapped to that mode.
_OF_MODE = {Facts.ac_selective: "selective", Facts.ac_budget: "memory_budget"}


def _saving(*operators: str) -> dict[str, Any]:
    chosen = {Facts.ac_selective: "op", Facts.ac_save_list: list(operators)}
    return {Facts.ac_mode: "selective", **chosen}


# For each recomputation mode: values that turn off the options of other modes.
_RESETS: dict[str, dict[str, Any]] = {
    "full": {Facts.ac_save_list: []},
    "none": {Facts.ac_save_list: [], Facts.ac_layers_kept: 0},
    "memory_budget": {Facts.ac_save_list: [], Facts.ac_layers_kept: 0},
}
RECOMPUTATION: tuple[dict[str, Any], ...] = (
    {Facts.ac_mode: "full", **_RESETS["full"]},
    _saving("attention", "communication"),
    _saving("attention", "communication", "grouped_mm"),
    _saving("attention", "communication", "grouped_mm", "mm"),
    {Facts.ac_mode: "none", **_RESETS["none"]},
)
# Start one data-loader process, which tokenizes while the GPU trains.
_WORKER: dict[str, Any] = {
    Facts.data_workers: 1,
    Facts.data_prefetch: 2,
    Facts.data_workers_stay: True,
}
# Local batch sizes to try: without pipelines, and with them. The cell's own size is always tried.
_BATCHES, _MICROBATCHES = (1, 2, 4, 8, 16), (32, 64, 128)
_MOST_PIPELINE_RANKS, _MOST_STAGES_PER_RANK = 16, 4
# How many layouts to check, at most, to explain why a requested value is never valid.
_MOST_ASKED = 500


@dataclass(frozen=True)
class Space:
    """The requested cell, with the option values, precisions and EP backends to try."""

    base: Cell
    varied: Mapping[str, Sequence[Any]]
    overlays: Mapping[str, Sequence[Overlay]]

    def cells(self) -> Iterator[Cell]:
        """Return every valid layout once."""
        return (cell for cell in self.all_candidates() if not validation_errors(cell))

    def all_candidates(self) -> Iterator[Cell]:
        """Yield every layout once, including invalid ones."""
        base = self.base
        origins = {name: f"--vary {name}" for name in self.varied}
        given = base.options.settings.items()
        asked = {name: one for name, one in given if one.origin.startswith("--")}
        for pair in itertools.product(self.overlays["precision"], self.overlays["ep_backend"]):
            start, seen = base, set[str]()
            if pair != (base.precision, base.ep_backend):
                start = merge_config(base.recipe, *pair, base.cluster, nodes=base.nodes)
                start = _changed(start, asked)
            for chosen in self._combinations(start):
                if (key := str(sorted(chosen.items()))) not in seen:
                    seen.add(key)
                    settings = {n: Setting(v, origins.get(n, "plan")) for n, v in chosen.items()}
                    yield replace(_changed(start, settings), name=f"{start.name}-{len(seen)}")

    def _combinations(self, start: Cell) -> Iterator[dict[str, Any]]:
        cluster, model, world = self.base.cluster, model_of(self.base), self.base.world
        largest = {
            Facts.tp: min(cluster.ranks_per_node, model.heads),
            Facts.pp: min(_MOST_PIPELINE_RANKS, model.n_layers, world),
            Facts.ep: min(model.num_experts, world),
        }
        powers = {n: [1 << bit for bit in range(most.bit_length())] for n, most in largest.items()}
        recomputations = [*RECOMPUTATION]
        if Facts.ac_mode in self.varied:
            modes = self.varied[Facts.ac_mode]
            recomputations = [{Facts.ac_mode: mode, **_RESETS.get(mode, {})} for mode in modes]
        elif Facts.ac_budget in self.varied:
            recomputations.append({Facts.ac_mode: "memory_budget", **_RESETS["memory_budget"]})
        others = [self._axis(name) for name in self.varied if name not in _STRUCTURE]
        for degrees in _combined(self._axis(name, usual) for name, usual in powers.items()):
            pp, ep = degrees[Facts.pp], degrees[Facts.ep]
            if world % pp or world // pp % ep:
                continue
            fixed = self._means(start, ep) | degrees
            usual = _BATCHES if pp == 1 else _MICROBATCHES
            batches = sorted({*usual, self.base.facts.local_batch})
            axes = [fixed], self._schedules(pp), self._axis(Facts.local_batch, batches)
            yield from map(self._settled, _combined([*axes, recomputations, *others]))

    def _axis(self, name: str, usual: Sequence[Any] = ()) -> list[dict[str, Any]]:
        return [{name: value} for value in self.varied.get(name, usual)]

    def _settled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        mode = chosen[Facts.ac_mode]
        settled = {n: value for n, value in chosen.items() if _OF_MODE.get(n, mode) == mode}
        if settled[Facts.ep] == 1:
            settled.pop(Facts.etp, None)
        selective = settled.get(Facts.ac_selective, self.base.facts.ac_selective)
        by_layer = mode == "selective" and selective != "op"
        if by_layer and Facts.ac_save_list not in self.varied:
            settled[Facts.ac_save_list] = []
        return settled

    def _means(self, start: Cell, ep: int) -> dict[str, Any]:
        """Return settings that save time or memory in any layout (docs/evidence/performance.md)."""
        cluster, facts = self.base.cluster, self.base.facts
        means: dict[str, Any] = {Facts.loss_chunks: facts.loss_chunks or 8}
        if cluster.gpu is not None and cluster.gpu.compute_capability >= 9.0:
            means[Facts.attention] = "flash_attention_4"
        if start.facts.exchange.has_own_layer:
            # If EP spans nodes, overlap the experts' compute with dispatch and combine.
            between_nodes = ep > cluster.ranks_per_node
            means[Facts.ep_chunks] = max(start.facts.ep_chunks, 2) if between_nodes else 1
            means[Facts.score_activations] = True
        if not _WORKER.keys() & self.varied.keys() and not facts.data_workers:
            means |= _WORKER
        return means

    def _schedules(self, pp: int) -> list[dict[str, Any]]:
        facts = self.base.facts
        if pp == 1:
            return [{}]
        if Facts.schedule in self.varied or Facts.layers_per_stage in self.varied:
            own = {Facts.schedule: facts.schedule, Facts.layers_per_stage: facts.layers_per_stage}
            return [*_combined(self._axis(name, [value]) for name, value in own.items())]
        layers = model_of(self.base).n_layers + sum(facts.less_layers)
        sizes: list[int | None] = [
            size
            for stages in range(2 * pp, _MOST_STAGES_PER_RANK * pp + 1, 2 * pp)
            if math.ceil(layers / (size := math.ceil(layers / stages))) == stages
        ]
        return [
            {Facts.schedule: "1F1B", Facts.layers_per_stage: None},
            *(
                {Facts.schedule: "Interleaved1F1B", Facts.layers_per_stage: size}
                for size in sizes or [None]
            ),
        ]


def _combined(axes: Iterable[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    return (functools.reduce(operator.or_, points) for points in itertools.product(*axes))


def _changed(cell: Cell, settings: Settings) -> Cell:
    return replace(cell, options=cell.options.override(settings))


def space_of(
    base: Cell, words: Sequence[str], asked: Settings, overlays: Mapping[str, Any]
) -> Space:
    """Return the variants of `base` to try; raise InputError for an unknown key or invalid value.

    `words`: `--vary` arguments, KEY=V1,V2. KEY is `precision`, `ep_backend` or an option's name.
    `asked`: options fixed by `--set`. `overlays`: the precision and EP backend to fix, or None.
    """
    varied: dict[str, Sequence[Any]] = {name: [s.value] for name, s in asked.items()}
    gpu, stack = base.cluster.gpu, base.options.stack
    load: dict[str, Callable[[str], Overlay]] = {
        "precision": load_precision,
        "ep_backend": load_ep_backend,
    }
    named = {kind: [load[kind](name)] for kind, name in overlays.items() if name is not None}
    for word in words:
        key, equals, text = word.partition("=")
        place = f"--vary {key}"
        if not equals or not text:
            raise InputError(place, "has no values", "write --vary KEY=VALUE,VALUE")
        values = text.split(",")
        if key in load:
            with named_at(place):
                named[key] = [*{one.name: one for one in map(load[key], values)}.values()]
            continue
        option = stack.setting(place, key)
        if key in varied:
            raise InputError(place, "has its values twice", "name it once, after --vary or --set")
        varied[key] = [option.parse(place, value) for value in values]
    for key, tried in varied.items():
        for value in tried:
            place = asked[key].origin if key in asked else f"--vary {key}"
            if wrong := wrong_value(_changed(base, {key: Setting(value, place)}), key):
                raise InputError(place, *wrong)
    backends = [one.ep_backend for one in EXCHANGES.values() if not one.is_quantized]
    usual = {"precision": ["bf16"], "ep_backend": backends}
    if gpu and gpu.compute_capability >= load_precision("mxfp8").needs.compute_capability:
        usual["precision"].append("mxfp8")
    for kind, names in usual.items():
        own = getattr(base, kind)
        named.setdefault(kind, [own, *(load[kind](name) for name in names if name != own.name)])
    return Space(base, varied, named)


def rejected_values(space: Space, cells: Sequence[Cell]) -> list[str]:
    """Return `OPTION=VALUE: reason` for each value in `space` that no valid cell has."""
    rejected = []
    for option, values in space.varied.items():
        for value in values:
            if all(cell.options[option] != value for cell in cells):
                culprit, reason = _reason(space, option, value)
                rejected.append((culprit != option, f"{option}={value}: {reason}"))
    return [line for _, line in sorted(rejected, key=lambda one: one[0])]


def _reason(space: Space, option: str, value: Any) -> tuple[str, str]:
    place = f"--vary {option}"
    alone = _changed(space.base, {option: Setting(value, place)})
    try:
        refuse_unmodelled(alone)
    except InputError as error:
        if error.place == place:
            return option, f"{error.found}; {error.remedy}"
    tried = replace(space, varied={**space.varied, option: [value]}).all_candidates()
    found = Counter(
        (one.option, str(one))
        for cell in itertools.islice(tried, _MOST_ASKED)
        for one in validation_errors(cell)
    ) or Counter((one.option, str(one)) for one in validation_errors(alone))
    if not found:
        return "", "no layout has room for it"
    culprit, reason = max(found, key=lambda key: (key[0] == option, found[key]))
    return culprit, reason.removeprefix(f"{option}: ")


@dataclass(frozen=True)
class Candidate:
    """A valid layout, with the `memory` of the pipeline stage that needs the most.

    `step` is None if the layout does not fit, or if its time is not modelled (`unknown` says why).
    `weights` is the GPU that it is timed on, if that is not the cluster's.
    """

    cell: Cell
    memory: StageMemory
    verdict: str
    step: StepTime | None = None
    unknown: str = ""
    weights: str = ""

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


def search(
    cells: Iterable[Cell], documents: Documents | None = None, weights: Hardware | None = None
) -> SearchResult:
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
            candidate = evaluate(cell, documents, weights)
            if candidate.verdict == TOO_LARGE:
                too_large[structure, mode] = batch
            found.candidates.append(candidate)
    except KeyboardInterrupt:
        pass
    return found


def evaluate(
    cell: Cell, documents: Documents | None = None, weights: Hardware | None = None
) -> Candidate:
    ranks = describe_ranks(cell)
    memory = max((predict_memory(cell, rank) for rank in ranks), key=lambda stage: stage.total)
    gpu = cell.cluster.gpu
    fits = verdict(memory.total, gpu.memory_gib, cell.facts) if gpu else FITS
    if fits != FITS:
        return Candidate(cell, memory, fits)
    try:
        step = predict_step(cell, ranks, documents, weights)
        return Candidate(cell, memory, FITS, step, weights=weights.name if weights else "")
    except InputError as error:
        return Candidate(cell, memory, FITS, unknown=str(error))
