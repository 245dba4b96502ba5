"""Where check's verdicts turn, and its bytes in absolute numbers, from sizes one can follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.base.gpus import Gpu
from cookbook.check.check import CellCheck, _shortage
from cookbook.check.warnings import small_experts
from cookbook.config.cell import Cell
from cookbook.config.finding import Verdict
from cookbook.predict import memory
from cookbook.predict import traffic as work
from cookbook.predict.memory import StageMemory
from cookbook.predict.shapes import shapes_of
from cookbook.predict.traffic import Traffic
from tests.check_cells import cell_of, h200

GPU_GIB = 1000.0


def checked(*totals: float) -> CellCheck:
    """A cell on GPUs of 1,000 GiB whose pipeline stages need this much."""
    cell = cell_of("deepseek_v3_16b")
    gpu = Gpu("a GPU", 10.0, GPU_GIB)
    cluster = dataclasses.replace(cell.cluster, gpu=gpu)
    stages = tuple(
        StageMemory(rank, "a layer's backward", {"parameters": 1.0, "activations": gib - 1.0}, 0.0)
        for rank, gib in enumerate(totals)
    )
    view = {"parts": [{"units": [{"local": 1, "bytes": 4}]}]}
    cell = dataclasses.replace(cell, cluster=cluster)
    return CellCheck(cell, Verdict(()), stages=stages, views=(view,))


@pytest.mark.parametrize(
    ("gib", "stages", "verdict"),
    [
        (919.9, 1, "fits"),
        (920.0, 1, "fits"),
        (920.1, 1, "tight"),
        (880.0, 2, "fits"),
        (880.1, 2, "tight"),
        (1049.9, 1, "tight"),
        (1050.0, 2, "tight"),
        (1050.1, 1, "will not fit"),
    ],
)
def test_verdicts_turn_at_92_or_in_a_pipeline_88_and_at_105_percent(
    gib: float, stages: int, verdict: str
) -> None:
    check = checked(gib)
    cell = cell_of("deepseek_v3_16b", {"parallelism.pipeline_parallel_degree": stages})
    assert memory.verdict(gib, GPU_GIB, cell.options) == verdict
    check = dataclasses.replace(check, cell=dataclasses.replace(check.cell, options=cell.options))
    assert check.verdict == verdict
    shortage = next(_shortage(check), None)
    level = {"fits": None, "tight": "warning", "will not fit": "error"}[verdict]
    assert (shortage.level if shortage else None) == level


@pytest.mark.parametrize("totals", [(900.0, 950.0, 300.0), (950.0, 900.0), (300.0, 900.0, 950.0)])
def test_the_fullest_stage_decides_wherever_it_is(totals: tuple[float, ...]) -> None:
    check = checked(*totals)
    assert check.peak and check.peak.total == pytest.approx(950)
    assert check.verdict == "tight"
    (shortage,) = _shortage(check)
    assert f"rank {totals.index(950.0)}," in shortage.reason


def shapes(**counts: Any) -> Any:
    sizes = {"tokens": 10, "sequence_tokens": 5, "dim": 3, "vocab": 7, "act": 2, "grad": 4}
    return SimpleNamespace(**{"loss_tokens": None, **sizes, **counts})


def test_a_rank_keeps_at_most_three_stages_gathered() -> None:
    gathered = (10, 40, 20, 30)
    view = {
        "num_stages": 8,
        "stages": [0, 2, 4, 6],
        "num_microbatches": 6,
        "mixed_precision": True,
        "in_flight": [[1, 1, 1, 1]],
        "parts": [{"head": False, "units": [{"gathered": size}]} for size in gathered],
    }
    layers: Any = SimpleNamespace(kept=lambda part: 100)
    terms = memory._kept(view, layers, shapes())
    assert terms["gathered parameters"] == (40 + 30 + 20) * 2
    # Nothing is reduced between microbatches, so that all stages' gradients are there.
    assert terms["unreduced gradients"] == (10 + 40 + 20 + 30) * 4
    hidden = 5 * 3 * 2
    assert terms["activations"] == 4 * (100 + hidden)
    # Stages 2, 4 and 6 receive from both sides, stage 0 from the next one alone.
    assert terms["pipeline receive buffers"] == 7 * 6 * hidden


def on_four_gpus(tmp_path: Path, **options: Any) -> Cell:
    settings = {"parallelism.expert_parallel_degree": 4} | {
        name.replace("__", "."): value for name, value in options.items()
    }
    return cell_of("deepseek_v3_16b", settings, cluster=h200(tmp_path))


UNITS = {
    "parts": [
        {
            "units": [
                {"name": "layers.0", "gathered": 800, "local": 200},
                {"name": "layers.1.moe.experts", "gathered": 4000, "local": 4000},
            ]
        }
    ],
    "gradient_accumulation_steps": 3,
}


@pytest.mark.parametrize(("policy", "gathers"), [("default", 2), ("always", 2), ("never", 1)])
def test_bytes_of_fsdp(policy: str, gathers: int, tmp_path: Path) -> None:
    cell = on_four_gpus(tmp_path, parallelism__fsdp_reshard_after_forward=policy)
    sent = work._fsdp(cell, UNITS, shapes())
    # Rings of 4 ranks pass 3/4 on: parameters of 2 bytes, gradients of 4. Each of 4 EP ranks has
    # its experts for itself.
    assert sent == Traffic(nvlink=3 * (gathers * 800 * 2 + 800 * 4) * 3 / 4)


@pytest.mark.parametrize(("stages", "sends"), [([0], 1), ([1], 2), ([3], 1), ([0, 2], 3)])
def test_bytes_of_a_pipeline(stages: list[int], sends: int, tmp_path: Path) -> None:
    size = sends * 5 * 3 * 2
    view = {"num_stages": 4, "stages": stages}
    within = on_four_gpus(
        tmp_path,
        parallelism__pipeline_parallel_degree=2,
        parallelism__expert_parallel_degree=2,
        training__local_batch_size=8,
    )
    assert work._pp(within, view, shapes()) == Traffic(nvlink=size)
    # Stages of just one node's ranks are neighbours over the network.
    between = cell_of(
        "deepseek_v3_16b",
        {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.expert_parallel_degree": 8,
            "training.local_batch_size": 8,
        },
        nodes=2,
    )
    assert between.layout.stage_ranks == between.cluster.ranks_per_node
    assert work._pp(between, view, shapes()) == Traffic(infiniband=size)


@pytest.mark.parametrize(
    ("backend", "once", "again"),
    [
        # Two dispatches and two combines of 2 bytes; MXFP8 is a byte and a scale for 32.
        ("standard", 4 * 2.0, 2 * 2.0),
        ("mxfp8_a2a", 2 * 2.0 + 2 * (1 + 1 / 32), 2.0 + 1 + 1 / 32),
    ],
)
def test_bytes_of_an_exchange(backend: str, once: float, again: float, tmp_path: Path) -> None:
    cell = on_four_gpus(tmp_path)
    first, repeated = work._exchange(cell, {}, shapes(sent_rows=20), backend)
    assert first.nvlink == pytest.approx(20 * 3 * once * 3 / 4)
    # Recomputation does the forward's dispatch and combine once more.
    assert repeated.nvlink == pytest.approx(20 * 3 * again * 3 / 4)


MODEL = {
    **dict.fromkeys(("dim", "n_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "inter_dim", "vocab_size"), 8),
    "moe_inter_dim": 2048,
    "moe_args.num_experts": 64,
    "moe_args.top_k": 4,
    "moe_args.num_shared_experts": 1,
    "moe_args.score_before_experts": False,
}


@pytest.mark.parametrize("disabled", [False, True])
def test_the_vocabulary_is_whole_where_the_loss_is_not_parallel(
    disabled: bool, tmp_path: Path
) -> None:
    cell = on_four_gpus(
        tmp_path,
        parallelism__tensor_parallel_degree=2,
        parallelism__disable_loss_parallel=disabled,
    )
    found = shapes_of(cell, {"model": MODEL, "mixed_precision": True})
    assert found.loss_parallel is not disabled
    assert found.vocab == (8 if disabled else 4)


@pytest.mark.parametrize(("hidden", "told"), [(1408, True), (2047, True), (2048, False)])
def test_small_experts_are_told_of_and_those_of_the_671b_are_not(hidden: int, told: bool) -> None:
    cell = cell_of("deepseek_v3_671b", precision="mxfp8")
    assert not cell.emulated
    view = {"model": MODEL | {"moe_inter_dim": hidden}}
    assert bool([*small_experts(cell, [view])]) is told


@pytest.mark.parametrize(
    ("mode", "recomputed", "repeats"),
    [("none", False, 0), ("full", True, 2), ("selective", True, 0)],
)
def test_bytes_of_what_recomputation_sends_again(
    mode: str, recomputed: bool, repeats: int, tmp_path: Path
) -> None:
    """Selective recomputation by operator saves what came over the network."""
    cell = on_four_gpus(
        tmp_path,
        activation_checkpoint__mode=mode,
        activation_checkpoint__selective_ac_option="op",
        training__local_batch_size=1,
        training__seq_len=256,
    )
    layers = [{"moe": moe, "recomputed": recomputed} for moe in (False, True, True)]
    view = {
        "parts": [{"layers": layers, "units": [], "embedding": False, "head": False}],
        "num_microbatches": 1,
        "gradient_accumulation_steps": 5,
        "num_stages": 1,
        "stages": [0],
        "mixed_precision": True,
        "model": MODEL,
    }
    sent = work._traffic(cell, view)["ep/standard"]
    # 256 tokens to 4 experts each, rows of 8 numbers in BF16; two layers with experts, five times.
    exchange = 256 * 4 * 8 * 2 * 3 / 4
    assert sent == Traffic(nvlink=(4 + repeats) * exchange * 2 * 5)
