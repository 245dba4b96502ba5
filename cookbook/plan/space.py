"""The layouts of a search: a recipe's cell with every combination of some axes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cookbook.base.errors import InputError, unknown_name
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
from cookbook.config.overlay import load_ep_backend, load_overlay, load_precision
from cookbook.config.resolve import merge_config
from cookbook.config.validate import validation_errors, wrong_value
from cookbook.predict.rank import model_of
from cookbook.predict.step import refuse_unmodelled

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_BATCH = "training.local_batch_size"
_MODE, _BY = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
_BUDGET = "activation_checkpoint.memory_budget"
# Options that one mode alone reads.
_OF_MODE = {_BY: "selective", _BUDGET: "memory_budget"}


def _saving(*operators: str) -> dict[str, Any]:
    return {_MODE: "selective", _BY: "op", SAVE_LIST: list(operators)}


# Ways to recompute: options that belong together.
RECOMPUTATION: tuple[dict[str, Any], ...] = (
    {_MODE: "full", SAVE_LIST: []},
    _saving("attention", "communication"),
    _saving("attention", "communication", "grouped_mm"),
    _saving("attention", "communication", "grouped_mm", "mm"),
    {_MODE: "none", SAVE_LIST: [], LAYERS_KEPT: 0},
)
_WORKERS = "training.dataloader.num_workers"
# A process that tokenizes beside the training.
_WORKER: dict[str, Any] = {
    _WORKERS: 1,
    "training.dataloader.prefetch_factor": 2,
    "training.dataloader.persistent_workers": True,
}
OVERLAYS = ("precision", "ep_backend")
# Local batches without a pipeline; and microbatches of a pipeline, beside the recipe's own.
_BATCHES, _MICROBATCHES = (1, 2, 4, 8, 16), (32, 64, 128)
_MOST_PIPELINE_RANKS, _MOST_STAGES_PER_RANK = 16, 4
_FLASH_CAPABILITY = 9.0
# Layouts whose refusals are counted for a rejected value.
_MOST_ASKED = 500


@dataclass(frozen=True)
class Space:
    """A recipe's cell, and the values of each axis.

    Attributes:
        base: the cell as it was asked for.
        varied: values of options that the user varies, or holds.
        overlays: names of precisions, and of EP backends.
    """

    base: Cell
    varied: Mapping[str, Sequence[Any]]
    overlays: Mapping[str, Sequence[str]]

    def cells(self) -> Iterator[Cell]:
        """Return every layout that the rules allow, each once."""
        return (cell for cell in self.all_candidates() if not validation_errors(cell))

    def all_candidates(self) -> Iterator[Cell]:
        """Return refused layouts too."""
        for pair in itertools.product(*(self.overlays[kind] for kind in OVERLAYS)):
            start = self._with_overlays(*pair)
            seen = set()
            for chosen in self._combinations():
                chosen |= self._of_deepep(start, chosen)
                key = tuple(sorted((name, str(value)) for name, value in chosen.items()))
                if key in seen:
                    continue
                seen.add(key)
                settings = {
                    name: Setting(value, f"--vary {name}" if name in self.varied else "plan")
                    for name, value in chosen.items()
                }
                options = start.options.override(settings)
                yield replace(start, options=options, name=f"{start.name}-{len(seen)}")

    def with_setting(self, option: str, setting: Setting) -> Cell:
        """Return the base with one option set."""
        return replace(self.base, options=self.base.options.override({option: setting}))

    def _with_overlays(self, precision: str, ep_backend: str) -> Cell:
        base = self.base
        if (precision, ep_backend) == (base.precision.name, base.ep_backend.name):
            return base
        asked = {
            name: setting
            for name, setting in base.options.settings.items()
            if setting.origin.startswith("--")
        }
        return merge_config(
            base.recipe,
            load_precision(precision),
            load_ep_backend(ep_backend),
            base.cluster,
            nodes=base.nodes,
            layers=({}, {}, asked),
        )

    def _combinations(self) -> Iterator[dict[str, Any]]:
        model, world = model_of(self.base), self.base.world
        most = {
            "tp": min(self.base.cluster.ranks_per_node, model.heads),
            "pp": min(_MOST_PIPELINE_RANKS, model.n_layers, world),
            "ep": min(model.num_experts, world),
        }
        tried = {short: self.varied.get(DEGREES[short], _powers(most[short])) for short in most}
        for tp, pp in itertools.product(tried["tp"], tried["pp"]):
            if world % pp:
                continue
            ways = itertools.product(tried["ep"], self._schedules(pp), self._batches(pp))
            for ep, way, batch in ways:
                if world // pp % ep == 0:
                    degrees = {DEGREES["tp"]: tp, DEGREES["pp"]: pp, DEGREES["ep"]: ep}
                    yield from self._with_rest({**degrees, _BATCH: batch, **way})

    def _with_rest(self, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add recomputation, attention, the loss, and any other option that the user varies."""
        ways = list(RECOMPUTATION)
        if _MODE in self.varied:
            ways = [{_MODE: mode, **self._unused(mode)} for mode in self.varied[_MODE]]
        elif _BUDGET in self.varied:
            ways.append({_MODE: "memory_budget", **self._unused("memory_budget")})
        others = {name: values for name, values in self.varied.items() if name not in _STRUCTURE}
        others |= self._means()
        for way, values in itertools.product(ways, itertools.product(*others.values())):
            yield self._settled({**chosen, **way, **dict(zip(others, values, strict=True))})

    def _settled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Drop options that the rest leaves unread, so that no layout comes twice."""
        mode = chosen[_MODE]
        settled = {n: value for n, value in chosen.items() if _OF_MODE.get(n, mode) == mode}
        if settled[DEGREES["ep"]] == 1:
            settled.pop(DEGREES["etp"], None)
        by_layer = mode == "selective" and settled.get(_BY, self.base.options[_BY]) != "op"
        if by_layer and SAVE_LIST not in self.varied:
            settled[SAVE_LIST] = []
        return settled

    def _unused(self, mode: str) -> dict[str, Any]:
        """Return the resets of options that the rules refuse beside `mode`."""
        options: dict[str, Any] = {} if mode == "selective" else {SAVE_LIST: []}
        return options if mode in ("full", "selective") else {**options, LAYERS_KEPT: 0}

    def _of_deepep(self, start: Cell, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Score activations; between nodes let experts compute beside DeepEP's exchanges."""
        if not start.uses_deepep:
            return {}
        between_nodes = chosen[DEGREES["ep"]] > start.cluster.ranks_per_node
        chunks = max(start.options[EP_CHUNKS], 2) if between_nodes else 1
        means = {EP_CHUNKS: chunks, SCORE_ACTIVATIONS: True}
        return {name: value for name, value in means.items() if name not in self.varied}

    def _means(self) -> dict[str, list[Any]]:
        """Return options that always pay (docs/evidence/performance.md), one value each."""
        means: dict[str, list[Any]] = {}
        gpu = self.base.cluster.gpu
        has_flash = gpu is not None and gpu.compute_capability >= _FLASH_CAPABILITY
        if ATTENTION not in self.varied and has_flash:
            means[ATTENTION] = ["flash_attention_4"]
        if NUM_CHUNKS not in self.varied:
            means[NUM_CHUNKS] = [self.base.options[NUM_CHUNKS] or 8]
        if not _WORKER.keys() & self.varied.keys() and not self.base.options[_WORKERS]:
            means |= {name: [value] for name, value in _WORKER.items()}
        return means

    def _schedules(self, pp: int) -> list[dict[str, Any]]:
        if pp == 1:
            return [{}]
        if _SCHEDULE in self.varied or _PER_STAGE in self.varied:
            names = self.varied.get(_SCHEDULE, [self.base.options[_SCHEDULE]])
            sizes = self.varied.get(_PER_STAGE, [self.base.options[_PER_STAGE]])
            return [{_SCHEDULE: n, _PER_STAGE: s} for n, s in itertools.product(names, sizes)]
        layers = model_of(self.base).n_layers + sum(
            self.base.options[f"parallelism.pipeline_parallel_{end}_stage_less_layers"]
            for end in ("first", "last")
        )
        ways: list[dict[str, Any]] = [{_SCHEDULE: "1F1B", _PER_STAGE: None}]
        for per_rank in range(2, _MOST_STAGES_PER_RANK + 1, 2):
            size = math.ceil(layers / (pp * per_rank))
            if math.ceil(layers / size) == pp * per_rank:
                ways.append({_SCHEDULE: "Interleaved1F1B", _PER_STAGE: size})
        if len(ways) == 1:
            ways.append({_SCHEDULE: "Interleaved1F1B", _PER_STAGE: None})
        return ways

    def _batches(self, pp: int) -> Sequence[int]:
        if _BATCH in self.varied:
            return self.varied[_BATCH]
        if pp == 1:
            return _BATCHES
        return sorted({*_MICROBATCHES, self.base.options[_BATCH]})


_LAID_OUT = tuple(DEGREES[short] for short in ("tp", "pp", "ep"))
_STRUCTURE = (*_LAID_OUT, _SCHEDULE, _PER_STAGE, _BATCH, _MODE)


def space_of(
    base: Cell, words: Sequence[str], asked: Settings, overlays: Mapping[str, Any]
) -> Space:
    """Make the space around `base`.

    Args:
        words: `--vary` words, KEY=V1,V2: an option, `precision` or `ep_backend`.
        asked: options that `--set` holds at one value.
        overlays: the precision and the EP backend that the command line names, None for none.

    Raises:
        InputError: a key that is no axis, or a value that the option does not take.
    """
    varied: dict[str, Sequence[Any]] = {name: [s.value] for name, s in asked.items()}
    named = {kind: [name] for kind, name in overlays.items() if name is not None}
    stack = base.options.stack
    for word in words:
        key, equals, text = word.partition("=")
        place = f"--vary {key}"
        if not equals or not text:
            raise InputError(place, "has no values", "write --vary KEY=VALUE,VALUE")
        values = text.split(",")
        if key in OVERLAYS:
            named[key] = [load_overlay(key, name).name for name in values]
            continue
        if "." not in key:
            raise unknown_name("--vary", "axis", key, [*OVERLAYS, *stack.options])
        option = stack.setting(place, key)
        if key in varied:
            raise InputError(place, "has its values twice", "name it once, after --vary or --set")
        varied[key] = [option.parse(place, value) for value in values]
    for key, tried in varied.items():
        for value in tried:
            place = asked[key].origin if key in asked else f"--vary {key}"
            cell = Space(base, {}, {}).with_setting(key, Setting(value, place))
            if wrong := wrong_value(cell, key):
                raise InputError(place, wrong.reason, wrong.remedy)
    for kind, usual in (("precision", _precisions(base)), ("ep_backend", ["standard", "deepep"])):
        named.setdefault(kind, list(dict.fromkeys([getattr(base, kind).name, *usual])))
    return Space(base, varied, named)


def _precisions(base: Cell) -> list[str]:
    """Return BF16, and MXFP8 where the GPU's tensor cores have it."""
    gpu = base.cluster.gpu
    needed = load_precision("mxfp8").needs.compute_capability or 0
    return ["bf16", "mxfp8"] if gpu and gpu.compute_capability >= needed else ["bf16"]


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]


def rejected_values(space: Space, cells: Sequence[Cell]) -> list[str]:
    """Return `OPTION=VALUE: reason` for each value of `space` that none of its `cells` has.

    Values refused for themselves come first, before those refused for their neighbours.
    """
    found = [
        (option, value, *_reason(space, option, value))
        for option, values in space.varied.items()
        for value in values
        if all(cell.options[option] != value for cell in cells)
    ]
    found.sort(key=lambda one: one[2] != one[0])
    return [f"{option}={value}: {reason}" for option, value, _, reason in found]


def _reason(space: Space, option: str, value: Any) -> tuple[str, str]:
    """Return the option to change, and why."""
    place = f"--vary {option}"
    alone = space.with_setting(option, Setting(value, place))
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
    # The option's own refusal says more than its neighbours'.
    culprit, reason = max(found, key=lambda key: (key[0] == option, found[key]))
    return culprit, reason.removeprefix(f"{option}: ")
