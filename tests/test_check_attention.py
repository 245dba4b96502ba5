"""What check builds, counts and says of a cell with FlashAttention-4, beside the same with flex."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from cookbook.base.schema import Words
from cookbook.check.check import CellCheck, check_cells
from cookbook.check.report import render_json, render_text
from cookbook.predict.layer_memory import layer_bytes
from cookbook.predict.shapes import Shapes, shapes_of
from tests.check_cells import cell_of, h200

pytestmark = pytest.mark.titan

GIB = 2**30
FLASH = {"model.attention": "flash_attention_4"}
BALANCED = {"parallelism.expert_parallel_degree": 4, "debug.moe_force_load_balance": True}
NONE = {"activation_checkpoint.mode": "none", "training.local_batch_size": 2}
SELECTIVE = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"training.local_batch_size": 4},
    "none": NONE,
    "selective": {**SELECTIVE, "training.local_batch_size": 4},
}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellCheck]:
    """The 16B with DeepEP on 4 H200 as flex and flash, and the 671B, built by one subprocess."""
    folder = tmp_path_factory.mktemp("cluster")
    node = dataclasses.replace(h200(folder), environment=Words(EXPANDABLE))
    cells = {}
    for name, options in CASES.items():
        for kind, chosen in (("flex", {}), ("flash", FLASH)):
            cell = cell_of(
                "deepseek_v3_16b",
                BALANCED | options | chosen,
                cluster=node,
                ep_backend="deepep",
            )
            cells[f"{name} {kind}"] = cell
    cells["671b flash"] = cell_of("deepseek_v3_671b", FLASH, ep_backend="deepep")
    cells = {name: dataclasses.replace(cell, name=name) for name, cell in cells.items()}
    return dict(zip(cells, check_cells(list(cells.values())), strict=True))


def shapes(check: CellCheck) -> Shapes:
    return shapes_of(check.cell, check.views[0])


def test_it_is_built_on_every_stage_and_listed(checks: dict[str, CellCheck]) -> None:
    flex, flash, large = checks["full flex"], checks["full flash"], checks["671b flash"]
    assert flex.active["attention"] == "flex"
    assert flash.active["attention"] == large.active["attention"] == "flash_attention_4"
    assert len(large.views) == 2 and large.may_run
    text = render_text("mine", [flash])
    line = "active: grouped gemms bf16, linear layers bf16, attention flash_attention_4"
    assert line in text
    assert "FlashAttention-4: its package was not looked for" in text
    assert "FlashAttention-4" not in render_text("mine", [flex])
    cells = json.loads(render_json([flex, flash]))["cells"]
    assert [cell["active"] for cell in cells] == [flex.active, flash.active]


@pytest.mark.parametrize(
    ("case", "gib"),
    # The `memory` that jobs logged on 4 H200 (torch 2.11.0+cu130, long documents).
    [("full flex", 77.4), ("full flash", 77.2), ("none flex", 133.2), ("none flash", 131.7)],
)
def test_memory_is_near_what_was_measured(
    checks: dict[str, CellCheck], case: str, gib: float
) -> None:
    peak = checks[case].peak
    assert peak and peak.reserved == pytest.approx(gib, rel=0.02)


def test_selective_recomputation_keeps_its_output(checks: dict[str, CellCheck]) -> None:
    """Compiled, FlexAttention is out of its sight, and an operator is not."""
    flex, flash = checks["selective flex"].peak, checks["selective flash"].peak
    assert flex and flash
    # 16 heads of 128 in BF16, and a number in FP32 for each, in all 27 layers.
    kept = 27 * 4 * 8192 * 16 * (128 * 2 + 4)
    assert flash.terms["activations"] - flex.terms["activations"] == pytest.approx(kept / GIB)
    # Full recomputation keeps nothing of either.
    full = [checks[f"full {kind}"].peak for kind in ("flex", "flash")]
    assert len({peak.terms["activations"] for peak in full if peak}) == 1


def test_its_backward_sums_in_fp32(checks: dict[str, CellCheck]) -> None:
    # Without a feed-forward network, whose own temporaries are larger here.
    sizes = [
        dataclasses.replace(shapes(checks[f"full {kind}"]), dense_hidden=0)
        for kind in ("flex", "flash")
    ]
    flex, flash = (layer_bytes(size, False) for size in sizes)
    # 4 sequences with room for 64 documents each, in blocks of 64 queries on Hopper.
    rows = 4 * 8192 + (4 * 64 + 1) * 64
    assert flash.temporary - flex.temporary == 4 * rows * 16 * (192 + 2)
    assert flash.saved == flex.saved
    # A microbatch is one sequence, a block on Blackwell has 128 queries.
    assert shapes(checks["671b flash"]).padded_tokens == 8192 + 65 * 128
