"""How FlashAttention-4's kernels are called, by stand-ins; only a GPU says what they compute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cookbook.titan.any_stack import varlen_attention as varlen

pytestmark = pytest.mark.titan

CU_SEQLENS = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
# Not what FlashAttention-4 takes where it is told nothing.
SCALE = 0.7


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)


class Kernels:
    """Arguments of FlashAttention-4 4.0.0b36 with its defaults, computed by the reference."""

    def __init__(self) -> None:
        self.is_deterministic: list[bool] = []

    @staticmethod
    def _cu_seqlens(q: torch.Tensor, of_q: Any, of_k: Any, *most: int | None) -> torch.Tensor:
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        found: torch.Tensor = whole if of_q is None else of_q
        assert torch.equal(found, whole if of_k is None else of_k)
        assert all(bound is None or bound >= found.diff().max() for bound in most)
        return found

    def _flash_attn_fwd(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        assert causal and return_lse
        bounds = self._cu_seqlens(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        q, k, v = (x.as_subclass(torch.Tensor) for x in (q, k, v))
        return *varlen.reference_forward(q, k, v, bounds, scale), None, None, None

    def _flash_attn_bwd(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        deterministic: bool = False,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        assert causal
        self.is_deterministic.append(deterministic)
        bounds = self._cu_seqlens(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        grads = varlen.reference_backward(dout, q, k, v, out, lse, bounds, scale)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_get_the_documents_and_the_scale(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels()
    monkeypatch.setattr(varlen, "_kernels", lambda: kernels)
    monkeypatch.setattr(varlen, "ran", set())
    was = torch.are_deterministic_algorithms_enabled()

    def gradients(kind: type[torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(20, 2, dim).as_subclass(kind) for dim in (24, 24, 16))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = varlen.varlen_attention(q, k, v, CU_SEQLENS, 8, SCALE)
        grads = torch.autograd.grad(out, inputs, torch.randn(20, 2, 16))
        return [x.detach().as_subclass(torch.Tensor) for x in (out, *grads)]

    torch.use_deterministic_algorithms(is_deterministic)
    try:
        found = gradients(OnGpu)
    finally:
        torch.use_deterministic_algorithms(was)
    assert varlen.ran == {"flash_attention_4"}
    assert kernels.is_deterministic == [is_deterministic]
    for one, other in zip(found, gradients(torch.Tensor), strict=True):
        torch.testing.assert_close(one, other)
    assert kernels.is_deterministic == [is_deterministic]


@pytest.mark.parametrize("chosen", [None, "0"])
def test_compiled_kernels_are_kept_for_the_next_job(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-4 reads the variable when it is imported; what the user has set stays."""
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    package = tmp_path / "flash_attn/cute"
    package.mkdir(parents=True)
    (package / "interface.py").write_text(f"import os\nCACHE = os.environ.get('{name}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Each is set first, so that it is as before when the test has ended.
    for module in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    found = varlen._kernels().CACHE
    assert found == (chosen or "1")
