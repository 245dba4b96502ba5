"""Routed experts whose activations are scored: the same gradients, and a product less again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.test_titan_recomputation import GROUPED, Computed

pytestmark = pytest.mark.titan

NIGHTLY_INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly)
DIM, HIDDEN, SIZES = 32, 16, [8, 24, 16]
ROWS = sum(SIZES)
Run = tuple[list[torch.Tensor], dict[str, int]]


def save_grouped_gemms() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    from cookbook.titan.tt_0_2_2.recomputation import SaveList

    listed = SaveList([torch.ops.aten._grouped_mm.default])
    policy: Any = torch.utils.checkpoint.CheckpointPolicy

    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.MUST_SAVE if operator in listed else policy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(choose)
    return forward, again


RECOMPUTED: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=save_grouped_gemms),
}


def layer() -> Any:
    from torchtitan.models.moe.moe import GroupedExperts

    torch.manual_seed(0)
    experts = GroupedExperts(DIM, HIDDEN, len(SIZES), use_grouped_mm=True)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, DIM, generator=generator)
    scores = torch.rand(ROWS, 1, generator=generator)
    return rows.requires_grad_(), scores.requires_grad_(), torch.tensor(SIZES, dtype=torch.int32)


def scored(mode: str, backend: str | None) -> Run:
    """Outputs and gradients, and which operators ran how often."""
    from cookbook.titan.tt_0_2_2.row_kernels import ProbsOnActivations

    compute = ProbsOnActivations()
    if backend:
        compute.compile(backend)
    experts, (rows, scores, sizes) = layer(), inputs()
    ends = sizes.cumsum(0, dtype=torch.int32)
    upstream = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(2))
    around = RECOMPUTED[mode] or (lambda function: function())
    shared = torch.ones(ROWS, DIM, requires_grad=True)

    def block() -> torch.Tensor:
        # What follows saves something, so that nothing before it is left out for being the last.
        return compute(experts, rows, scores, ends) + shared.sin()

    with Computed() as computed:
        out = around(block)
        out.backward(upstream)
    grads = [one.grad for one in (rows, scores, *experts.parameters())]
    found = [out.detach(), *(grad for grad in grads if grad is not None)]
    return found, dict(computed.calls)


def expected() -> list[torch.Tensor]:
    """The same with TorchTitan's experts, in float64, and scores on their outputs."""
    experts, (rows, scores, sizes) = layer().double(), inputs()
    experts.use_grouped_mm = False
    rows, scores = (one.detach().double().requires_grad_() for one in (rows, scores))
    upstream = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(2))
    out = experts(rows, sizes) * scores
    out.backward(upstream.double())
    out = out.detach() + torch.ones(()).sin()
    return [out, *(one.grad for one in (rows, scores, *experts.parameters()))]


@pytest.mark.parametrize("backend", [None, NIGHTLY_INDUCTOR])
def test_it_computes_what_scored_outputs_are(backend: str | None) -> None:
    found, _ = scored("none", backend)
    for one, exact in zip(found, expected(), strict=True):
        # A few roundings to BF16.
        assert float((one - exact).norm() / exact.norm()) < 0.01


# Three products forward and six backward; the first two again where they are not saved.
@pytest.mark.parametrize("backend", [None, NIGHTLY_INDUCTOR])
@pytest.mark.parametrize(("mode", "products"), [("full", 3 + 2 + 6), ("selective", 3 + 0 + 6)])
def test_the_last_product_is_neither_saved_nor_repeated(
    mode: str, products: int, backend: str | None
) -> None:
    found, calls = scored(mode, backend)
    assert calls[GROUPED] == products
    assert all(map(torch.equal, found, scored("none", backend)[0]))


class Products(Computed):
    """Which grouped GEMMs' results still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if str(func) == GROUPED:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out


@pytest.mark.parametrize("backend", [None, NIGHTLY_INDUCTOR])
@pytest.mark.parametrize(("mode", "kept"), [("none", 2), ("full", 0), ("selective", 2)])
def test_nobody_keeps_the_last_product(mode: str, kept: int, backend: str | None) -> None:
    from cookbook.titan.tt_0_2_2.row_kernels import ProbsOnActivations

    compute = ProbsOnActivations()
    if backend:
        compute.compile(backend)
    experts, given = layer(), inputs()
    around = RECOMPUTED[mode] or (lambda function: function())
    with Products() as products:
        total = around(lambda: compute(experts, *given).sum())
        gc.collect()
        alive = [not one.expired() for one in products.made]
    assert alive == [True] * kept + [False] * (3 - kept)
    total.backward()
