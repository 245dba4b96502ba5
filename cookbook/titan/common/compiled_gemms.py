"""Dense GEMMs of compiled functions as an operator that selective recomputation sees.

Inductor gives a GEMM a buffer to write to, and a list of operators to save knows those only that
return what they compute. Where the list names dense GEMMs, a forward's are turned into calls of
`cookbook::mm`. Its outputs are kept by the list and by nobody else, often: the rotary embedding's
backward does not need the queries that it was given. So Inductor must not write over them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


@torch.library.custom_op("cookbook::mm", mutates_args=())
def multiply(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(rows, inner) times (inner, columns), as `aten::mm` has it."""
    return torch.mm(rows, weights)


@multiply.register_fake
def _like_output(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


def show_gemms(least_inner: int) -> None:
    """Turn GEMMs of the forwards that are compiled from now on into calls of the operator.

    Args:
        least_inner: of GEMMs with an inner dimension at least as long. It is what an element that
            is kept saves, in multiplications; a short one is not worth its memory.
    """
    _protect()
    inductor.post_grad_custom_post_pass = _ShowGemms(least_inner)


class _ShowGemms(CustomGraphPass):
    def __init__(self, least_inner: int) -> None:
        self._least_inner = least_inner

    def __call__(self, graph: torch.fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        # Nobody saves anything of a backward; AOTAutograd gives it the tangents.
        if any(node.name.startswith("tangents") for node in inputs):
            return
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            inner: Any = node.args[0].meta["val"].shape[1]
            if inner >= self._least_inner:
                node.target = torch.ops.cookbook.mm.default

    def uuid(self) -> Any:
        # Part of the key under which Inductor keeps what it has compiled.
        return get_hash_for_files((__file__,)), self._least_inner


@functools.cache
def _protect() -> None:
    """Tell Inductor that nothing may be written over what the operator returns."""
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    operator = torch.ops.cookbook.mm.default
    call = fallback_handler(operator, add_to_fallback_set=False)

    @register_lowering(operator, type_promotion_kind=None)
    def _keep(rows: Any, weights: Any) -> Any:
        out = call(rows, weights)
        V.graph.never_reuse_buffers.add(out.get_name())
        return out
