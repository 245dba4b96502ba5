"""The operator for attention within documents, against FlexAttention with TorchTitan's masks."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.common.varlen_attention import (
    AttendedLength,
    bounds_capacity,
    cumulative_lengths,
    document_bounds,
    document_ends,
)
from tests.attention_batches import (
    EOS,
    LENGTH,
    PACKINGS,
    SCALE,
    block_mask,
    flex,
    random_inputs,
    tokens_of,
)

pytestmark = [
    pytest.mark.titan,
    # What is not compiled says that it is slow.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def cu_seqlens_of(tokens: torch.Tensor, capacity: int = LENGTH) -> torch.Tensor:
    return cumulative_lengths(document_bounds(document_ends(tokens, EOS), capacity))


def attend(inputs: Sequence[torch.Tensor], cu_seqlens: torch.Tensor) -> torch.Tensor:
    batch, length = inputs[0].shape[:2]
    q, k, v = (x.flatten(0, 1) for x in inputs)
    out = varlen.varlen_attention(q, k, v, cu_seqlens, length, SCALE)
    return out.unflatten(0, (batch, length))


@pytest.mark.parametrize("name", PACKINGS)
def test_output_and_gradients_are_those_of_flex_attention(name: str) -> None:
    tokens = tokens_of(PACKINGS[name])
    *inputs, grad = random_inputs(len(tokens))
    out = attend(inputs, cu_seqlens_of(tokens))
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    torch.testing.assert_close(found, flex(inputs, grad, tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_bf16_is_computed_in_float32(dtype: torch.dtype, bound: float) -> None:
    tokens = tokens_of(PACKINGS["batch of 4"])
    *inputs, grad = random_inputs(len(tokens), dtype)
    out = attend(inputs, cu_seqlens_of(tokens))
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    precise = [x.detach().double().requires_grad_() for x in inputs]
    for one, other in zip(found, flex(precise, grad.double(), tokens), strict=True):
        assert one.dtype == dtype
        # Only results are rounded, by a part of 0.0023 on average in BF16.
        assert (one - other).norm() < bound * other.norm()


def test_the_operator_keeps_what_pytorch_asks_of_one() -> None:
    *inputs, _ = random_inputs(1, torch.float32)
    folded = [x.detach()[0].requires_grad_() for x in inputs]
    cu_seqlens = torch.tensor([0, 7, 7, LENGTH], dtype=torch.int32)
    operator = torch.ops.cookbook.varlen_attention.default
    torch.library.opcheck(operator, (*folded, cu_seqlens, 13, SCALE))
    _, lse = operator(*folded, cu_seqlens, 13, SCALE)
    # Its gradient would be dropped in silence.
    assert not lse.requires_grad


def test_what_follows_the_last_end_is_a_document_that_needs_room_too() -> None:
    """16 ends and then some more tokens: 17 documents, one more than there is room for."""
    tokens = torch.full((2, LENGTH), EOS + 1)
    tokens[0, :16] = EOS
    ends = document_ends(tokens, EOS)
    assert ends.sum(dim=1).tolist() == [17, 1]
    room = bounds_capacity(int(ends.sum(dim=1).max()), LENGTH)
    found = torch.unique_consecutive(cumulative_lengths(document_bounds(ends, room)))
    assert found.tolist() == [*range(17), LENGTH, 2 * LENGTH]


def test_every_batch_of_usual_documents_gets_the_same_room() -> None:
    # A sequence of C4 has 19 documents of 8192 tokens.
    assert {bounds_capacity(documents, 8192) for documents in range(65)} == {64}
    assert bounds_capacity(65, 8192) == 128
    assert bounds_capacity(8192, 8192) == 8192
    assert {bounds_capacity(documents, 256) for documents in range(17)} == {16}
    assert bounds_capacity(1, 1) == 1
    assert all(bounds_capacity(n, LENGTH) >= n for n in range(LENGTH + 1))


@pytest.mark.parametrize("name", PACKINGS)
def test_attended_length_is_that_of_the_mask(name: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    tokens = tokens_of(PACKINGS[name])
    mask = create_mask(block_mask(tokens).mask_mod, len(tokens), None, LENGTH, LENGTH, "cpu")
    attended = AttendedLength()
    assert attended.is_open
    attended.add(document_ends(tokens, EOS))
    assert attended.close() == pytest.approx(float(mask.sum() / tokens.numel()))
    assert not attended.is_open
    attended.add_whole(len(tokens), LENGTH)
    causal = (LENGTH + 1) / 2
    assert attended.close() == pytest.approx((float(mask.sum() / tokens.numel()) + causal) / 2)
    whole = AttendedLength()
    assert whole.close() is None
    whole.add(document_ends(tokens, None))
    assert whole.close() == causal


def _keep_attention(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = function == torch.ops.cookbook.varlen_attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)}


def in_a_layer(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Attention between two operations whose gradients need what they compute."""
    q, k, v = (x @ weight).view(len(x), 2, 24).split(8, -1)
    return varlen.varlen_attention(q, k, v, cu_seqlens, len(x), 0.3).flatten(1).sin()


@pytest.mark.parametrize("compiled", ["no", "inside", "around"])
@pytest.mark.parametrize(
    ("recompute", "times"), [(None, 1), ({}, 2), (_SELECTIVE, 1)], ids=["none", "full", "selective"]
)
def test_recomputation_and_compile_change_no_gradient(
    compiled: str, recompute: dict[str, Any] | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchTitan compiles the attention of an MoE layer inside, and a dense layer around."""
    calls: list[None] = []
    reference = varlen.reference_forward

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(None)
        return reference(*args)

    monkeypatch.setattr(varlen, "reference_forward", counted)
    torch._dynamo.reset()
    compile_ = partial(torch.compile, backend="aot_eager", fullgraph=True)
    call: Any = compile_(in_a_layer) if compiled == "inside" else in_a_layer
    if recompute is not None:
        call = partial(checkpoint, call, use_reentrant=False, **recompute)
    if compiled == "around":
        call = compile_(lambda *inputs, inner=call: inner(*inputs))
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((LENGTH, 16), (16, 48)))
    cu_seqlens = torch.tensor([0, 5, 5, 12, LENGTH], dtype=torch.int32)
    found, expected = (
        torch.autograd.grad(one(x, weight, cu_seqlens).square().sum(), (x, weight))
        for one in (call, in_a_layer)
    )
    torch.testing.assert_close(found, expected)
    assert len(calls) == times + 1


@pytest.mark.parametrize(
    ("capability", "found", "reason"),
    [
        (None, None, None),
        ((9, 0), SimpleNamespace(), None),
        ((10, 3), SimpleNamespace(), None),
        ((8, 0), SimpleNamespace(), "this one is SM80"),
        ((12, 0), SimpleNamespace(), "this one is SM120"),
        ((9, 0), None, "flash-attn-4) is not installed"),
        ((9, 0), ModuleNotFoundError(), "flash-attn-4) is not installed"),
    ],
)
def test_a_gpu_that_cannot_run_it_is_told_why(
    capability: Any, found: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(varlen, "find_spec", find_spec)
    if reason is None:
        assert varlen.why_not() is None
    else:
        assert reason in str(varlen.why_not())


def test_flops_are_those_of_one_document_a_sequence() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    *inputs, grad = random_inputs(2)
    cu_seqlens = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        out = attend(inputs, cu_seqlens)
        forward = counter.get_total_flops()
        torch.autograd.grad(out, inputs, grad)
    # Half of a square of scores for each of 2 sequences and 2 heads, 2 operations for each product.
    assert forward == 2 * 2 * (LENGTH**2 // 2) * 2 * (192 + 128)
    assert counter.get_total_flops() == forward + 2 * 2 * (LENGTH**2 // 2) * 2 * (3 * 192 + 2 * 128)


CU_SEQLENS = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
# Not what FlashAttention-4 takes where it is told nothing.
OTHER_SCALE = 0.7


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)


class Kernels:
    """FlashAttention-4 4.0.0b36 with its defaults, computed by the reference."""

    def __init__(self) -> None:
        self.is_deterministic: list[bool] = []

    def _packing(self, q: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, float]:
        """The documents and the scale, which must be the same for queries and keys."""
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        found, of_k = (options.pop(f"cu_seqlens_{name}", whole) for name in "qk")
        assert torch.equal(found, of_k)
        assert all(options.pop(f"max_seqlen_{name}") >= found.diff().max() for name in "qk")
        assert options.pop("causal")
        return found, options.pop("softmax_scale", q.shape[-1] ** -0.5)

    def _flash_attn_fwd(self, *inputs: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        packing = self._packing(inputs[0], options)
        assert options == {"return_lse": True}
        q, k, v = (x.as_subclass(torch.Tensor) for x in inputs)
        return *varlen.reference_forward(q, k, v, *packing), None, None, None

    def _flash_attn_bwd(self, *inputs: torch.Tensor, **options: Any) -> None:
        packing = self._packing(inputs[0], options)
        self.is_deterministic.append(options.pop("deterministic", False))
        q, k, v, out, dout, lse = inputs
        grads = varlen.reference_backward(dout, q, k, v, out, lse, *packing)
        assert options.keys() == {"dq", "dk", "dv"}
        for place, grad in zip(options.values(), grads, strict=True):
            place.copy_(grad)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_get_the_documents_and_the_scale(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels()
    cache = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.delenv(cache, raising=False)
    monkeypatch.setitem(sys.modules, varlen.INTERFACE, cast(Any, kernels))
    monkeypatch.setattr(varlen, "ran", set())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)

    def gradients(kind: type[torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(20, 2, dim).as_subclass(kind) for dim in (24, 24, 16))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = varlen.varlen_attention(q, k, v, CU_SEQLENS, 8, OTHER_SCALE)
        grads = torch.autograd.grad(out, inputs, torch.randn(20, 2, 16))
        return [x.detach().as_subclass(torch.Tensor) for x in (out, *grads)]

    found = gradients(OnGpu)
    assert varlen.ran == {"flash_attention_4"}
    torch.testing.assert_close(found, gradients(torch.Tensor))
    assert kernels.is_deterministic == [is_deterministic]
    # Otherwise each process would compile the kernels.
    assert os.environ[cache] == "1"
