"""Axes that a plan has only where the user varies them: other degrees, a memory budget."""

from __future__ import annotations

import json

import pytest

from cookbook.config.cell import SAVE_LIST, Cell
from cookbook.config.options import DEGREES
from cookbook.plan.explain import walk
from cookbook.plan.report import as_mapping, degrees, recomputation
from cookbook.plan.search import FITS, TOO_LARGE, evaluate, search
from cookbook.plan.space import RECOMPUTATION, Space, rejected_values, space_of
from cookbook.predict.layer_memory import layer_bytes
from cookbook.predict.rank import describe_ranks
from cookbook.predict.shapes import shapes_of
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

TP, PP, EP = DEGREES["tp"], DEGREES["pp"], DEGREES["ep"]
BATCH = "training.local_batch_size"
MODE, BUDGET = "activation_checkpoint.mode", "activation_checkpoint.memory_budget"
EVERY = "activation_checkpoint.selective_ac_option"
DEEPEP = cell_of("deepseek_v3_16b_fast", cluster="h200-node", ep_backend="deepep")
STANDARD = cell_of("deepseek_v3_16b_fast", cluster="h200-node", ep_backend="standard")
SMALL = [f"{PP}=1", f"{TP}=1,2", f"{EP}=4", f"{BATCH}=4"]


def space(base: Cell, *words: str) -> Space:
    named = {"precision": base.precision.name, "ep_backend": base.ep_backend.name}
    return space_of(base, words, {}, named)


@pytest.mark.parametrize(
    ("short", "base", "values", "words"),
    [
        ("dp_replicate", DEEPEP, {1, 2}, "DP replicate 2"),
        ("etp", STANDARD, {1, 2}, "ETP 2"),
        ("dp_shard", DEEPEP, {4, 8}, ""),
    ],
)
def test_other_degrees_are_varied_too(short: str, base: Cell, values: set[int], words: str) -> None:
    asked = f"{DEGREES[short]}={','.join(map(str, values))}"
    cells = list(space(base, *SMALL, asked).cells())
    assert {getattr(cell.layout, short) for cell in cells} == values
    assert len({json.dumps(cell.options.values, default=str) for cell in cells}) == len(cells)
    assert all(degrees(c).endswith(words) for c in cells if getattr(c.layout, short) == 2)
    # Each is counted as it is: no two share what was counted of the ranks.
    found = search(cells).candidates
    assert [one.memory for one in found] == [evaluate(one.cell).memory for one in found]


def test_experts_are_cut_by_tp_only_where_they_are_spread() -> None:
    """TorchTitan reads the ETP degree where EP is above 1: else a layout would come twice."""
    etp = DEGREES["etp"]
    cells = list(space(STANDARD, f"{PP}=1", f"{TP}=2", f"{EP}=1,2", f"{etp}=1,2").cells())
    assert {(c.layout.ep, c.layout.etp) for c in cells} == {(1, 1), (2, 1), (2, 2)}


def test_programs_and_walks_get_those_degrees_too() -> None:
    two = with_options(DEEPEP, {DEGREES["dp_replicate"]: 2, EP: 4})
    assert as_mapping(evaluate(two))["data_parallel_replicate_degree"] == 2
    one = with_options(DEEPEP, {EP: 4})
    assert as_mapping(evaluate(one))["expert_tensor_parallel_degree"] == 1
    assert [stop.changed for stop in walk(one, two).stops] == ["from", "data parallelism"]


def test_what_a_rule_refuses_is_told_by_its_own_reason() -> None:
    asked = space(DEEPEP, f"{PP}=1", f"{TP}=2", f"{EP}=4", f"{DEGREES['etp']}=1,2")
    (line,) = rejected_values(asked, list(asked.cells()))
    assert line == f"{DEGREES['etp']}=2: DeepEP needs 1, found 2; set it to 1"
    all_used = space(DEEPEP, *SMALL)
    assert rejected_values(all_used, list(all_used.cells())) == []


def test_budgets_are_layouts_of_their_own() -> None:
    """A large budget that does not fit says nothing of a small one."""
    words = [f"{MODE}=memory_budget", f"{BUDGET}=1,0.5,0", f"{PP}=1", f"{EP}=8", f"{TP}=1"]
    cells = list(space(DEEPEP, *words, f"{BATCH}=2,4,8").cells())
    assert len(cells) == 9
    found = search(cells)
    assert {one.cell.options[BUDGET] for one in found.ranked()} >= {0, 0.5}
    looked_at = {one.cell.name for one in found.candidates}
    skipped = [cell for cell in cells if cell.name not in looked_at]
    assert {evaluate(cell).verdict for cell in skipped} <= {TOO_LARGE}
    told = {recomputation(one.cell) for one in found.candidates}
    assert told == {"memory_budget 1", "memory_budget 0.5", "memory_budget 0"}


def test_a_budget_that_is_varied_brings_its_mode_and_no_other_reads_it() -> None:
    cells = list(space(DEEPEP, *SMALL, f"{BUDGET}=0.3,0.6").cells())
    modes = [cell.options[MODE] for cell in cells]
    # At TP 1 and 2 each.
    assert modes.count("memory_budget") == 4
    assert len(cells) == 2 * (2 + len(RECOMPUTATION))
    every = list(space(DEEPEP, *SMALL, f"{EVERY}=2").cells())
    of_layers = [cell for cell in every if cell.options[MODE] == "selective"]
    assert {(c.options[EVERY], *c.options[SAVE_LIST]) for c in of_layers} == {("2",)}
    assert {recomputation(cell) for cell in of_layers} == {"1 layer in 2"}
    assert len(every) == 2 * 3


def test_a_budget_of_nothing_keeps_what_goes_between_compiled_pieces() -> None:
    """So it needs more memory than `full`, and computes less again."""
    for base in (on_gpus(8), on_gpus(8, ep_backend="deepep")):
        none, full = (
            evaluate(with_options(base, options))
            for options in ({MODE: "memory_budget", BUDGET: 0.0}, {MODE: "full"})
        )
        assert none.verdict == full.verdict == FITS
        assert none.memory.terms["activations"] > full.memory.terms["activations"]
        assert none.step and full.step
        assert none.step.recompute_ms < full.step.recompute_ms
    shapes = shapes_of(base, describe_ranks(base)[0])
    dense, routed = layer_bytes(shapes, False), layer_bytes(shapes, True)
    assert dense.between == 0
    # The norm's output and the experts' rows; the experts' own products can be computed again.
    rows = shapes.act * (shapes.tokens + shapes.rows) * shapes.dim
    assert (
        rows < routed.between < routed.saved - 2 * shapes.act * shapes.rows * shapes.expert_hidden
    )
