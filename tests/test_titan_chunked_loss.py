"""The loss without whole logits against the plain cross-entropy in float64."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook.titan.common.chunked_loss import chunked_cross_entropy
from tests.titan_ranks import run_ranks
from tests.titan_run import job, refused

pytestmark = pytest.mark.titan

BATCH, LENGTH, DIM, WORDS = 2, 25, 16, 37
TOKENS = BATCH * LENGTH


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and labels of packed documents, whose last tokens have no label."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, LENGTH, DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(WORDS, DIM, generator=generator, dtype=torch.float64)
    labels = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    labels[0, [4, 5, 17]] = labels[1, [0, 24]] = -100
    return hidden, weight, labels


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.T
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(
    loss_of: Any, dtype: torch.dtype = torch.float64, *args: Any
) -> tuple[torch.Tensor, ...]:
    """The loss, and the gradients of its mean over tokens."""
    hidden, weight, labels = batch()
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    loss = loss_of(hidden, weight, labels, *args)
    grads = torch.autograd.grad(loss / TOKENS, [hidden, weight])
    assert {grad.dtype for grad in grads} == {dtype}
    return loss.detach(), *grads


def apart(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("num_chunks", "backend"),
    [
        *((num_chunks, None) for num_chunks in (1, 7, TOKENS + 9)),
        (3, "aot_eager"),
        pytest.param(3, "inductor", marks=pytest.mark.nightly),
    ],
)
def test_equals_the_whole_loss(num_chunks: int, backend: str | None) -> None:
    found = gradients(chunked_cross_entropy, torch.float64, num_chunks, None, backend)
    assert apart(found, gradients(whole)) < 1e-13


def test_is_as_exact_as_the_whole_loss_in_low_precision() -> None:
    exact = gradients(whole)

    def released(hidden: Any, weight: Any, labels: Any) -> torch.Tensor:
        logits = (hidden @ weight.T).flatten(0, 1).float()
        return cross_entropy(logits, labels.flatten(), reduction="sum")

    chunked = gradients(chunked_cross_entropy, torch.bfloat16, 4)
    for mine, its, right in zip(chunked, gradients(released, torch.bfloat16), exact, strict=True):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (mine, its)]
        assert errors[0] < 1.2 * errors[1]


def test_a_second_backward_finds_the_same_gradients() -> None:
    hidden, weight, labels = batch()
    loss = chunked_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels, 4)
    first = torch.autograd.grad(loss * 5, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 5, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_every_label_needs_a_token() -> None:
    hidden, weight, labels = batch()
    with pytest.raises(RuntimeError, match="shape"):
        # These tokens fill all chunks.
        chunked_cross_entropy(hidden[:1], weight, labels, 5)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_whole_logits_never_exist() -> None:
    hidden, weight, labels = batch()
    with Largest() as largest:
        chunked_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), labels, 5
        ).backward()
    # A fifth of the logits, the hidden states, or the weight.
    assert largest.elements == max(TOKENS // 5 * WORDS, TOKENS * DIM, WORDS * DIM)
    assert largest.elements < TOKENS * WORDS / 2


def config() -> Any:
    # A compiled model has no say in how the loss is computed.
    compiled = SimpleNamespace(enable=True, components=["model"], backend="there is no such")
    return SimpleNamespace(loss=SimpleNamespace(num_chunks=3), compile=compiled)


def output_layer() -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Module()
    model.output = nn.Linear(16, 37, bias=False)
    return torch.randn(2, 8, 16, requires_grad=True), model, torch.randint(37, (2, 8))


def gradients_over_tp() -> tuple[torch.Tensor, ...]:
    """Of an output layer that is cut over two ranks, for this rank's part of each sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from cookbook.titan.tt_0_2_2 import loss_and_optimizer as output_loss

    hidden, model, labels = output_layer()
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


def gradients_over_fsdp() -> tuple[torch.Tensor, ...]:
    """Of one that FSDP would shard again after its forward; two ranks have the same batch."""
    from torch.distributed.fsdp import fully_shard

    from cookbook.titan.tt_0_2_2 import loss_and_optimizer as output_loss
    from cookbook.titan.tt_0_2_2.cpu import sum_gradients_in_fsdp

    hidden, model, labels = output_layer()
    output_loss.hand_on(model)
    fully_shard(model.output, reshard_after_forward=True)
    fully_shard(model)
    output_loss.keep_gathered(model)
    sum_gradients_in_fsdp(model)
    loss = output_loss.build_chunked_loss(config())(model.output(hidden), labels)
    loss.backward()
    return loss.detach(), hidden.grad, model.output.weight.grad.full_tensor()


@pytest.mark.parametrize("over", [gradients_over_tp, gradients_over_fsdp])
def test_an_output_layer_on_two_ranks_has_the_gradients_of_one(over: Callable[[], Any]) -> None:
    hidden, model, labels = output_layer()
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
    from cookbook.titan.tt_0_2_2.loss_and_optimizer import build_chunked_loss

    torch.manual_seed(0)
    hidden: Any = torch.randn(2, 7, 16)
    weight, labels = torch.randn(40, 16), torch.randint(40, (2, 7))
    hidden.output_weight = weight
    loss = build_chunked_loss(config())
    for dtype in (torch.bfloat16, torch.float32):
        expected = chunked_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, 3)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            assert loss(hidden, labels).equal(expected)


def test_an_output_layer_that_a_converter_replaced_is_refused(assets: Path, tmp_path: Path) -> None:
    options = (
        "--model.converters=quantize.linear.float8",
        "--quantize.linear.float8.filter_fqns=moe",
        "--cookbook.no_self_check",
        "--loss.num_chunks=3",
    )
    reason = refused(1, job(assets, tmp_path, *options))
    assert "made it a FP8Linear; add output to their filter_fqns" in reason
