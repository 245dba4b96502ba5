"""Real Trainers on CPU ranks, with the loss over whole logits and without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy

from tests.titan_ranks import run_ranks
from tests.titan_run import EP2, EP4, PP2, TP2, active, job, refused, run

pytestmark = pytest.mark.titan

# Loss, gradient of the hidden states, gradient of the weight.
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

CHUNKED = "--loss.num_chunks=3"
ACCUMULATE = ("--training.global_batch_size=8",)
NO_LOSS_PARALLEL = ("--parallelism.disable_loss_parallel",)
COMPILED = ("--compile.enable", "--compile.components=loss", "--compile.backend=aot_eager")
FLOAT32 = ("--training.mixed_precision_param=float32",)
ALWAYS = ("--parallelism.fsdp_reshard_after_forward=always",)


@pytest.mark.parametrize(
    ("ranks", "options", "tolerance"),
    [
        # In BF16 both round, at different places: a part of 2**-9 over few tokens.
        pytest.param(2, (*EP2, *COMPILED), 1e-4, id="tp 1, bf16, compiled"),
        pytest.param(
            4, (*EP4, *TP2, *FLOAT32, *ACCUMULATE, *ALWAYS), 5e-6, id="tp 2, accumulated, resharded"
        ),
        pytest.param(
            *(4, (*EP4, *TP2, *FLOAT32, *NO_LOSS_PARALLEL), 5e-6),
            id="tp 2, loss replicated",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(4, (*TP2, *PP2, *FLOAT32, *COMPILED), 5e-6),
            id="tp 2, pp 2, compiled",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_losses_are_those_of_whole_logits(
    assets: Path, tmp_path: Path, ranks: int, options: tuple[str, ...], tolerance: float
) -> None:
    whole = run(assets, tmp_path / "a", ranks, *options, of_rank=-1)
    chunked = run(assets, tmp_path / "b", ranks, *options, CHUNKED, of_rank=-1)
    assert active(whole)["loss"] == "cross_entropy"
    assert active(chunked)["loss"] == "cross_entropy in 3 chunks"
    # The second step's loss has all gradients of the first in it.
    assert chunked["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    assert chunked["grad_norms"] == pytest.approx(whole["grad_norms"], rel=10 * tolerance)
    assert whole["losses"][0] > 5


def config(num_chunks: int = 3) -> Any:
    # A compiled model has no say in how the loss is computed.
    compiled = SimpleNamespace(enable=True, components=["model"], backend="there is no such")
    return SimpleNamespace(loss=SimpleNamespace(num_chunks=num_chunks), compile=compiled)


def batch() -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Module()
    model.output = nn.Linear(16, 37, bias=False)
    return torch.randn(2, 8, 16, requires_grad=True), model, torch.randint(37, (2, 8))


def gradients_over_tp() -> Gradients:
    """Of an output layer that is cut over two ranks, for this rank's part of each sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from cookbook.titan.tt_0_2_2 import loss_and_optimizer as output_loss

    hidden, model, labels = batch()
    output_loss.hand_on(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = output_loss.HandingOnColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(model.output, mesh, plan)
    mine = hidden.detach().chunk(2, 1)[mesh.get_local_rank()].clone().requires_grad_()
    loss = output_loss.build_chunked_loss(config())(model.output(mine), labels)
    loss.backward()
    return loss.detach(), mine.grad, model.output.weight.grad.full_tensor()


def gradients_over_fsdp() -> Gradients:
    """Of one that FSDP would shard again after its forward; two ranks have the same batch."""
    from torch.distributed.fsdp import fully_shard

    from cookbook.titan.tt_0_2_2 import loss_and_optimizer as output_loss
    from cookbook.titan.tt_0_2_2.cpu import sum_gradients_in_fsdp

    hidden, model, labels = batch()
    output_loss.hand_on(model)
    fully_shard(model.output, reshard_after_forward=True)
    fully_shard(model)
    output_loss.keep_gathered(model)
    sum_gradients_in_fsdp(model)
    loss = output_loss.build_chunked_loss(config())(model.output(hidden), labels)
    loss.backward()
    return loss.detach(), hidden.grad, model.output.weight.grad.full_tensor()


@pytest.mark.parametrize("over", [gradients_over_tp, gradients_over_fsdp])
def test_an_output_layer_on_two_ranks_has_the_gradients_of_one(
    over: Callable[[], Gradients],
) -> None:
    hidden, model, labels = batch()
    logits: torch.Tensor = model.output(hidden)
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    ranks = run_ranks(over, 2)
    for loss, _, of_weight in ranks:
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(of_weight, model.output.weight.grad)
    of_hidden = [rank[1] for rank in ranks]
    found = torch.cat(of_hidden, 1) if over is gradients_over_tp else of_hidden[0]
    torch.testing.assert_close(found, hidden.grad)


def test_without_fsdp_it_multiplies_in_the_type_of_autocast() -> None:
    from cookbook.titan.common.chunked_loss import chunked_cross_entropy
    from cookbook.titan.tt_0_2_2.loss_and_optimizer import build_chunked_loss

    torch.manual_seed(0)
    hidden: Any = torch.randn(2, 7, 16)
    weight, labels = torch.randn(40, 16), torch.randint(40, (2, 7))
    hidden.output_weight = weight
    loss = build_chunked_loss(config())
    low, high = (
        chunked_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, 3)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert loss(hidden, labels).equal(high) and not low.equal(high)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(hidden, labels).equal(low)


def test_an_output_layer_that_a_converter_replaced_is_refused(assets: Path, tmp_path: Path) -> None:
    options = (
        "--model.converters=quantize.linear.float8",
        "--quantize.linear.float8.emulate",
        "--quantize.linear.float8.recipe_name=rowwise",
        "--quantize.linear.float8.filter_fqns=moe",
        # A CPU has no FP8 rowwise kernel to prove.
        "--cookbook.no_self_check",
    )
    reason = refused(1, job(assets, tmp_path, *options, CHUNKED))
    assert "made it a Float8Linear; add output to their filter_fqns" in reason
