"""The search space: the layouts that result from varying the options of a recipe's cell."""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError, named_at
from cookbook.config.cell import (
    ATTENTION,
    EP_CHUNKS,
    LAYERS_KEPT,
    NUM_CHUNKS,
    SAVE_LIST,
    SCORE_ACTIVATIONS,
    Cell,
)
from cookbook.config.options import DEGREES, Setting, Settings
from cookbook.config.recipe import Overlay, load_ep_backend, load_precision
from cookbook.config.resolve import merge_config
from cookbook.config.validate import validation_errors, wrong_value
from cookbook.config.validate.layout import less_layers
from cookbook.plan.search import BATCH
from cookbook.predict.rank import model_of
from cookbook.predict.step import refuse_unmodelled

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MODE, _BY = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
_BUDGET = "activation_checkpoint.memory_budget"
_STRUCTURE = (DEGREES["tp"], DEGREES["pp"], DEGREES["ep"], _SCHEDULE, _PER_STAGE, BATCH, _MODE)
# Options that only one recomputation mode reads, each mapped to that mode.
_OF_MODE = {_BY: "selective", _BUDGET: "memory_budget"}


def _saving(*operators: str) -> dict[str, Any]:
    return {_MODE: "selective", _BY: "op", SAVE_LIST: list(operators)}


# For each recomputation mode: values that turn off the options of other modes.
_RESETS: dict[str, dict[str, Any]] = {
    "full": {SAVE_LIST: []},
    "none": {SAVE_LIST: [], LAYERS_KEPT: 0},
    "memory_budget": {SAVE_LIST: [], LAYERS_KEPT: 0},
}
RECOMPUTATION: tuple[dict[str, Any], ...] = (
    {_MODE: "full", **_RESETS["full"]},
    _saving("attention", "communication"),
    _saving("attention", "communication", "grouped_mm"),
    _saving("attention", "communication", "grouped_mm", "mm"),
    {_MODE: "none", **_RESETS["none"]},
)
_WORKERS = "training.dataloader.num_workers"
# Start one data-loader process, which tokenizes while the GPU trains.
_WORKER: dict[str, Any] = {
    _WORKERS: 1,
    "training.dataloader.prefetch_factor": 2,
    "training.dataloader.persistent_workers": True,
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
            DEGREES["tp"]: min(cluster.ranks_per_node, model.heads),
            DEGREES["pp"]: min(_MOST_PIPELINE_RANKS, model.n_layers, world),
            DEGREES["ep"]: min(model.num_experts, world),
        }
        powers = {n: [1 << bit for bit in range(most.bit_length())] for n, most in largest.items()}
        recomputations = [*RECOMPUTATION]
        if _MODE in self.varied:
            recomputations = [{_MODE: mode, **_RESETS.get(mode, {})} for mode in self.varied[_MODE]]
        elif _BUDGET in self.varied:
            recomputations.append({_MODE: "memory_budget", **_RESETS["memory_budget"]})
        others = [self._axis(name) for name in self.varied if name not in _STRUCTURE]
        for degrees in _combined(self._axis(name, usual) for name, usual in powers.items()):
            pp, ep = degrees[DEGREES["pp"]], degrees[DEGREES["ep"]]
            if world % pp or world // pp % ep:
                continue
            fixed = self._means(start, ep) | degrees
            usual = _BATCHES if pp == 1 else _MICROBATCHES
            batches = sorted({*usual, self.base.options[BATCH]})
            axes = [fixed], self._schedules(pp), self._axis(BATCH, batches), recomputations, *others
            yield from map(self._settled, _combined(axes))

    def _axis(self, name: str, usual: Sequence[Any] = ()) -> list[dict[str, Any]]:
        return [{name: value} for value in self.varied.get(name, usual)]

    def _settled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        mode = chosen[_MODE]
        settled = {n: value for n, value in chosen.items() if _OF_MODE.get(n, mode) == mode}
        if settled[DEGREES["ep"]] == 1:
            settled.pop(DEGREES["etp"], None)
        by_layer = mode == "selective" and settled.get(_BY, self.base.options[_BY]) != "op"
        if by_layer and SAVE_LIST not in self.varied:
            settled[SAVE_LIST] = []
        return settled

    def _means(self, start: Cell, ep: int) -> dict[str, Any]:
        """Return settings that save time or memory in any layout (docs/evidence/performance.md)."""
        cluster, options = self.base.cluster, self.base.options
        means: dict[str, Any] = {NUM_CHUNKS: options[NUM_CHUNKS] or 8}
        if cluster.gpu is not None and cluster.gpu.compute_capability >= 9.0:
            means[ATTENTION] = "flash_attention_4"
        if start.exchange.has_own_layer:
            # If EP spans nodes, overlap the experts' compute with dispatch and combine.
            between_nodes = ep > cluster.ranks_per_node
            means[EP_CHUNKS] = max(start.options[EP_CHUNKS], 2) if between_nodes else 1
            means[SCORE_ACTIVATIONS] = True
        if not _WORKER.keys() & self.varied.keys() and not options[_WORKERS]:
            means |= _WORKER
        return means

    def _schedules(self, pp: int) -> list[dict[str, Any]]:
        options = self.base.options
        if pp == 1:
            return [{}]
        if _SCHEDULE in self.varied or _PER_STAGE in self.varied:
            return [*_combined(self._axis(n, [options[n]]) for n in (_SCHEDULE, _PER_STAGE))]
        layers = model_of(self.base).n_layers + sum(less_layers(options))
        sizes: list[int | None] = [
            size
            for stages in range(2 * pp, _MOST_STAGES_PER_RANK * pp + 1, 2 * pp)
            if math.ceil(layers / (size := math.ceil(layers / stages))) == stages
        ]
        return [
            {_SCHEDULE: "1F1B", _PER_STAGE: None},
            *({_SCHEDULE: "Interleaved1F1B", _PER_STAGE: size} for size in sizes or [None]),
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
        "precision": functools.partial(load_precision, gpu=gpu),
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
    usual = {"precision": ["bf16"], "ep_backend": ["standard", "deepep"]}
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
