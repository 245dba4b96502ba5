"""The memory and work that check predicts, beside known ones."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.memory import compare
from cookbook.check.check import CellCheck, check_cells
from cookbook.config.cell import Cell
from cookbook.predict.shapes import destinations
from tests.check_cells import cell_of, h200

pytestmark = pytest.mark.titan

ROOT = Path(__file__).resolve().parent.parent
BALANCED = {
    "parallelism.expert_parallel_degree": 4,
    "training.local_batch_size": 4,
    "debug.moe_force_load_balance": True,
}
SELECTIVE = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
TP2 = {"parallelism.tensor_parallel_degree": 2}
NONE = {"activation_checkpoint.mode": "none"}


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellCheck]:
    """Every cell of this module, built by one subprocess."""
    node = h200(tmp_path_factory.mktemp("cluster"))
    cells: dict[str, Cell] = {}

    def add(name: str, recipe: str, options: dict[str, Any], **where: Any) -> None:
        # Names tell cells apart, and these differ in their options alone.
        cells[name] = dataclasses.replace(cell_of(recipe, options, **where), name=name)

    on_node = {"cluster": node}
    add("full", "deepseek_v3_16b", BALANCED, **on_node)
    add("full deepep", "deepseek_v3_16b", BALANCED, ep_backend="deepep", **on_node)
    add("selective", "deepseek_v3_16b", BALANCED | SELECTIVE, **on_node)
    add("none", "deepseek_v3_16b", BALANCED | NONE, **on_node)
    add("batch 2", "deepseek_v3_16b", BALANCED | {"training.local_batch_size": 2}, **on_node)
    add("tp 2", "deepseek_v3_16b", BALANCED | TP2, **on_node)
    add("671b", "deepseek_v3_671b", {})
    add("671b deepep", "deepseek_v3_671b", {}, ep_backend="deepep")
    add("671b on one node", "deepseek_v3_671b", ONE_NODE, nodes=1)
    return dict(zip(cells, check_cells(list(cells.values())), strict=True))


ONE_NODE = {
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 8,
    "training.local_batch_size": 1,
}


def test_predicted_memory_is_near_what_was_measured() -> None:
    comparisons = compare(json.loads((ROOT / "docs/memory.json").read_text()))
    # 10% where a figure was given beforehand, 15% for all else.
    assert {row.name for row in comparisons if row.earlier} == {
        "16B full expandable, batch 4",
        "16B full DeepEP expandable, batch 4",
        "16B selective op expandable, batch 4",
    }
    assert len(comparisons) >= 25
    off = {
        row.name: f"{row.error:+.1%}"
        for row in comparisons
        if abs(row.error) > (0.10 if row.earlier else 0.15)
    }
    assert not off


def test_a_parallel_loss_keeps_fp32_copies(checks: dict[str, CellCheck]) -> None:
    whole, split = checks["full"].stages[0].terms, checks["tp 2"].stages[0].terms
    # Half the vocabulary, 10 bytes a logit instead of 4.
    assert split["logits and loss"] == pytest.approx(whole["logits and loss"] / 2 * 10 / 4)


def test_671b_has_its_published_share_a_rank(checks: dict[str, CellCheck]) -> None:
    check = checks["671b"]
    view = check.views[0]
    assert sum(u["local"] for part in view["parts"] for u in part["units"]) == 2_542_205_696
    assert [len(part["layers"]) for part in view["parts"]] == [15, 16]
    stored = check.stages[0].terms
    state = stored["parameters"] + stored["optimizer state"] + stored["gradients"]
    assert state == pytest.approx(37.9, abs=0.05)
    assert check.may_run and check.verdict == "fits"


def test_more_memory_for_more_batch_and_less_recomputation(checks: dict[str, CellCheck]) -> None:
    order = ["batch 2", "full", "selective", "none"]
    peaks = [check.peak.total for name in order if (check := checks[name]).peak]
    assert peaks == sorted(peaks) and len(peaks) == len(order)


def test_what_cannot_fit_is_refused_with_the_largest_term(checks: dict[str, CellCheck]) -> None:
    without = checks["none"]
    assert not without.may_run and without.verdict == "will not fit"
    assert "activations" in without.summary and "activation_checkpoint.mode full" in without.summary
    too_large = checks["671b on one node"]
    assert not too_large.may_run and "use more GPUs" in too_large.summary


def test_terms_add_up(checks: dict[str, CellCheck]) -> None:
    for check in checks.values():
        for stage in check.stages:
            assert stage.reserved == pytest.approx(sum(stage.terms.values()))
            assert all(size > 0 for size in stage.terms.values())
            assert stage.largest in stage.terms


def test_work_is_torchtitans_count(checks: dict[str, CellCheck]) -> None:
    work = checks["671b"].work
    assert work
    assert (work.parameters, work.active_parameters) == (671_026_404_352, 37_552_282_624)
    assert work.tokens_per_step == 64 * 64 * 8192
    assert work.flops_per_gpu_step == pytest.approx(
        work.flops_per_token * work.tokens_per_step / 256
    )


def test_traffic_lies_where_the_ranks_do(checks: dict[str, CellCheck]) -> None:
    large, node = checks["671b"].work, checks["full"].work
    assert large and node
    assert large.traffic["tp"].infiniband == 0 < large.traffic["tp"].nvlink
    assert large.traffic["pp"].nvlink == 0 < large.traffic["pp"].infiniband
    assert large.traffic["ep/deepep"].infiniband < large.traffic["ep/standard"].infiniband
    assert large.traffic["ep/mxfp8_a2a"].infiniband < large.traffic["ep/standard"].infiniband
    assert all(sent.infiniband == 0 for sent in node.traffic.values())
    # 4096 tokens x 8 rows of 7168 in BF16, six times a layer; 30 such layers on the fuller rank.
    rows = 4096 * 8 * 7168 * 2 * 6 * 30 * 64
    assert large.traffic["ep/standard"].infiniband == pytest.approx(rows * 24 / 32)


def test_tokens_reach_as_many_ranks_as_their_experts_live_on() -> None:
    # Eight neighbours of 256 experts, eight on each of 32 ranks: all on one.
    assert destinations(256, 8, 32, True, None) == 1
    # Two experts a rank: six neighbours on three ranks.
    assert destinations(64, 6, 32, True, None) == 3
    assert destinations(64, 6, 4, True, None) == 1.25
    assert destinations(64, 6, 1, False, None) == 1
    # Uniform routing: four ranks, a quarter of the experts each.
    assert destinations(64, 6, 4, False, None) == pytest.approx(4 * (1 - 0.1638), rel=1e-2)
    assert destinations(256, 8, 32, False, (8, 4)) < destinations(256, 8, 32, False, None)


def _submit(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "submit.py"), "check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_answers_people_and_programs(tmp_path: Path) -> None:
    words = ["smoke", "--cluster", "h200-node", "--set", "parallelism.expert_parallel_degree=8"]
    text = _submit(*words)
    assert text.returncode == 0, text.stderr
    assert "debug-mxfp8-deepep" in text.stdout and "reserved (`memory` in the log)" in text.stdout
    answer = _submit(*words, "--json", "--precision", "bf16", "--ep-backend", "standard")
    content = json.loads(answer.stdout)
    assert content["may_run"] is True and len(content["cells"]) == 1
    (cell,) = content["cells"]
    assert cell["memory"]["verdict"] == "fits" and cell["memory"]["stages"][0]["reserved_gib"] > 0
    assert set(cell["work"]["bytes_per_gpu_step"]) >= {"fsdp", "tp", "pp", "ep/deepep"}
