"""Routed experts with the routing scores applied to their activations, not to their outputs.

An expert's output is linear in its activation: the sum over a token's experts is the same but for
rounding. No gradient needs the outputs then: they are not kept, and recomputation stops before the
last product. Megatron Core applies "probs on activations" since v0.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cookbook.titan.tt_0_2_2.recomputation import last_product


class ProbsOnActivations:
    """The computation of `GroupedExperts.forward`, which takes no scores.

    Like TorchTitan's function it is compiled once for all layers, which are alike.
    """

    def __init__(self) -> None:
        self._activate: Callable[..., torch.Tensor] = _activate
        self._project: Callable[..., torch.Tensor] = group_products
        self.is_compiled = False

    def compile(self, backend: str) -> None:
        """Compile both halves; further calls change nothing."""
        if not self.is_compiled:
            self._activate = torch.compile(_activate, backend=backend, fullgraph=True)
            self._project = torch.compile(group_products, backend=backend, fullgraph=True)
            self.is_compiled = True

    def __call__(
        self, experts: Any, rows: torch.Tensor, scores: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return scored outputs (rows, features); their values are undefined in recomputation.

        Args:
            experts: TorchTitan's `GroupedExperts`.
            rows: (rows, features), in padded groups by expert.
            scores: (rows, 1) float32.
            ends: (local experts,) int32, where each group of rows ends.
        """
        w1, w2, w3 = local_weights(experts)
        if not experts.use_grouped_mm:
            activations = _activate(w1, w3, rows, scores, ends, grouped=False)
            return group_products(activations, w2, ends, grouped=False)
        # The number of rows differs in each layer and step.
        torch._dynamo.mark_dynamic(rows, 0)
        torch._dynamo.mark_dynamic(scores, 0)
        activations = self._activate(w1, w3, rows, scores, ends)
        torch._dynamo.mark_dynamic(activations, 0)
        with last_product():
            return self._project(activations, w2, ends).type_as(rows)


def _activate(
    w1: torch.Tensor,
    w3: torch.Tensor,
    rows: torch.Tensor,
    scores: torch.Tensor,
    ends: torch.Tensor,
    grouped: bool = True,
) -> torch.Tensor:
    # Grouped GEMMs take BF16 only. Cast once, so that one copy is kept.
    rows = rows.bfloat16() if grouped else rows
    activations = torch.nn.functional.silu(group_products(rows, w1, ends, grouped))
    activations = activations * group_products(rows, w3, ends, grouped)
    return (activations * scores).type_as(activations)


def group_products(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, grouped: bool = True
) -> torch.Tensor:
    """Multiply each group of rows with its expert's weights (experts, out, in)."""
    if grouped:
        return torch._grouped_mm(rows, weights.bfloat16().transpose(-2, -1), offs=ends)
    # The last part belongs to no expert.
    *parts, rest = rows.tensor_split(ends.tolist())
    products = [part @ weight.T for part, weight in zip(parts, weights, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[1])])


def local_weights(experts: Any) -> list[torch.Tensor]:
    """Return this rank's part of the three weights of `GroupedExperts`."""
    weights = (experts.w1, experts.w2, experts.w3)
    return [w.to_local() if isinstance(w, DTensor) else w for w in weights]


experts_with_probs = ProbsOnActivations()
