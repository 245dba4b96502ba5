"""What check predicts where logits are cut into chunks, and where operators' outputs are saved."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cookbook.check.check import CellCheck, check_cells
from cookbook.config.cell import Cell
from cookbook.predict.layer_memory import RankLayers, layer_bytes
from cookbook.predict.shapes import shapes_of
from tests.check_cells import cell_of, h200

pytestmark = pytest.mark.titan

GIB = 2**30
TOKENS, DIM, WORDS = 4 * 8192, 2048, 102400
# 26 of the 16B's 27 layers have experts: 6 rows of 2048 a token, whose hidden size is 1408.
ROWS, HIDDEN, MOE_LAYERS = TOKENS * 6, 1408, 26

BALANCED = {
    "parallelism.expert_parallel_degree": 4,
    "training.local_batch_size": 4,
    "debug.moe_force_load_balance": True,
}
CHUNKED = {"loss.num_chunks": 8}
SELECTIVE = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
FULL = {"activation_checkpoint.mode": "full"}
EVERY_SECOND = {"activation_checkpoint.selective_ac_option": "2"}


def saving(*names: str) -> dict[str, Any]:
    return SELECTIVE | {"activation_checkpoint.op_sac_save_list": list(names)}


SCORED = {"deepep.score_activations": True}
PP2 = {"parallelism.pipeline_parallel_degree": 2, "parallelism.expert_parallel_degree": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": CHUNKED,
    "chunked tp 2": CHUNKED | {"parallelism.tensor_parallel_degree": 2},
    "chunked eager": CHUNKED | {"compile.components": ["model"]},
    "whole pp 2": PP2,
    "chunked pp 2": PP2 | CHUNKED,
    "nothing saved": saving("attention"),
    "sent rows saved": saving("attention", "communication"),
    "all saved": saving("attention", "communication", "grouped_mm"),
    "nothing saved, scored": saving("attention") | SCORED,
    "all saved, scored": saving("attention", "communication", "grouped_mm") | SCORED,
}


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellCheck]:
    """Every cell of this module, built by one subprocess."""
    node = h200(tmp_path_factory.mktemp("cluster"))
    cells: dict[str, Cell] = {}
    for name, options in OPTIONS.items():
        cell = cell_of("deepseek_v3_16b", BALANCED | options, ep_backend="deepep", cluster=node)
        cells[name] = dataclasses.replace(cell, name=name)
    return dict(zip(cells, check_cells(list(cells.values())), strict=True))


def term(check: CellCheck, name: str) -> float:
    return max(stage.terms.get(name, 0.0) for stage in check.stages)


def test_logits_of_a_chunk_and_gradients_in_fp32(checks: dict[str, CellCheck]) -> None:
    from cookbook.predict.memory import _chunked_loss

    def logits(name: str) -> float:
        check = checks[name]
        shapes = shapes_of(check.cell, check.views[-1])
        layers = RankLayers(check.cell, check.views[-1], shapes)
        return _chunked_loss(check.views[-1], shapes, layers, True)["logits and loss"]

    gradients = 4 * (TOKENS + WORDS) * DIM
    assert logits("chunked") == gradients + TOKENS / 8 * WORDS * 2
    assert logits("chunked eager") == gradients + TOKENS / 8 * WORDS * 14
    # A rank has half of the words, and so of the logits; the hidden states are whole.
    half = 4 * (TOKENS + WORDS / 2) * DIM
    assert logits("chunked tp 2") == half + max(TOKENS / 8 * WORDS, half / 2)


def test_less_memory_in_chunks(checks: dict[str, CellCheck]) -> None:
    assert checks["whole"].stages[0].moment == "the loss"
    whole, chunked = (checks[name].stages[0].reserved for name in ("whole", "chunked"))
    # Of 12.5 GiB of logits and their gradient, a part until a layer's backward is the fullest.
    assert 5 < whole - chunked < 12.5
    assert checks["chunked pp 2"].stages[-1].reserved < checks["whole pp 2"].stages[-1].reserved


def test_what_is_saved_is_kept_by_every_layer(checks: dict[str, CellCheck]) -> None:
    kept = {name: term(checks[name], "activations") * GIB for name in OPTIONS}
    # Forced balance sends a token to 1.25 of the 4 ranks.
    sent = MOE_LAYERS * 2 * (1.25 + 1) * TOKENS * DIM
    assert kept["sent rows saved"] - kept["nothing saved"] == pytest.approx(sent)
    gemms = MOE_LAYERS * 2 * ROWS * (2 * HIDDEN + DIM)
    assert kept["all saved"] - kept["sent rows saved"] == pytest.approx(gemms)
    # It need not be computed again for the layer whose backward runs.
    again = [checks[name].stages[0] for name in ("sent rows saved", "all saved")]
    assert again[1].reserved - again[0].reserved < gemms / GIB * 1.05


def test_scored_activations_keep_no_outputs(checks: dict[str, CellCheck]) -> None:
    kept = {name: term(checks[name], "activations") * GIB for name in OPTIONS}
    # The last product's rows, and what came back of them.
    less = MOE_LAYERS * 2 * (ROWS + TOKENS) * DIM
    assert kept["all saved"] - kept["all saved, scored"] == pytest.approx(less)
    assert kept["nothing saved"] == kept["nothing saved, scored"]
    # Nor does a layer of which nothing is recomputed.
    names = ("nothing saved", "nothing saved, scored")
    layers = [
        layer_bytes(shapes_of(checks[name].cell, checks[name].views[0]), moe=True) for name in names
    ]
    assert layers[0].saved - layers[1].saved == pytest.approx(2 * ROWS * DIM)
