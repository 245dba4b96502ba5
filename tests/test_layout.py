"""Degrees, worlds and stages: what divides; test_check_dry_run.py compares with TorchTitan."""

from dataclasses import replace
from typing import Any

import pytest

from cookbook.base.family import is_v_shaped, loss_rank, stages_of
from cookbook.config.cell import Finding
from cookbook.config.options import DEGREES, Options, Setting
from cookbook.config.recipe import EXCHANGES
from cookbook.config.validate.layout import layout_findings
from tests.cells import STACK

MODEL = {"model.name": "deepseek_v3", "model.flavor": "16B"}


def _options(**degrees: int) -> dict[str, Any]:
    return {DEGREES[short]: degree for short, degree in degrees.items()}


def _findings(options: dict[str, Any], world: int) -> list[Finding]:
    """As of the command line; without a model, what is left are ranks that divide."""
    stack = STACK if "model.name" in options else replace(STACK, families={})
    settings = {name: Setting(value, f"--set {name}") for name, value in options.items()}
    return layout_findings(Options(stack, settings), world)


@pytest.mark.parametrize(
    ("options", "world", "option", "found", "remedy"),
    [
        (_options(tp=0), 8, "tp", "found 0, allowed: 1 and up", ""),
        (_options(dp_shard=0), 8, "dp_shard", "found 0, allowed: -1 or 1 and up", ""),
        (_options(pp=3), 8, "pp", "3 does not divide 8 ranks", "try 2"),
        (_options(cp=5), 8, "cp", "5 does not divide 8 ranks", "try 4"),
        (_options(tp=3), 8, "tp", "3 does not divide 8 ranks", "try 2"),
        (_options(dp_replicate=16), 8, "dp_replicate", "16 does not divide 8 ranks", "try 8"),
        (_options(dp_shard=3), 8, "dp_shard", "is 3 ranks, the job has 8", "set it to -1"),
        (_options(ep=3), 8, "ep", "3 does not divide 8 ranks of a stage", "try 2"),
        (_options(pp=2, ep=8), 8, "ep", "8 does not divide 4 ranks of a stage", "try 4"),
        (_options(tp=2, etp=2, ep=8), 8, "ep", "8 does not divide 4 ranks of a stage", "try 4"),
        (_options(tp=4, etp=2, ep=2), 8, "etp", "found 2, allowed: 1 or the tensor parallel", ""),
        (_options(tp=8, ep=2), 8, "dp_shard", "comes to 1 with CP 1", "use fewer TP"),
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


@pytest.mark.parametrize("replicate", [1, 4])
def test_a_global_batch_is_a_multiple_of_all_replicas_local_batches(replicate: int) -> None:
    total = "training.global_batch_size"
    options = MODEL | {"training.local_batch_size": 2} | _options(dp_replicate=replicate)
    # 384 is a multiple of 128 ranks and of 2 sequences, and not of 256.
    (finding,) = _findings(options | {total: 384}, 128)
    assert (finding.option, finding.remedy) == (total, "try 256")
    assert "384 is not a multiple of local batch 2 x 128 data-parallel ranks" in finding.reason
    assert not [size for size in (256, 512, -1) if _findings(options | {total: size}, 128)]


@pytest.mark.parametrize(
    ("schedule", "per_rank", "stages"),
    [
        ("1F1B", 1, [[0], [1], [2]]),
        ("Interleaved1F1B", 2, [[0, 3], [1, 4], [2, 5]]),
        ("ZBVZeroBubble", 2, [[0, 5], [1, 4], [2, 3]]),
        ("DualPipeV", 2, [[0, 5], [1, 4], [2, 3]]),
        # TorchTitan takes names in any case.
        ("dualpipev", 2, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_the_rank_of_the_loss(schedule: str, per_rank: int, stages: list[list[int]]) -> None:
    found = [stages_of(schedule, rank, 3, per_rank) for rank in range(3)]
    assert found == stages
    (last,) = [rank for rank, own in enumerate(found) if 3 * per_rank - 1 in own]
    # Of 24 ranks, eight to a pipeline rank.
    assert loss_rank(schedule, 3, 24) == 8 * last
    assert is_v_shaped(schedule) == (found[0] != [0] and 5 in found[0])
