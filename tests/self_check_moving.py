"""Faults in what moves tokens' rows: to their experts' groups and back, and between ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.self_check_fault import (
    A2A,
    DEEPEP,
    EP2,
    GROUPS,
    STACK,
    TP2,
    Fault,
    Wrapper,
    instead,
    neighbours,
    neighbours_scales,
    with_argument,
    with_result,
    without_rows,
)


def neighbours_scales_of_cast(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    data, scale = made
    return neighbours_scales((scale, data))[::-1]


def one_slot_lost(plan: Any) -> Any:
    slots, copies = plan.slots.clone(), plan.copies.clone()
    token = int((slots >= 0).any(1).nonzero()[0])
    k = int((slots[token] >= 0).nonzero()[0])
    copies[slots[token, k]] = -1
    slots[token, k] = -1
    return replace(plan, copies=copies, slots=slots)


def plain_send(ctx: Any, tokens: torch.Tensor, *splits: Any) -> torch.Tensor:
    """The dispatch's forward in BF16."""
    from torch.distributed._functional_collectives import all_to_all_single

    ctx.input_splits, ctx.output_splits, ctx.group = splits[1], splits[0], splits[2]
    return torch.ops._c10d_functional.wait_tensor(all_to_all_single(tokens, *splits))


def folded_share(folded: torch.Tensor, share: Any) -> torch.Tensor:
    """The released cut: of the folded batch, so that a rank gets other sequences' positions."""
    ranks = share.length // (share.stop - share.start)
    return folded.chunk(ranks)[share.start // (share.stop - share.start)]


def _without_scores(original: Any) -> Wrapper:
    return lambda grouped, scores, *plan: original(grouped, None, *plan)


def _fill_unwritten(original: Any) -> Wrapper:
    def faulty(tokens: Any, scores: Any, copies: Any, slots: Any) -> Any:
        grouped = original(tokens, scores, copies, slots)
        grouped[copies < 0] = 0.5
        return grouped

    return faulty


def _next_experts_rows(original: Any) -> Wrapper:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        *_, plan = args
        return original(*args, **kwargs).roll(int(plan.sizes[0]), 0)

    return faulty


MOVING = (
    Fault(
        "a copy of a token lost",
        "rows to expert groups and back",
        DEEPEP,
        "cookbook.titan.selftest.rows.plan_groups",
        with_result(one_slot_lost),
    ),
    Fault(
        "scores left out",
        "rows to expert groups and back",
        DEEPEP,
        f"{GROUPS}._collect",
        _without_scores,
    ),
    Fault(
        "rows that fill groups up not zero",
        "rows to expert groups and back",
        DEEPEP,
        f"{GROUPS}._spread",
        _fill_unwritten,
    ),
    Fault(
        "scores' gradients of other copies",
        "rows to expert groups and back",
        DEEPEP,
        f"{GROUPS}._dot",
        with_result(neighbours(1)),
    ),
    Fault(
        "rows of the next expert",
        "dispatch and combine deepep",
        DEEPEP,
        f"{STACK}.deepep.spread",
        _next_experts_rows,
    ),
    Fault(
        "a token's sum halved",
        "dispatch and combine deepep",
        DEEPEP,
        f"{STACK}.deepep.arrive",
        with_result(
            lambda out: (
                out
                * (
                    1
                    - 0.5 * (torch.arange(len(out), device=out.device) == 5)[:, None].to(out.dtype)
                )
            )
        ),
    ),
    Fault(
        "parts of the tokens in another order",
        "dispatch and combine deepep",
        (*DEEPEP, "--deepep.num_chunks=2"),
        f"{STACK}.deepep.cut",
        with_result(lambda parts: parts[::-1]),
    ),
    Fault(
        "the last row not brought back",
        "dispatch and combine standard",
        EP2,
        "torchtitan.distributed.expert_parallel._unpermute",
        with_result(without_rows(slice(-1, None))),
    ),
    Fault(
        "received rows in another order",
        "dispatch and combine standard",
        EP2,
        "torchtitan.distributed.expert_parallel._permute",
        with_argument(0, lambda rows: rows.roll(1, 0)),
    ),
    Fault(
        "sequences cut as one",
        "dispatch and combine standard",
        (*EP2, *TP2),
        f"{STACK}.parallelize.shard_tokens",
        instead(folded_share),
    ),
    Fault(
        "the router's gradient not summed over TP",
        "dispatch and combine standard",
        (*EP2, *TP2),
        f"{STACK}.parallelize.sum_gradient_over_tp",
        instead(lambda scores, mesh: scores),
    ),
    Fault(
        "one exchange of two not quantized",
        "dispatch and combine mxfp8_a2a",
        A2A,
        "torchao.prototype.moe_training.ep.a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.forward",
        instead(staticmethod(plain_send)),
    ),
    Fault(
        "scales of the neighbouring block sent",
        "dispatch and combine mxfp8_a2a",
        A2A,
        f"{STACK}.mxfp8._cast_with_operations",
        with_result(neighbours_scales_of_cast),
    ),
)
