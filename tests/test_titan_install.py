"""Refusals before a model is built, the cookbook's options, and the CPU in the place of a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.titan_ranks import run_ranks
from tests.titan_refusal import refusal

pytestmark = pytest.mark.titan


@pytest.mark.parametrize("package", ["torchtitan", "torchao"])
@pytest.mark.parametrize("found", ["0.3.0", None])
def test_another_version_is_refused_in_one_line(
    package: str, found: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from cookbook.titan.tt_0_2_2 import versions

    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda p: found if p == package else known(p))
    reason = refusal(versions.check_versions, caplog)
    assert f"written for {package} " in reason and f"found {found or 'none'}; " in reason


def parse(*options: str) -> Any:
    from torchtitan.config import ConfigManager

    module = "--job.custom_config_module=cookbook.titan.tt_0_2_2.job_config"
    return ConfigManager().parse_args([module, *options])


def test_a_build_of_the_known_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another index has the CUDA that it was built for in its version."""
    from cookbook.titan.tt_0_2_2 import versions

    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda package: f"{known(package)}+cu128")
    versions.check_versions()
    found = versions.versions()
    assert found["torch"] == torch.__version__ and found["torchao"] == "0.16.0+cu128"


A2A = "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8"


def test_each_exchange_is_quantized_by_its_own_option() -> None:
    from cookbook.titan.tt_0_2_2.mxfp8 import Precisions

    other = A2A.replace("dispatch_fwd", "combine_bwd")
    assert Precisions.of(parse(A2A)) == Precisions(dispatch_forward=True, combine_backward=False)
    assert Precisions.of(parse(other)) == Precisions(dispatch_forward=False, combine_backward=True)


def test_no_module_of_torchtitan_is_left_on_cuda() -> None:
    import cookbook.titan.tt_0_2_2  # noqa: F401

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: nothing was replaced")
    modules = [m for name, m in sys.modules.items() if name.startswith("torchtitan.")]
    assert {getattr(m, "device_type", "cpu") for m in modules} == {"cpu"}
    devices = {getattr(m, "device_module", None) for m in modules} - {None}
    assert torch.cuda not in devices and len(devices) == 1


def draw_random() -> tuple[torch.Tensor, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    import cookbook.titan.tt_0_2_2  # noqa: F401
    from cookbook.titan.tt_0_2_2.cpu import seed_shards_apart

    torch.manual_seed(42)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    placed = zeros(64, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    first = placed.normal_().to_local().clone()
    second = placed.normal_().to_local().clone()
    plain = torch.rand(4)
    # As the next job does, with a seed of its own and with the same.
    started_anew = []
    for seed in (43, 42):
        seed_shards_apart()
        torch.manual_seed(seed)
        started_anew.append(placed.normal_().to_local().clone())
    return first, second, plain, *started_anew


def test_shards_draw_other_numbers_and_replicas_the_same() -> None:
    ranks = run_ranks(draw_random, 4)
    (a, b, c, d) = (rank[0] for rank in ranks)
    assert torch.equal(a, c) and torch.equal(b, d)
    assert not torch.isin(a, b).any()
    for first, second, plain, other_seed, same_seed in ranks:
        assert not torch.equal(first, second)
        assert torch.equal(first, same_seed) and not torch.isin(first, other_seed).any()
        # Numbers outside of DTensors are drawn as if there were none.
        assert torch.equal(plain, ranks[0][2])
