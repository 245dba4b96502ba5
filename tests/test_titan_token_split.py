"""What a DeepEP layer sends over TP, in which order, and that its gradients are whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_titan_deepep_parts import DIM, TOKENS, TOP_K, note_exchanges, parallel_layer
from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

TP, BATCH = 2, 2
WHOLE = BATCH * TOKENS * DIM
SCORES = BATCH * TOKENS * TOP_K
Collectives = Counter[tuple[str, int]]


class Sent(TorchDispatchMode):
    """The collectives over TP, by name and how many numbers each rank puts in."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.collectives: Collectives = Counter()
        self.order = order

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch.compile does not compile below the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor

        # What these send and wait for is seen where they compute with their local tensors.
        if any(issubclass(kind, (AsyncCollectiveTensor, DTensor)) for kind in types):
            return NotImplemented
        namespace, _, name = str(func).removesuffix(".default").partition(".")
        if namespace in ("c10d", "_c10d_functional") and "alltoall" not in name:
            values = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            name = {"allreduce_": "all_reduce"}.get(name, name)
            # The maxima by which FP8 scales rows are fewer.
            if values.numel() >= SCORES:
                self.order.append(name)
                if name != "wait_tensor":
                    self.collectives[name, values.numel()] += 1
        return func(*args, **(kwargs or {}))


def to_float8(layer: Any) -> None:
    """As TorchTitan's converter, with products that every machine computes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(layer.shared_experts, config=config)


def drop_shared_experts(layer: Any) -> None:
    layer.shared_experts = None


def freeze_shared_experts(layer: Any) -> None:
    layer.shared_experts.requires_grad_(False)


def as_in_a_job(layer: Any, how: str) -> Any:
    """The layer with compiled children, or recomputed."""
    from torchtitan.config.job_config import ActivationCheckpoint

    from cookbook.titan.tt_0_2_2.recomputation import apply_ac

    if "compiled" in how:
        # As TorchTitan's apply_compile: every child but the experts, as one graph each.
        for name in ("router", "shared_experts"):
            child = torch.compile(getattr(layer, name), backend="aot_eager", fullgraph=True)
            setattr(layer, name, child)
    if "recomputed" not in how:
        return layer
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": layer})
    config = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    apply_ac(["communication"], 0, model, config, op_sac_save_list=set())
    return model.layers["0"]


def whole_input() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64, generator=generator)


def sent_in_backward(how: str, change: Any = None) -> tuple[Collectives, list[str]]:
    """The collectives of one backward, and the order of what was sent and waited for."""
    done: list[str] = []
    note_exchanges(done)
    layer = as_in_a_job(parallel_layer(TP, **({"change": change} if change else {})), how)
    x = whole_input().chunk(TP, dim=1)[dist.get_rank()].clone().requires_grad_()
    out = layer(x)
    done.clear()
    with Sent(done) as sent:
        out.square().sum().backward()
    return sent.collectives, done


ONCE = {
    # The gradient of the output, for the shared experts.
    ("all_gather_into_tensor", WHOLE // TP): 1,
    ("reduce_scatter_tensor", WHOLE): 1,
    ("all_reduce", SCORES): 1,
}


@pytest.mark.parametrize("change", [None, to_float8])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_backward_sums_the_whole_once_and_while_rows_are_on_their_way(
    how: str, change: Any
) -> None:
    for collectives, order in run_ranks(sent_in_backward, TP, how, change):
        assert collectives == ONCE
        # It starts before the layer waits for the gradients of what it had dispatched, and nobody
        # waits for it before that.
        behind = order[order.index("combine") :]
        assert behind[:4] == ["combine", "reduce_scatter_tensor", "wait", "wait_tensor"]


def test_a_recomputed_layer_gathers_again_and_keeps_its_sum() -> None:
    for collectives, _ in run_ranks(sent_in_backward, TP, "recomputed"):
        assert collectives == ONCE | {("all_gather_into_tensor", WHOLE // TP): 2}


def test_a_layer_without_shared_experts_sums_scores_alone() -> None:
    for collectives, _ in run_ranks(sent_in_backward, TP, "eager", drop_shared_experts):
        assert collectives == {("all_reduce", SCORES): 1}


def gradients(how: str) -> list[torch.Tensor]:
    """This rank's gradients, of its share of the input and of all parameters."""
    layer = as_in_a_job(parallel_layer(TP), how)
    x = whole_input().chunk(TP, dim=1)[dist.get_rank()].clone().requires_grad_()
    layer(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in found]


@pytest.mark.parametrize("how", ["compiled", "recomputed", "recomputed, compiled"])
def test_gradients_are_the_eager_layers(how: str) -> None:
    for found, expected in zip(
        *(run_ranks(gradients, TP, one) for one in (how, "eager")), strict=True
    ):
        torch.testing.assert_close(found, expected)


def input_gradient(tp: int, change: Any) -> torch.Tensor:
    """The gradient of the whole input, of the same batch on all ranks."""
    layer = parallel_layer(tp, change=change)
    x = whole_input().chunk(tp, dim=1)[dist.get_rank() % tp].clone().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    parts = [torch.empty_like(x.grad) for _ in range(TP)]
    dist.all_gather(parts, x.grad.contiguous())
    return torch.cat(parts[:tp], dim=1)


@pytest.mark.parametrize("change", [drop_shared_experts, freeze_shared_experts])
def test_the_inputs_gradient_needs_no_trained_shared_experts(change: Any) -> None:
    expected = run_ranks(input_gradient, TP, 1, change)[0]
    for found in run_ranks(input_gradient, TP, TP, change):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
