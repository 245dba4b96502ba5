"""Degrees and worlds of ranks: the cookbook and TorchTitan agree on what divides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cookbook.config.cell import Finding
from cookbook.config.options import DEGREES, Options, Setting, layout_of
from cookbook.config.recipe import EXCHANGES
from cookbook.config.validate.layout import layout_findings
from tests.cells import STACK

MODEL = {"model.name": "deepseek_v3", "model.flavor": "16B"}
SMALL = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6, 8])


def _options(**degrees: int) -> dict[str, Any]:
    return {DEGREES[short]: degree for short, degree in degrees.items()}


def _all(options: dict[str, Any]) -> Options:
    """As the command line would set them; without a model, what is left are ranks that divide."""
    stack = STACK if "model.name" in options else replace(STACK, families={})
    settings = {name: Setting(value, f"--set {name}") for name, value in options.items()}
    return Options(stack, settings)


def _findings(options: dict[str, Any], world: int) -> list[Finding]:
    return layout_findings(_all(options), world)


def _found(options: dict[str, Any], world: int) -> list[str]:
    return [finding.option for finding in _findings(options, world)]


@pytest.mark.parametrize(
    ("options", "world", "option", "found", "remedy"),
    [
        (_options(tp=0), 8, "tp", "found 0, allowed: 1 and up", ""),
        (_options(dp_shard=0), 8, "dp_shard", "found 0, allowed: -1 or 1 and up", ""),
        (_options(dp_shard=-2), 8, "dp_shard", "found -2, allowed: -1 or 1 and up", ""),
        (_options(pp=3), 8, "pp", "3 does not divide 8 ranks", "try 2"),
        (_options(tp=3), 8, "tp", "3 does not divide 8 ranks", "try 2"),
        (_options(cp=5), 8, "cp", "5 does not divide 8 ranks", "try 4"),
        (_options(dp_replicate=16), 8, "dp_replicate", "16 does not divide 8 ranks", "try 8"),
        (_options(dp_shard=3), 8, "dp_shard", "is 3 ranks, the job has 8", "set it to -1"),
        (_options(tp=4, pp=4), 8, "dp_shard", "is 0 ranks, the job has 8", "set it to -1"),
        (_options(ep=3), 8, "ep", "3 does not divide 8 ranks of a stage", "try 2"),
        (_options(pp=2, ep=8), 8, "ep", "8 does not divide 4 ranks of a stage", "try 4"),
        (_options(tp=2, etp=2, ep=8), 8, "ep", "8 does not divide 4 ranks of a stage", "try 4"),
        (_options(tp=4, etp=2, ep=2), 8, "etp", "found 2, allowed: 1 or the tensor parallel", ""),
        (_options(tp=8, ep=2), 8, "dp_shard", "comes to 1 with CP 1", "use fewer TP"),
        (_options(etp=3), 8, "etp", "3 does not divide 8 ranks of a stage", "try 2"),
    ],
)
def test_a_degree_that_does_not_divide_is_named_with_the_nearest_that_does(
    options: dict[str, Any], world: int, option: str, found: str, remedy: str
) -> None:
    problem = _findings(options, world)[0]
    assert problem.option == DEGREES[option]
    assert found in problem.reason
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("world", [192, 24, 12, 256])
@pytest.mark.parametrize("backend", ["standard", "deepep"])
def test_the_remedy_helps(world: int, backend: str) -> None:
    others = {**MODEL, "parallelism.expert_parallel_comm_backend": backend}
    found = {
        degree: _findings({**others, **_options(ep=degree)}, world) for degree in range(1, 200)
    }
    wrong = [problems for problems in found.values() if problems]
    # Few of 199 degrees divide a power of two, or of two and three.
    assert len(wrong) > 150
    for problems in wrong:
        better = int(problems[0].remedy.removeprefix("try "))
        assert not _findings({**others, **_options(ep=better)}, world)
        assert backend == "standard" or better in (1, *EXCHANGES["deepep"].sizes)


@pytest.fixture(scope="module")
def dry_build() -> Iterator[Any]:
    """Starts and ends worlds of any size in this process, with a group that sends nothing."""
    import torch.distributed as dist
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torch.testing._internal.distributed.fake_pg import FakeStore

    patch = pytest.MonkeyPatch()
    # A mesh of GPUs would ask for GPUs.
    patch.setattr(parallel_dims, "device_type", "cpu")

    def start(world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    yield start
    patch.undo()
    if dist.is_initialized():
        dist.destroy_process_group()


def _torchtitan_accepts(degrees: dict[str, int], world: int, dry_build: Any) -> bool:
    from torchtitan.distributed import ParallelDims

    dry_build(world)
    try:
        dims = ParallelDims(**degrees, world_size=world)
        dims.build_mesh()
        # What parallelize_deepseekv3 asks for next.
        if dims.fsdp_enabled or dims.ep_enabled:
            dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"])
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


@pytest.mark.titan
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    degrees=st.fixed_dictionaries(
        {short: SMALL for short in DEGREES if short != "dp_shard"}
        | {"dp_shard": st.sampled_from([-1, -1, 1, 2, 3, 4])}
    ),
    fits=st.booleans(),
    factor=st.sampled_from([1, 2, 4]),
)
def test_torchtitan_builds_its_mesh_exactly_where_no_problem_is_found(
    degrees: dict[str, int], fits: bool, factor: int, dry_build: Any
) -> None:
    others = math.prod(degrees[short] for short in ("pp", "dp_replicate", "cp", "tp"))
    world = others * max(degrees["dp_shard"], 1) * (factor if degrees["dp_shard"] < 0 else 1)
    if not fits:
        world += factor
    assume(1 < world <= 256)
    # No model, and a sequence that every degree divides: what is left are TorchTitan's own rules.
    values = {**_options(**degrees), "training.seq_len": 2 * 8 * 8 * 9}
    values["training.local_batch_size"] = 1
    options = _all(values)
    accepted = _torchtitan_accepts(degrees, world, dry_build)
    found = layout_findings(options, world)
    assert accepted == (not found), (degrees, world, found)
    if accepted:
        from torchtitan.distributed import ParallelDims

        assert layout_of(options, world).dp_shard == (
            ParallelDims(**degrees, world_size=world).dp_shard
        )


@pytest.mark.titan
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    pp=st.sampled_from([2, 4, 8, 16]),
    schedule=st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]),
    first=st.sampled_from([1, 1, 0, 3]),
    last=st.sampled_from([1, 1, 0, 3]),
    flavor=st.sampled_from(sorted(STACK.families["deepseek_v3"].flavors)),
)
def test_torchtitan_splits_the_model_exactly_where_no_problem_is_found(
    pp: int, schedule: str, first: int, last: int, flavor: str
) -> None:
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    stages = pp * (1 if schedule in ("1F1B", "GPipe") else 2)
    try:
        num_layers = STACK.families["deepseek_v3"].flavors[flavor].n_layers
        generate_llm_fqn_per_model_part(stages, num_layers, first, last)
        accepted = True
    except ValueError:
        accepted = False
    options = {
        "model.name": "deepseek_v3",
        "model.flavor": flavor,
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.pipeline_parallel_first_stage_less_layers": first,
        "parallelism.pipeline_parallel_last_stage_less_layers": last,
        **_options(pp=pp),
    }
    assert (DEGREES["pp"] in _found(options, pp)) == (not accepted)


@pytest.mark.parametrize("replicate", [1, 4])
def test_a_global_batch_is_a_multiple_of_all_replicas_local_batches(replicate: int) -> None:
    total = "training.global_batch_size"
    options = MODEL | {"training.local_batch_size": 2} | _options(dp_replicate=replicate)
    # 384 is a multiple of 128 ranks and of 2 sequences, and not of 256.
    (finding,) = _findings(options | {total: 384}, 128)
    assert (finding.option, finding.remedy) == (total, "try 256")
    assert "384 is not a multiple of local batch 2 x 128 data-parallel ranks" in finding.reason
    assert not [size for size in (256, 512, -1) if _findings(options | {total: size}, 128)]
