"""FSDP over one rank: the same gradients, gathered and not copied."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.titan_ranks import run_ranks
from tests.titan_run import DEEPEP, EP2, EP4, PP2, TP2, job, train, write_assets

pytestmark = pytest.mark.titan

GATHER, DIVIDE, COPY = "fsdp.chunk_cat.default", "aten.div.Tensor", "aten.copy_.default"


class Moved(TorchDispatchMode):
    """How often gradients were gathered, divided and copied; a tensor to itself is no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in (GATHER, DIVIDE) or (str(func) == COPY and args[0] is not args[1]):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def reduce_twice(alone: bool) -> tuple[list[list[torch.Tensor]], dict[str, int], int]:
    """Gradients of two layers after one and two backwards, what moved, how many lie apart."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from cookbook.titan.common.one_rank import reduce_alone

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(1.0)
        if alone:
            reduce_alone(layer)
    found = []
    with Moved() as moved:
        for _ in range(2):
            loss = model(torch.randn(4, 8, dtype=torch.bfloat16)).square().sum()
            moved.calls.clear()
            loss.backward()
            found.append([one.grad.to_local().clone() for one in model.parameters()])
    places = {one.grad.to_local().data_ptr() for one in model.parameters()}
    return found, dict(moved.calls), len(places)


def test_gradients_are_the_same_and_not_copied() -> None:
    ((plain, copied, _),) = run_ranks(reduce_twice, 1, False)
    ((found, moved, places),) = run_ranks(reduce_twice, 1, True)
    for one, other in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))
    # The second backward's are added to the first one's.
    assert not any(map(torch.equal, *found))
    assert places == 3
    assert (copied[GATHER], copied[DIVIDE]) == (moved[GATHER], 2) == (2, 2)
    assert copied[COPY] - moved.get(COPY, 0) == 2
    assert DIVIDE not in moved


def test_other_ranks_are_not_forgotten() -> None:
    from cookbook.titan.common.one_rank import OneBuffer

    buffer, where = OneBuffer(), {"dtype": torch.float32, "device": torch.device("cpu")}
    sent = buffer.allocate((6,), **where)
    with pytest.raises(RuntimeError, match=r"FSDP sends \(6,\) and would receive \(3,\)"):
        buffer.allocate((3,), **where)
    with pytest.raises(RuntimeError, match="several ranks"):
        buffer(sent, sent)


def train_and_look(argv: list[str], alone: bool) -> dict[str, Any]:
    """What a rank trains, and how many modules reduced their gradients alone."""
    from cookbook.titan.common.one_rank import reduce_alone
    from cookbook.titan.tt_0_2_2 import parallelize

    found: list[Any] = []

    def note(module: Any) -> None:
        found.append(module)
        if alone:
            reduce_alone(module)

    vars(parallelize)["reduce_alone"] = note
    return train(argv) | {"alone": len(found)}


@pytest.mark.parametrize(
    ("ranks", "options", "layers"),
    [
        (2, EP2, 3),
        (2, (*EP2, *DEEPEP), 3),
        # EP takes the ranks of TP.
        (4, (*EP4, *TP2), 3),
        (4, (*EP2, *PP2), 1),
        (4, EP2, 0),
        # Another replica has the same experts, and other gradients of them.
        (4, (*EP2, "--parallelism.data_parallel_replicate_degree=2"), 0),
    ],
)
def test_experts_that_no_other_rank_has_are_reduced_alone(
    ranks: int, options: tuple[str, ...], layers: int, tmp_path: Path
) -> None:
    write_assets(tmp_path)
    plain, found = (
        run_ranks(train_and_look, ranks, job(tmp_path, tmp_path / str(alone), *options), alone)[0]
        for alone in (False, True)
    )
    assert found["alone"] == layers
    assert found["losses"] == plain["losses"]
    assert found["grad_norms"] == plain["grad_norms"]
