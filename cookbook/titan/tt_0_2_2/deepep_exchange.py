"""The two exchanges of a DeepEP layer, sent while the shared experts compute, in both passes.

TorchTitan's operations wait at once for all exchanges but the combine of the forward. Here what
starts an exchange and what waits for it are autograd nodes of their own, and half of the shared
experts lies between them:

    node        forward                          backward
    leave       notes when the rows are ready    waits for the rows' gradients
      first half of the shared experts
    dispatch    sends the rows, and waits        starts to send their gradients back
      routed experts
    combine     starts to send the rows back     waits for their gradients
      second half of the shared experts
    arrive      waits for the rows               starts to send their gradients

The first half is in the queue of the GPU before the host waits for DeepEP's counts. In the backward
autograd runs the node first that was made last, which is this order from below. Another order would
cost time and nothing else: whoever reads what was sent has waited for it. Where the tokens are cut
into parts, each has its own exchange, and the experts lie between: `deepep.py` has that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torchtitan.distributed.deepep import deepep

# Both ends of an exchange on DeepEP's stream; its tensors are allocated there and kept for both.
_STREAMS = {"async_finish": True, "allocate_on_comm_stream": True}


@dataclass(eq=False)
class Exchange:
    """What the nodes of one layer and one forward tell one another.

    Attributes:
        ready: the event after which the rows may be sent.
        handle: DeepEP's, of the dispatch.
        sent: the event after which the last thing that was sent has come.
        received_gradients: from `arrive` to `combine`, (received, features).
    """

    ready: Any = None
    handle: Any = None
    sent: Any = None
    received_gradients: torch.Tensor | None = None


class Routing:
    """Where the rows of a layer go.

    Neither a tuple nor a dataclass: FSDP would look into it and cast the scores to BF16.

    Attributes:
        experts: (tokens, top k) int64, -1 for none.
        scores: (tokens, top k) float32.
    """

    def __init__(
        self, experts: torch.Tensor, scores: torch.Tensor, num_experts: int, exchange: Exchange
    ) -> None:
        self.experts = experts
        self.scores = scores
        self.num_experts = num_experts
        self.exchange = exchange


def leave(
    rows: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, Routing]:
    """Note that (tokens, features), and where they go, are there to be sent.

    Args:
        scores: (tokens, top k); what has none is not sent.
        experts: (tokens, top k).
    """
    exchange = Exchange()
    # All that is sent must have been asked for by now: float32, as DeepEP carries it, and dense.
    experts = experts.masked_fill(scores == 0, -1).contiguous()
    rows, scores = _Leave.apply(rows.contiguous(), scores.float().contiguous(), exchange)
    return rows, Routing(experts, scores, num_experts, exchange)


def dispatch(
    rows: torch.Tensor, routing: Routing, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Send what `leave` returned to the ranks of its experts.

    Returns:
        The rows received (received, features), their local experts (received, top k), -1 for
        experts elsewhere, their scores (received, top k), and the number of copies for each local
        expert, which DeepEP had to know to allocate the rows.
    """
    deepep.get_buffer(group, deepep.get_hidden_bytes(rows))
    received, experts, scores, counts = _Dispatch.apply(rows, routing.scores, routing)
    return received, experts, scores, counts.tolist()


def combine(rows: torch.Tensor, routing: Routing, is_needed: bool = True) -> torch.Tensor:
    """Start to send (received, features) back; what is returned is for `arrive` alone.

    Args:
        is_needed: whether anybody reads what comes, on any rank; where not, nothing is sent.
    """
    return _Combine.apply(rows, routing, is_needed)


def arrive(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Wait for what `combine` returned: (tokens, features), summed over the ranks of each token."""
    return _Arrive.apply(rows, exchange)


def _now() -> Any:
    """An event behind all that the GPU has been asked for so far."""
    return deepep.EventOverlap(deepep.EventHandle())


# Selective recomputation saves what operators return, and operators take nothing but tensors and
# numbers: the layer that is at its exchange.
_current = Exchange()


@torch.library.custom_op("cookbook::deepep_dispatch", mutates_args=())
def _send(
    rows: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    exchange, buffer = _current, deepep._buffer
    # Allocated on DeepEP's stream too: with `--debug.deterministic` PyTorch fills what it
    # allocates, and on another stream it overwrites the counts (asserts on the GPU, as released).
    per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
        experts, num_experts, previous_event=exchange.ready, **_STREAMS
    )
    received, local_experts, local_scores, counts, exchange.handle, sent = buffer.dispatch(
        x=rows,
        topk_idx=experts,
        topk_weights=scores,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=exchange.ready,
        **_STREAMS,
    )
    sent.current_stream_wait()
    return received, local_experts, local_scores, torch.tensor(counts, dtype=torch.int32)


@torch.library.custom_op("cookbook::deepep_combine", mutates_args=())
def _send_back(rows: torch.Tensor) -> torch.Tensor:
    exchange = _current
    combined, _, exchange.sent = deepep._buffer.combine(
        x=rows, handle=exchange.handle, previous_event=_now(), **_STREAMS
    )
    returned: torch.Tensor = combined
    return returned


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, scores: torch.Tensor, exchange: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        exchange.ready = _now()
        return rows.view_as(rows), scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor, scores: torch.Tensor) -> tuple[Any, ...]:
        ctx.exchange.sent.current_stream_wait()
        return rows, scores, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, scores: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, ...]:
        global _current
        ctx.exchange = _current = routing.exchange
        sent = _send(rows, scores, routing.experts, routing.num_experts)
        received, experts, received_scores, counts = sent
        ctx.mark_non_differentiable(experts, counts)
        return received, experts, received_scores, counts

    @staticmethod
    def backward(
        ctx: Any, received: torch.Tensor, _: Any, received_scores: torch.Tensor, __: Any
    ) -> tuple[Any, ...]:
        exchange = ctx.exchange
        rows, scores, exchange.sent = deepep._buffer.combine(
            x=received.contiguous(),
            handle=exchange.handle,
            topk_weights=received_scores.contiguous(),
            previous_event=_now(),
            **_STREAMS,
        )
        # Still on their way: nothing but `leave` reads them.
        return rows, scores, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, routing: Routing, is_needed: bool) -> torch.Tensor:
        global _current
        ctx.exchange = _current = routing.exchange
        if not is_needed:
            return rows.new_empty(len(routing.experts), rows.shape[1])
        return _send_back(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        exchange.sent.current_stream_wait()
        received, exchange.received_gradients = exchange.received_gradients, None
        return received, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        # Nothing was sent again where selective recomputation had saved the rows.
        if exchange.sent is not None:
            exchange.sent.current_stream_wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        # They have the shape of the rows that were received, which autograd would not take for
        # gradients of the input: so `combine` finds them at the exchange.
        exchange.received_gradients, *_, exchange.sent = deepep._buffer.dispatch(
            x=rows.contiguous(), handle=exchange.handle, previous_event=_now(), **_STREAMS
        )
        return rows, None
