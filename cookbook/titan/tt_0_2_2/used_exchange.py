"""How a cell's dispatch and combine are proved: by an MoE layer of its own kind, parallelized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import build_moe

from cookbook.titan.common.token_shard import TokenShard
from cookbook.titan.selftest.cases import Error, Use
from cookbook.titan.selftest.exchange import (
    ExchangeShape,
    FactorExperts,
    FixedRouter,
    exchange_errors,
    inputs_of,
)
from cookbook.titan.tt_0_2_2.mxfp8 import Precisions
from cookbook.titan.tt_0_2_2.parallelize import apply_moe_ep_tp


def exchange_of(
    job_config: Any, dims: ParallelDims, model_args: Any, device: str, tokens: int
) -> Iterator[Use]:
    """Their one use; none where no token is sent, or an expert is cut over TP ranks."""
    if dims.ep == 1 or dims.etp > 1:
        return
    # Several sequences, each a multiple of TP.
    length = max(tokens // 3 // dims.tp, 1) * dims.tp
    shape = ExchangeShape(
        batch=3,
        length=length,
        features=model_args.dim,
        experts=model_args.moe_args.num_experts,
        top_k=model_args.moe_args.top_k,
        ep=dims.ep,
        tp=dims.tp,
    )
    precisions = Precisions.of(job_config)
    backend = "mxfp8_a2a" if precisions.any else model_args.moe_impl

    def compare() -> Iterator[Error]:
        options = {
            "chunks": job_config.deepep.num_chunks,
            "row_kernels": job_config.cookbook.row_kernels,
        }
        return _compare(shape, precisions, options, dims, model_args, device)

    instead = "deepep" if backend == "standard" else "standard"
    yield Use(
        f"dispatch and combine {backend}",
        str(shape),
        compare,
        f"EP backend {instead} does without it",
        collective=True,
    )


def _compare(
    shape: ExchangeShape,
    precisions: Precisions,
    options: dict[str, Any],
    dims: ParallelDims,
    model_args: Any,
    device: str,
) -> Iterator[Error]:
    tp_mesh, ep_mesh = dims.get_optional_mesh("tp"), dims.get_optional_mesh("ep")
    assert ep_mesh is not None
    dp_rank = torch.distributed.get_rank() // dims.tp
    given = inputs_of(shape, dp_rank, device)
    layer = _layer(model_args, given.scores, given.experts, device)
    block = nn.Module()
    block.moe, block.moe_enabled = layer, True
    apply_moe_ep_tp(
        precisions,
        SimpleNamespace(layers={"0": block}),
        tp_mesh=tp_mesh,
        ep_mesh=ep_mesh,
        etp_mesh=None,
        ep_etp_mesh=None,
        **options,
        use_deepep=model_args.moe_impl == "deepep",
    )
    share = None if tp_mesh is None else TokenShard.of_mesh(shape.length, tp_mesh)
    quantized = (precisions.dispatch_forward, precisions.combine_backward)
    yield from exchange_errors(shape, given, layer, share, ep_mesh.get_group(), quantized)


def _layer(model_args: Any, scores: torch.Tensor, experts: torch.Tensor, device: str) -> Any:
    """The cell's MoE layer without shared experts, routed as told, with factors as experts."""
    moe_args = replace(model_args.moe_args, num_shared_experts=0, load_balance_coeff=None)
    with torch.device("meta"):
        layer: Any = build_moe(
            moe_args, model_args.dim, model_args.moe_inter_dim, model_args.moe_impl
        )
    layer.router = FixedRouter(scores, experts, moe_args.num_experts)
    layer.experts = FactorExperts(moe_args.num_experts, device)
    layer.tokens_per_expert = torch.zeros(moe_args.num_experts, device=device)
    return layer
