"""The search over layouts: which it tries, skips, keeps and rejects."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cookbook.config.cell import Cell
from cookbook.config.dialect.names import DEGREES
from cookbook.config.facts import Facts
from cookbook.config.options import Setting
from cookbook.config.validate import validation_errors
from cookbook.plan.render import degrees
from cookbook.plan.search import (
    RECOMPUTATION,
    SearchResult,
    evaluate,
    recomputation,
    rejected_values,
    search,
    space_of,
)
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

TP, PP, EP, ETP = (DEGREES[short] for short in ("tp", "pp", "ep", "etp"))
BATCH, SAVE_LIST = Facts.local_batch, Facts.ac_save_list
MODE, BUDGET = "activation_checkpoint.mode", "activation_checkpoint.memory_budget"
EVERY, KEPT = "activation_checkpoint.selective_ac_option", "activation_checkpoint.num_layers_kept"
CHUNKS, ATTENTION = "loss.num_chunks", "model.attention"
PARTS, SCORED = "deepep.num_chunks", "deepep.score_activations"
SCHEDULE, PER_STAGE = (
    f"parallelism.pipeline_parallel_{n}" for n in ("schedule", "layers_per_stage")
)
BASE = cell_of("deepseek_v3_16b_fast", cluster="h200-node")
DEEPEP = cell_of("deepseek_v3_16b_fast", cluster="h200-node", ep_backend="deepep")
STANDARD = cell_of("deepseek_v3_16b_fast", cluster="h200-node", ep_backend="standard")
LARGE = cell_of("deepseek_v3_671b_fast")
FOUR = on_gpus(4)
SMALL = [f"{PP}=1", f"{TP}=1,2", f"{EP}=4", f"{BATCH}=4"]
DEEPEP_ONLY = {"precision": "bf16", "ep_backend": "deepep"}
ANY: dict[str, str | None] = {"precision": None, "ep_backend": None}


def cells(
    base: Cell,
    *words: str,
    held: Mapping[str, Any] | None = None,
    named: Mapping[str, str | None] | None = None,
) -> list[Cell]:
    settings = {name: Setting(value, "--set") for name, value in (held or {}).items()}
    own = {"precision": base.precision.name, "ep_backend": base.ep_backend.name}
    return list(space_of(base, words, settings, own if named is None else named).cells())


@pytest.fixture(scope="module")
def tried() -> list[Cell]:
    return cells(BASE, f"{PP}=1", named=DEEPEP_ONLY)


@pytest.fixture(scope="module")
def found(tried: list[Cell]) -> SearchResult:
    return search(tried)


def test_all_that_the_rules_allow_is_looked_at_once(tried: list[Cell], found: SearchResult) -> None:
    check_skipped(tried, found)
    assert len(found.candidates) + found.larger == len(tried) > 80
    assert len({json.dumps(cell.options.values, default=str) for cell in tried}) == len(tried)
    assert not [cell for cell in tried if validation_errors(cell)]
    seen = {(cell.layout.tp, cell.layout.ep, cell.options[BATCH]) for cell in tried}
    assert {(1, 8, 1), (4, 2, 16), (2, 4, 4)} <= seen
    # EP with TP over the whole node leaves FSDP nothing, which TorchTitan refuses.
    assert (8, 8, 1) not in seen
    assert len({recomputation(cell) for cell in tried}) == len(RECOMPUTATION)


def check_skipped(tried: list[Cell], found: SearchResult) -> None:
    """Skipped layouts do not fit."""
    looked_at = {one.cell.name for one in found.candidates}
    skipped = [cell for cell in tried if cell.name not in looked_at]
    assert len(skipped) == found.larger > 0
    assert {evaluate(cell).verdict for cell in skipped} == {"will not fit"}


@pytest.mark.parametrize(
    ("option", "values", "mode"),
    # The values that need most come first.
    [(KEPT, [20, 6, 2, 0], "full"), (EVERY, ["20", "2", "1"], "selective")],
)
def test_kept_layers_count_in_a_search(option: str, values: list[Any], mode: str) -> None:
    words = [f"{PP}=1", f"{option}={','.join(map(str, values))}", f"{MODE}={mode}"]
    held: dict[str, Any] = {EP: 8} | ({SAVE_LIST: []} if option == EVERY else {})
    every = cells(BASE, *words, f"{BATCH}=4,8,16", f"{TP}=1", held=held, named=DEEPEP_ONLY)
    together = search(every)
    assert {cell.options[option] for cell in every} == set(values)
    check_skipped(every, together)
    assert len({one.speed for one in together.ranked()}) == len(together.ranked()) > 2


def test_an_interrupted_search_keeps_its_candidates(tried: list[Cell]) -> None:
    def interrupted() -> Iterator[Cell]:
        yield from tried[:7]
        raise KeyboardInterrupt

    found = search(interrupted())
    assert len(found.candidates) + found.larger == 7


INTERLEAVED = [f"{TP}=1", f"{EP}=1", f"{BATCH}=64"]
BETWEEN = [f"{EP}=8,16", f"{TP}=1", f"{PP}=1", f"{BATCH}=2"]
MX: dict[str, str | None] = {"precision": "mxfp8", "ep_backend": None}


@pytest.mark.parametrize(
    ("base", "words", "named", "options", "values"),
    [
        (FOUR, [f"{TP}=2", f"{EP}=4", f"{BATCH}=3,5"], None, (TP, BATCH), {(2, 3), (2, 5)}),
        (DEEPEP, [*SMALL, f"{MODE}=full,none"], None, (MODE,), {("full",), ("none",)}),
        # Options that always pay, unless the user varies them.
        (FOUR, SMALL, None, (CHUNKS, ATTENTION), {(8, "flash_attention_4")}),
        (FOUR, [*SMALL, f"{CHUNKS}=0,4"], None, (CHUNKS,), {(0,), (4,)}),
        # The recipe's own batch stands beside the usual ones.
        (with_options(FOUR, {BATCH: 24}), [f"{TP}=1", f"{EP}=2", f"{PP}=1,2"], None, (PP, BATCH), {
            *((1, batch) for batch in (1, 2, 4, 8, 16, 24)),
            *((2, batch) for batch in (24, 32, 64, 128)),
        }),
        # 27 layers and both ends: 4 stages of 8, 8 of 4; on 8 ranks neither 16 nor 32 come out.
        (
            on_gpus(8),
            [*INTERLEAVED, f"{PP}=2"],
            None,
            (SCHEDULE, PER_STAGE),
            {("1F1B", None), ("Interleaved1F1B", 8), ("Interleaved1F1B", 4)},
        ),
        # TorchTitan reads the ETP degree where EP is above 1: else a layout would come twice.
        (
            STANDARD,
            [f"{PP}=1", f"{TP}=2", f"{EP}=1,2", f"{ETP}=1,2"],
            None,
            (EP, ETP),
            {(1, 1), (2, 1), (2, 2)},
        ),
        # Between nodes experts compute beside the exchanges.
        (cell_of("deepseek_v3_671b"), BETWEEN, MX, (EP, PARTS, SCORED), {
            (8, 1, False), (16, 1, False), (8, 1, True), (16, 2, True)
        }),
        (LARGE, [*BETWEEN, f"{SCORED}=false", f"{PARTS}=4"], DEEPEP_ONLY, (PARTS, SCORED), {
            (4, False)
        }),
    ],
)  # fmt: skip
def test_axes_have_their_values(
    base: Cell,
    words: list[str],
    named: dict[str, str | None] | None,
    options: tuple[str, ...],
    values: set[tuple[Any, ...]],
) -> None:
    found = cells(base, *words, named=named)
    assert {tuple(cell.options[name] for name in options) for cell in found} == values


@pytest.mark.parametrize(
    ("base", "words", "pairs"),
    [
        (LARGE, [f"{EP}=64"], {"bf16+standard", "bf16+deepep", "mxfp8+standard", "mxfp8+deepep"}),
        (LARGE, ["precision=mxfp8_wgrad_hp", "ep_backend=deepep"], {"mxfp8_wgrad_hp+deepep"}),
        # An H200 has no MXFP8.
        (BASE, [f"{BATCH}=4"], {"bf16+standard", "bf16+deepep"}),
        (BASE, ["precision=bf16,float8", "ep_backend=deepep"], {"bf16+deepep", "float8+deepep"}),
    ],
)
def test_precisions_and_ep_backends_are_axes(base: Cell, words: list[str], pairs: set[str]) -> None:
    assert {cell.pair for cell in cells(base, f"{PP}=1", f"{TP}=1", *words, named=ANY)} == pairs


@pytest.mark.parametrize(
    ("short", "base", "values", "words"),
    [
        ("dp_replicate", DEEPEP, {1, 2}, "DP replicate 2"),
        ("etp", STANDARD, {1, 2}, "ETP 2"),
        ("dp_shard", DEEPEP, {4, 8}, ""),
    ],
)
def test_other_degrees_are_varied_too(short: str, base: Cell, values: set[int], words: str) -> None:
    found = cells(base, *SMALL, f"{DEGREES[short]}={','.join(map(str, values))}")
    assert {getattr(cell.layout, short) for cell in found} == values
    assert len({json.dumps(cell.options.values, default=str) for cell in found}) == len(found)
    assert all(degrees(c).endswith(words) for c in found if getattr(c.layout, short) == 2)


def test_a_refused_value_is_rejected_with_its_own_reason() -> None:
    for words, lines in (
        ([f"{TP}=2", f"{ETP}=1,2"], [f"{ETP}=2: deepep needs 1, found 2; set it to 1"]),
        ([f"{TP}=1,2"], []),
    ):
        asked = space_of(DEEPEP, [f"{PP}=1", f"{EP}=4", *words], {}, DEEPEP_ONLY)
        assert rejected_values(asked, list(asked.cells())) == lines


def test_memory_budgets_are_layouts_of_their_own() -> None:
    """A large budget that does not fit says nothing of a small one."""
    words = [f"{MODE}=memory_budget", f"{BUDGET}=1,0.5,0", f"{PP}=1", f"{EP}=8", f"{TP}=1"]
    every = cells(DEEPEP, *words, f"{BATCH}=2,4,8")
    assert len(every) == 9
    found = search(every)
    assert {one.cell.options[BUDGET] for one in found.ranked()} >= {0, 0.5}
    named = {"memory_budget 1", "memory_budget 0.5", "memory_budget 0"}
    assert {recomputation(one.cell) for one in found.candidates} == named
