"""The loss without whole logits against the plain cross-entropy in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook.titan.common.chunked_loss import VocabularyShard, chunked_cross_entropy
from tests.titan_ranks import run_ranks

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
    loss_of: Any, dtype: torch.dtype = torch.float64, *args: Any, batches: int = 1
) -> tuple[torch.Tensor, ...]:
    """The loss, and the gradients of its mean over tokens, accumulated over `batches`."""
    hidden, weight, labels = batch()
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    losses = []
    for number in range(batches):
        loss = loss_of(hidden * (number + 1), weight, labels, *args)
        (loss / (batches * TOKENS)).backward()
        losses.append(loss.detach())
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    return torch.stack(losses).sum(), hidden.grad, weight.grad


def apart(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("num_chunks", [1, 7, TOKENS + 9])
def test_equals_the_whole_loss(num_chunks: int) -> None:
    assert apart(gradients(chunked_cross_entropy, torch.float64, num_chunks), gradients(whole)) < (
        1e-13
    )


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
def test_equals_the_whole_loss_when_compiled(backend: str) -> None:
    found = gradients(chunked_cross_entropy, torch.float64, 3, None, backend)
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


@pytest.mark.nightly
def test_finite_differences_agree() -> None:
    hidden, weight, labels = batch()
    inputs = (hidden.requires_grad_(), weight.requires_grad_(), labels, 3)
    assert torch.autograd.gradcheck(chunked_cross_entropy, inputs)


def test_a_second_backward_finds_the_same_gradients() -> None:
    hidden, weight, labels = batch()
    loss = chunked_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels, 4)
    first = torch.autograd.grad(loss * 5, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 5, (hidden, weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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


def run_shard() -> tuple[torch.Tensor, ...]:
    """The loss and gradients of a vocabulary that is cut over the ranks, unevenly."""
    hidden, weight, labels = batch()
    rows = torch.arange(WORDS).chunk(dist.get_world_size())[dist.get_rank()]
    mine = weight[rows].requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    shard = VocabularyShard(int(rows[0]), group)
    loss = chunked_cross_entropy(hidden.requires_grad_(), mine, labels, 4, shard)
    (loss / TOKENS).backward()
    assert hidden.grad is not None and mine.grad is not None
    return loss.detach(), hidden.grad, mine.grad


def test_equals_the_whole_loss_where_tp_cuts_the_vocabulary() -> None:
    ranks = run_ranks(run_shard, 3)
    assert len({float(loss) for loss, _, _ in ranks}) == 1
    terms = sum(hidden for _, hidden, _ in ranks)
    found = (ranks[0][0], terms, torch.cat([weight for _, _, weight in ranks]))
    assert apart(found, gradients(whole)) < 1e-13
