"""Hidden states of a rank alone: BF16 under autocast as under FSDP, and weights copied once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torchtitan.config.job_config import Optimizer

from cookbook.titan.common import weight_copies
from cookbook.titan.tt_0_2_2 import loss_and_optimizer
from cookbook.titan.tt_0_2_2.hidden_states import narrow_hidden_states

pytestmark = pytest.mark.titan


class Model(nn.Module):
    """What a transformer does between its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(16, 32), nn.RMSNorm(32)
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.tok_embeddings(tokens)
        second = first + self.layer(self.norm(first))
        return first, second, self.norm(second)


@pytest.mark.parametrize(
    ("parallel", "param", "expected"),
    [
        ("", "bfloat16", torch.bfloat16),
        ("", "float32", torch.float32),
        ("fsdp_enabled", "bfloat16", torch.float32),
        ("tp_enabled", "bfloat16", torch.float32),
    ],
)
def test_hidden_states_are_narrow_where_training_is_under_autocast(
    parallel: str, param: str, expected: torch.dtype, patches_applied: set[str]
) -> None:
    model, names = Model(), ("fsdp_enabled", "tp_enabled", "pp_enabled")
    # Half of BF16's step above 1.
    nn.init.constant_(model.norm.weight, 1.0035)
    dims = SimpleNamespace(**{name: name == parallel for name in names})
    narrow_hidden_states(model, dims, SimpleNamespace(mixed_precision_param=param))
    with torch.autocast("cpu", torch.bfloat16, enabled=param == "bfloat16"):
        hidden = model(torch.arange(16))
    # FSDP and TP cast what they gather themselves.
    assert [one.dtype for one in hidden] == [expected] * 3
    named = ["hidden-states-as-under-fsdp"] * (expected == torch.bfloat16)
    assert sorted(patches_applied) == named
    gathered = model.norm.weight.to(expected)
    assert torch.equal(hidden[2], nn.functional.rms_norm(hidden[1], (32,), gathered))
    hidden[2].float().square().sum().backward()
    assert all(
        one.grad is not None and one.grad.dtype == torch.float32 for one in model.parameters()
    )


def test_a_gradient_beside_other_ranks_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP and FSDP wait for each gradient that autograd accumulates."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    weight = nn.Parameter(torch.randn(2, 8, 16))
    weight.grad = torch.ones_like(weight)
    given = weight_copies.give(torch.ones(2, 8, 16, dtype=torch.bfloat16), weight)
    assert given is not None and given.dtype == torch.float32 and torch.equal(weight.grad, given)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_rank_alone_keeps_narrow_gradients_and_sums_them_in_float32(rounds: int) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(2, 8, 16)) for _ in range(2)]
    grads = [torch.randn(2, 16, 16).bfloat16() for _ in range(rounds)]
    weight_copies.keep_dtypes(weights)
    for grad in grads:
        joined = weight_copies.join(torch.bfloat16, *weights)
        joined.backward(grad)
    exact = sum(grad.float() for grad in grads).chunk(2, 1)
    for weight, whole in zip(weights, exact, strict=True):
        assert weight.grad.dtype == (torch.bfloat16 if rounds == 1 else torch.float32)
        assert torch.equal(weight.grad.float(), whole)
    # A norm in BF16 would have three digits.
    norm = loss_and_optimizer._clip_and_note(weights, 1e9)
    torch.testing.assert_close(norm, torch.cat(exact).norm())


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_copies_of_weights_follow_every_optimizer(name: str, implementation: str) -> None:
    """PyTorch's fused ones write weights without a new version."""
    model: Any = nn.Module()
    model.layers, model.weight = nn.ModuleDict(), nn.Parameter(torch.ones(2, 8, 16))
    asked: Any = Optimizer(name=name, implementation=implementation, lr=0.5)
    alone: Any = SimpleNamespace(ep_enabled=False)
    optimizers = loss_and_optimizer.build_optimizers([model], asked, alone)
    for _ in range(3):
        copy = weight_copies.kept(model, "copy", [model.weight], model.weight.detach().clone)
        assert torch.equal(copy, model.weight)
        model.weight.grad = torch.ones_like(model.weight)
        optimizers.step()


def test_experts_weights_are_copied_once_until_they_change_and_gradients_are_added() -> None:
    weights = [nn.Parameter(torch.randn(2, 8, 16)) for _ in range(2)]
    owner, made = nn.Module(), []

    def copy() -> Any:
        made.append(weight_copies.joined(torch.bfloat16, *weights))
        return made[-1]

    for step in range(2):
        for _ in range(2):
            kept = weight_copies.kept(owner, "copy", weights, copy)
            weight_copies.copy_of(kept, *weights).sum().backward()
        assert len(made) == step + 1 and torch.equal(made[-1][:, 8:], weights[1].bfloat16())
        for weight in weights:
            assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
            weight.grad = None
            with torch.no_grad():
                weight.mul_(2)
