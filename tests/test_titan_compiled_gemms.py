"""Dense GEMMs of compiled functions: what is named in a save list is computed once, and kept."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.test_titan_recomputation import SELECTIVE, Computed
from tests.titan_ranks import run_ranks
from tests.titan_run import DEEPEP, EP2, NUM_HEADS, NUM_LAYERS, active, job, train, write_assets

pytestmark = [pytest.mark.titan, pytest.mark.nightly]

HIDDEN, INNER = 32, 16
LATENTS, VALUES = 128, 96
MM, WRITTEN = "cookbook.mm.default", "aten.mm.out"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    import torch._inductor.config as inductor

    with inductor.patch(post_grad_custom_post_pass=None):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """GEMMs whose outputs the backward does not read: turned, like queries, and added.

    What follows a GEMM has its shape, so that Inductor would write it into the same memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.narrow = nn.Linear(HIDDEN, INNER, bias=False)
        self.wide = nn.Linear(INNER, HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        queries = self.queries(x) * angles.cos() + self.wide(self.narrow(x)) * angles.sin()
        return x + self.out(torch.nn.functional.silu(queries)) * angles


def step(compiled: bool, save: bool) -> tuple[list[torch.Tensor], Counter[str]]:
    """Gradients of a recomputed block, and how often each operator ran."""
    torch.manual_seed(0)
    block: Any = Block()
    parameters = list(block.parameters())
    if compiled:
        block = torch.compile(block, fullgraph=True)
    x, angles = torch.randn(64, HIDDEN, requires_grad=True), torch.randn(64, HIDDEN)
    kept = getattr(torch.ops.cookbook, "mm", None)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = save and kept is not None and func == kept.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with Computed() as computed:
        y = checkpoint(block, x, angles, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
    return [x.grad, *(one.grad for one in parameters)], computed.calls


def test_what_is_saved_is_computed_once_and_right() -> None:
    from cookbook.titan.tt_0_2_2.recomputation import show_gemms

    expected, _ = step(compiled=False, save=False)
    show_gemms(least_inner=HIDDEN)
    again, calls = step(compiled=True, save=False)
    saved, fewer = step(compiled=True, save=True)
    for one, other, exact in zip(saved, again, expected, strict=True):
        assert torch.equal(one, other)
        assert torch.allclose(one, exact, rtol=1e-4, atol=1e-5)
    # Three of an inner dimension of 32; the fourth, and all of the backward, as Inductor has them.
    assert (calls[MM], fewer[MM]) == (6, 3)
    assert calls[WRITTEN] == fewer[WRITTEN] > 2


def train_and_count(argv: list[str]) -> dict[str, Any]:
    """What a rank trains, and by the weights' shape how often the operator multiplied with them.

    And whether one of its products was still there when the next was made.
    """
    from torchtitan.models.deepseek_v3 import deepseekv3_args
    from torchtitan.protocols.train_spec import get_train_spec

    from cookbook.titan.tt_0_2_2 import recomputation

    # Latents shorter than the hidden size, and no two weights of one shape.
    for flavors in (deepseekv3_args, get_train_spec("deepseek_v3").model_args):
        flavors["debugmodel"].kv_lora_rank = LATENTS
        flavors["debugmodel"].v_head_dim = VALUES
    calls: Counter[tuple[int, ...]] = Counter()
    kept: set[tuple[int, ...]] = set()
    made: dict[tuple[int, ...], Any] = {}

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def mm(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            shape = tuple(weights.shape)
            calls[shape] += 1
            if shape in made and made[shape]() is not None:
                kept.add(shape)
            product = torch.mm(rows, weights)
            made[shape] = weakref.ref(product.untyped_storage())
            return product

    vars(recomputation)["torch"] = Counting()
    return train(argv) | {"calls": dict(calls), "kept": kept}


def test_a_job_computes_each_once_and_trains_the_same(tmp_path: Path) -> None:
    write_assets(tmp_path)
    options = (*EP2, *DEEPEP, "--deepep.score_activations")
    save = "--activation_checkpoint.op_sac_save_list=attention,communication,grouped_mm,mm"
    compiled = ("--compile.enable", "--compile.components=model")
    eager, run = (
        run_ranks(train_and_count, 2, job(tmp_path, tmp_path / name, *words), seconds=200)[0]
        for name, words in {"a": options, "b": (*options, *SELECTIVE, save, *compiled)}.items()
    )
    assert run["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert run["grad_norms"] == pytest.approx(eager["grad_norms"], rel=1e-3)
    assert active(run)["saved"] == "communication and grouped_mm and mm"
    assert not eager["calls"]
    steps, routed = len(run["losses"]), NUM_LAYERS - 1
    hidden, shared, values = 256, 512, NUM_HEADS * VALUES
    # The shared experts' gate and up are saved. What comes down is not, nor is it computed again.
    assert run["calls"][hidden, shared] == 2 * steps * routed
    assert run["calls"][shared, hidden] == steps * routed
    # So is attention's output, which the dense layer has too.
    assert run["calls"][values, hidden] == steps * NUM_LAYERS
    assert {(hidden, shared), (values, hidden)} <= run["kept"]
    assert (shared, hidden) not in run["kept"]
    # Keys and values come from the latents, which are short.
    assert not [shape for shape in run["calls"] if shape[0] == LATENTS]
