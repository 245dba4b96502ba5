"""Corrections of TorchTitan say their names, keep the reported loss, and stay where they belong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

pytestmark = pytest.mark.titan


def loss_with(pp: bool, global_batch: int, patches_applied: set[str]) -> tuple[float, torch.Tensor]:
    """The loss of 6 tokens and its gradient, at 2 x 3 data-parallel ranks and a batch of 4 x 5."""
    from cookbook.titan.tt_0_2_2.pipeline_loss import build_loss

    training = SimpleNamespace(global_batch_size=global_batch, local_batch_size=4, seq_len=5)
    config: Any = SimpleNamespace(
        loss=SimpleNamespace(num_chunks=0),
        compile=SimpleNamespace(enable=False, components=[]),
        training=training,
    )
    dims = SimpleNamespace(pp_enabled=pp, dp_replicate=2, dp_shard=3)
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = build_loss(config, parallel_dims=dims)(logits, torch.arange(6).view(2, 3))
    (grad,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), grad


@pytest.mark.parametrize(("global_batch", "sequences"), [(-1, 4 * 2 * 3), (48, 48)])
def test_a_pipeline_reports_the_loss_and_gets_gradients_per_token(
    global_batch: int, sequences: int, patches_applied: set[str]
) -> None:
    plain, whole = loss_with(False, global_batch, patches_applied)
    assert not patches_applied
    value, grad = loss_with(True, global_batch, patches_applied)
    # What is logged is the sum, of which TorchTitan makes the mean afterwards.
    assert value == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(grad, whole / (sequences * 5))
    assert patches_applied == {"pipeline-gradients-per-token"}


def moe_layer(shared: bool, score_before_experts: bool) -> Any:
    layer = nn.Module()
    layer.router = nn.Identity()
    layer.shared_experts = nn.Identity() if shared else None
    layer.reorderer = nn.Identity()
    layer.score_before_experts = score_before_experts
    return layer


@pytest.mark.parametrize("etp", [None, object()], ids=["ETP 1", "ETP = TP"])
@pytest.mark.parametrize("ep", [None, object()], ids=["EP 1", "EP"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_only_terms_of_the_scores_gradient_are_summed(
    ep: Any,
    etp: Any,
    shared: bool,
    before: bool,
    patches_applied: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A score before an expert that TP cuts has the whole gradient: a sum counts it TP times."""
    from torchtitan.models.llama4.infra import parallelize

    from cookbook.titan.tt_0_2_2.expert_parallel import apply_moe_ep_tp
    from cookbook.titan.tt_0_2_2.quantized_a2a import Precisions

    monkeypatch.setattr(parallelize, "apply_moe_ep_tp", lambda *_, **__: None)
    layer = moe_layer(shared, before)
    model: Any = SimpleNamespace(layers={"0": SimpleNamespace(moe=layer, moe_enabled=True)})
    meshes: Any = {"tp_mesh": object(), "ep_mesh": ep, "etp_mesh": etp}
    apply_moe_ep_tp(Precisions(False, False), model, **meshes)
    is_share = ep is not None and etp is None
    is_term = is_share or not before
    assert bool(layer.router._forward_hooks) == is_term
    # Only a share of a sequence needs to know the sequence's length.
    assert bool(layer._forward_pre_hooks) == is_share
    labels = {"router-gradients-summed-over-tp"} if is_term else set()
    assert patches_applied == labels | (
        {"shared-expert-gradients-not-summed-over-tp"} if shared else set()
    )


def test_without_tp_nothing_is_summed(
    patches_applied: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.models.llama4.infra import parallelize

    from cookbook.titan.tt_0_2_2.expert_parallel import apply_moe_ep_tp
    from cookbook.titan.tt_0_2_2.quantized_a2a import Precisions

    monkeypatch.setattr(parallelize, "apply_moe_ep_tp", lambda *_, **__: None)
    layer = moe_layer(True, False)
    model: Any = SimpleNamespace(layers={"0": SimpleNamespace(moe=layer, moe_enabled=True)})
    apply_moe_ep_tp(Precisions(False, False), model, ep_mesh=object())
    assert not layer.router._forward_hooks and not patches_applied
