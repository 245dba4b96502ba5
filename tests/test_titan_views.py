"""The ranks that are counted are those that TorchTitan builds."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from cookbook.check.check import Built, dry_run
from cookbook.config.cell import Cell
from cookbook.config.dialect.names import OVERRIDES
from cookbook.predict.memory import groups_of
from cookbook.predict.rank import count_work, describe_ranks, model_of
from cookbook.predict.shapes import shapes_of
from tests.check_cells import cell_of

pytestmark = pytest.mark.titan
P = "parallelism"
TP, PP, EP = (f"{P}.{word}_parallel_degree" for word in ("tensor", "pipeline", "expert"))
SCHEDULE = f"{P}.pipeline_parallel_schedule"
MICROBATCH = f"{P}.pipeline_parallel_microbatch_size"
GLOBAL = "training.global_batch_size"
FIRST, LAST = (f"{P}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "published": ("deepseek_v3_671b", {}),
    "fast": ("deepseek_v3_671b_fast", {}),
    # More FSDP shards than experts: their second axis is cut.
    "16b": ("deepseek_v3_16b", {}),
    "16b in low precision": ("deepseek_v3_16b", {"training.dtype": "bfloat16"}),
    "expert TP": (
        "deepseek_v3_671b",
        {TP: 4, EP: 16, f"{P}.expert_tensor_parallel_degree": 4, SCHEDULE: "1F1B"},
    ),
    "no EP, replicas": (
        "deepseek_v3_16b",
        {TP: 2, EP: 1, f"{P}.data_parallel_replicate_degree": 4, GLOBAL: 16 * 128 * 3},
    ),
    "stages by layers": (
        "deepseek_v3_671b",
        {PP: 4, EP: 64, f"{P}.pipeline_parallel_layers_per_stage": 4, FIRST: 3, LAST: 0},
    ),
    "V-shaped, every third layer": (
        "deepseek_v3_16b",
        {
            PP: 4,
            EP: 8,
            SCHEDULE: "ZBVZeroBubble",
            "compile.enable": False,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "3",
        },
    ),
    "two layers of each stage kept": (
        "deepseek_v3_16b",
        {PP: 2, EP: 8, SCHEDULE: "Interleaved1F1B", "activation_checkpoint.num_layers_kept": 2},
    ),
    "accumulated": (
        "deepseek_v3_16b",
        {PP: 2, EP: 8, SCHEDULE: "GPipe", GLOBAL: 16 * 128 * 3, MICROBATCH: 2},
    ),
    "debug model": ("debug", {EP: 8}),
    "second family on 8 GPUs": ("qwen3_30b_a3b", {}),
    "second family on 32 GPUs, cut by TP": ("qwen3_30b_a3b", {TP: 4, EP: 16}),
    "second family on 256 GPUs": ("qwen3_30b_a3b_32nodes", {}),
    "second family on 256 GPUs, expert TP": (
        "qwen3_30b_a3b_32nodes",
        {TP: 2, EP: 16, f"{P}.expert_tensor_parallel_degree": 2, "model.flavor": "235B-A22B"},
    ),
    "671B, 3 layers of 16 experts": ("deepseek_v3_671b_slice", {EP: 8}),
    "second family, every size overridden": (
        "qwen3_30b_a3b",
        {
            **{f"{OVERRIDES}{name}": 64 for name in ("dim", "n_heads", "moe_inter_dim")},
            **{f"{OVERRIDES}{name}": 8 for name in ("n_kv_heads", "n_layers")},
            **{f"{OVERRIDES}moe_args.{name}": 16 for name in ("num_experts", "top_k")},
            **{f"{OVERRIDES}moe_args.num_{name}_groups": 4 for name in ("expert", "limited")},
            f"{OVERRIDES}moe_args.num_shared_experts": 2,
            f"{OVERRIDES}vocab_size": 1024,
        },
    ),
    "debug model, cut in two": ("debug", {EP: 4, PP: 2, SCHEDULE: "1F1B"}),
}


@pytest.fixture(scope="module")
def build() -> Iterator[Callable[[Cell], Built]]:
    """One subprocess, which builds every case and describes all of each rank."""
    with dry_run("tests.rank_view") as opened:
        yield opened


@pytest.mark.parametrize("name", CASES)
def test_a_counted_rank_is_the_one_that_torchtitan_builds(
    name: str, build: Callable[[Cell], Built]
) -> None:
    cell = cell_of(*CASES[name], nodes=4 if "32 GPUs" in name else None)
    answer = build(cell)
    assert answer.ranks, answer
    counted = describe_ranks(cell)
    assert len(counted) == len(answer.ranks) == cell.layout.pp
    work = asdict(count_work(cell, counted))
    shared = {key: work[key] for key in ("parameters", "active_parameters", "flops_per_token")}
    shared["mixed_precision"] = shapes_of(cell).mixed_precision
    shared["model"] = asdict(model_of(cell))
    for rank, theirs in zip(counted, answer.ranks, strict=True):
        # The `batch` group has no traffic of its own.
        assert len(theirs["groups"].keys() - {"batch"}) + 1 == groups_of(cell.layout)
        own = asdict(rank) | shared
        for key in own.keys() - {"parts"}:
            assert own[key] == theirs[key], key
        for part, other in zip(own["parts"], theirs["parts"], strict=True):
            ends = bool(part["embedding"]), bool(part["head"])
            assert ends == (other["embedding"], other["head"])
            units = {unit["name"]: unit for unit in (*part["embedding"], *part["head"])}
            for layer in part["layers"]:
                for unit in layer.pop("units"):
                    name = unit["name"].replace("layer", f"layers.{layer['id']}")
                    units[name] = unit | {"name": name}
            assert list(part["layers"]) == other["layers"]
            assert units == {unit["name"]: unit for unit in other["units"]}
