"""The ranks that are counted are those that TorchTitan builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.check.build import DryRun
from cookbook.predict.rank import describe_ranks, stage_layers
from tests.check_cells import cell_of, with_options

pytestmark = pytest.mark.titan
P = "parallelism"
TP, PP, EP = (f"{P}.{word}_parallel_degree" for word in ("tensor", "pipeline", "expert"))
SCHEDULE = f"{P}.pipeline_parallel_schedule"
EVERY = {"activation_checkpoint.mode": "selective"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "published": ("deepseek_v3_671b", {}),
    "fast": ("deepseek_v3_671b_fast", {}),
    # More FSDP shards than experts: their second axis is cut.
    "16b": ("deepseek_v3_16b", {}),
    "expert TP": (
        "deepseek_v3_671b",
        {TP: 4, EP: 16, f"{P}.expert_tensor_parallel_degree": 4, SCHEDULE: "1F1B"},
    ),
    "no EP, replicas": (
        "deepseek_v3_16b",
        {TP: 2, EP: 1, f"{P}.data_parallel_replicate_degree": 4},
    ),
    "stages by layers": (
        "deepseek_v3_671b",
        {PP: 4, EP: 64, f"{P}.pipeline_parallel_layers_per_stage": 4},
    ),
    "V-shaped, every third layer": (
        "deepseek_v3_16b",
        {
            PP: 4,
            EP: 8,
            SCHEDULE: "ZBVZeroBubble",
            "compile.enable": False,
            **EVERY,
            "activation_checkpoint.selective_ac_option": "3",
        },
    ),
    "two layers of each stage kept": (
        "deepseek_v3_16b",
        {PP: 2, EP: 8, SCHEDULE: "Interleaved1F1B", "activation_checkpoint.num_layers_kept": 2},
    ),
    "accumulated": (
        "deepseek_v3_16b",
        {PP: 2, EP: 8, SCHEDULE: "GPipe", "training.global_batch_size": 16 * 128 * 3},
    ),
}


@pytest.fixture(scope="module")
def dry_run() -> Iterator[DryRun]:
    """One subprocess, which builds every case."""
    with DryRun() as opened:
        yield opened


@pytest.mark.parametrize("name", CASES)
def test_a_counted_rank_is_the_one_that_torchtitan_builds(name: str, dry_run: DryRun) -> None:
    cell = cell_of(*CASES[name])
    answer = dry_run.build(cell)
    assert answer.views, answer
    counted = describe_ranks(cell)
    assert len(counted) == len(answer.views) == cell.layout.pp
    for own, theirs in zip(counted, answer.views, strict=True):
        for key in own.keys() - {"model", "parts"}:
            assert own[key] == theirs[key], key
        assert own["model"].items() - theirs["model"].items() <= CHANGED_BY_OPTIONS.items()
        for part, other in zip(own["parts"], theirs["parts"], strict=True):
            assert part["layers"] == other["layers"]
            assert (part["embedding"], part["head"]) == (other["embedding"], other["head"])
            by_name = {unit["name"]: unit for unit in other["units"]}
            assert {unit["name"]: unit for unit in part["units"]} == by_name


# The flavor's own values, where a job's options stand over them; nothing is counted from these.
CHANGED_BY_OPTIONS: dict[str, Any] = {
    "max_seq_len": 16384,
    "moe_args._debug_force_load_balance": False,
    "attn_type": "flex",
}


def test_stages_get_layers_as_torchtitan_deals_them() -> None:
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    for stages, layers, first, last in ((1, 6, 1, 1), (4, 61, 1, 1), (8, 27, 0, 2), (5, 61, 3, 3)):
        names = generate_llm_fqn_per_model_part(stages, layers, first, last)
        dealt = [
            [int(name.split(".")[1]) for name in part if name.startswith("layers.")]
            for part in names
        ]
        assert stage_layers(stages, layers, first, last) == dealt


def test_a_model_that_is_not_counted_is_refused() -> None:
    cell = with_options(cell_of("deepseek_v3_16b"), {"model.name": "llama3"})
    with pytest.raises(InputError, match="not counted"):
        describe_ranks(cell)
    cell = with_options(cell_of("deepseek_v3_16b"), {"model.flavor": "17B"})
    with pytest.raises(InputError, match=r"counted: deepseek_v3 in .*16B"):
        describe_ranks(cell)


def test_stages_that_are_named_by_module_are_refused() -> None:
    option = f"{P}.module_fqns_per_model_part"
    cell = with_options(cell_of("deepseek_v3_671b"), {option: [["tok_embeddings"], ["output"]]})
    with pytest.raises(InputError, match="not counted"):
        describe_ranks(cell)
