"""Forced routing for benchmarks: round-robin, as TorchTitan deals experts, or at random.

TorchTitan's forced balance deals experts 8t..8t+7 to token t: at EP 32 each token goes to one rank.
Random experts go to as many ranks as trained routing's. They come from a table on each router, made
once: recomputation deals alike, and the router compiles as one graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn as nn

from cookbook.titan.tt_0_2_2.router_load import moe_layers
from cookbook.titan.tt_0_2_2.versions import refuse

TRAINED, ROUND_ROBIN, RANDOM = "trained", "round_robin", "random"


def chosen_routing(job_config: Any) -> str:
    """Return the job's routing; TorchTitan's `debug.moe_force_load_balance` is round-robin."""
    debug = job_config.debug
    if not debug.moe_force_load_balance:
        return str(debug.moe_routing)
    if debug.moe_routing == RANDOM:
        raise refuse(
            "debug.moe_force_load_balance deals experts round-robin, debug.moe_routing=random "
            "at random; leave one of them out"
        )
    return ROUND_ROBIN


def deal_experts(
    router: Any, num_tokens: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Deal distinct experts uniformly under the router's own group limit, (tokens, top k) int16."""
    draws = torch.rand(num_tokens, router.num_experts, generator=generator, device=device)
    if router.num_expert_groups is not None:
        groups = torch.rand(
            num_tokens, router.num_expert_groups, generator=generator, device=device
        )
        open_groups = torch.zeros_like(groups, dtype=torch.bool)
        open_groups.scatter_(1, groups.topk(router.num_limited_groups).indices, True)
        closed = ~open_groups.repeat_interleave(router.num_experts // groups.shape[1], 1)
        draws = draws.masked_fill(closed, -1.0)
    return draws.topk(router.top_k).indices.to(torch.int16)


def route_at_random(
    model: nn.Module, parallel_dims: Any, job_config: Any, device: torch.device
) -> None:
    """Set a table on each router of `model`, the whole or a stage; call before compiling.

    Each sequence of all ranks' batches has a seed: TP ranks, which route the same tokens, get the
    same table, and DP ranks may share the batch in any way. Microbatches of a pipeline are not told
    apart: all of them are dealt the experts of the rank's first.
    """
    mesh = parallel_dims.get_optional_mesh("loss")
    rank = 0 if mesh is None else mesh.get_local_rank()
    training = job_config.training
    batch, num_tokens = training.local_batch_size, training.seq_len // parallel_dims.cp
    for layer, moe in moe_layers([model]).items():
        tables = []
        for sequence in range(rank * batch, (rank + 1) * batch):
            seed = hash((job_config.debug.seed or 0, layer, sequence)) & (1 << 62) - 1
            generator = torch.Generator(device).manual_seed(seed)
            tables.append(deal_experts(moe.router, num_tokens, generator, device))
        moe.router.cookbook_dealt = torch.cat(tables)
        # No door: the router calls this method where its load is forced.
        moe.router._debug_force_load_balance_routing = MethodType(_look_up, moe.router)


def _look_up(router: Any, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table, num_tokens = router.cookbook_dealt, scores.shape[0]
    if num_tokens > table.shape[0]:
        # A larger batch, of a validation perhaps.
        table = table.repeat(-(-num_tokens // table.shape[0]), 1)
    experts = table[:num_tokens].long()
    return experts, scores.gather(1, experts)


def observe_routing(model_parts: Iterable[nn.Module]) -> frozenset[str]:
    """Return the routing of this rank's MoE layers."""
    routers = [moe.router for moe in moe_layers(model_parts).values()]
    return frozenset(
        TRAINED
        if not router._debug_force_load_balance
        else RANDOM
        if hasattr(router, "cookbook_dealt")
        else ROUND_ROBIN
        for router in routers
    )
