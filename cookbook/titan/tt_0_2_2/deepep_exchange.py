"""The two exchanges of a DeepEP layer, sent while the shared experts compute, in both passes.

TorchTitan waits at once for all exchanges but the combine of the forward. Here the start of an
exchange and the wait for it are separate autograd nodes, with half of the shared experts between:

    node        forward                          backward
    leave       notes when the rows are ready    waits for the rows' gradients
      first half of the shared experts
    dispatch    sends the rows, and waits        starts to send their gradients back
      routed experts
    combine     starts to send the rows back     waits for their gradients
      second half of the shared experts
    arrive      waits for the rows               starts to send their gradients

The first half is in the GPU's queue before the host waits for DeepEP's counts. In the backward
autograd runs the latest node first, which is this order from below. Another order would only cost
time: each reader waits for the data that it reads. Each part of the tokens has its own exchange.
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
    """The state shared by the nodes of one layer and one forward.

    Attributes:
        ready: the event after which the rows may be sent.
        handle: DeepEP's, of the dispatch.
        sent: the event after which the latest transfer has arrived.
        received_gradients: from `arrive` to `combine`, (received, features).
    """

    ready: Any = None
    handle: Any = None
    sent: Any = None
    received_gradients: torch.Tensor | None = None


class Routing:
    """The destinations of a layer's rows.

    Neither a tuple nor a dataclass, in which FSDP would cast the scores to BF16.

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
    """Note that (tokens, features) and their routing are ready to be sent.

    Args:
        scores: (tokens, top k); a copy without a score is not sent.
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
    """Send the rows that `leave` returned to the ranks of their experts.

    Returns:
        The rows received (received, features), their local experts (received, top k), -1 for
        experts elsewhere, their scores (received, top k), and the number of copies for each local
        expert, which DeepEP had to know to allocate the rows.
    """
    deepep.get_buffer(group, deepep.get_hidden_bytes(rows))
    received, experts, scores, counts = _Dispatch.apply(rows, routing.scores, routing)
    return received, experts, scores, counts.tolist()


def combine(rows: torch.Tensor, routing: Routing, is_needed: bool = True) -> torch.Tensor:
    """Start to send (received, features) back; the result is for `arrive` alone.

    Args:
        is_needed: whether any rank reads the result; otherwise nothing is sent.
    """
    return _Combine.apply(rows, routing, is_needed)


def arrive(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Wait for the result of `combine`: (tokens, features), summed over each token's ranks."""
    return _Arrive.apply(rows, exchange)


def _now() -> Any:
    """Record an event behind all work that the GPU has been given so far."""
    return deepep.EventOverlap(deepep.EventHandle())


# The exchange of the layer that is running. Selective recomputation saves the results of operators,
# and operators take only tensors and numbers.
_current = Exchange()


@torch.library.custom_op("cookbook::deepep_dispatch", mutates_args=())
def _send(
    rows: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    exchange, buffer = _current, deepep._buffer
    # Allocated on DeepEP's stream too: with `--debug.deterministic` PyTorch fills new tensors, and
    # on another stream it would overwrite the counts (device asserts in TorchTitan as released).
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
        # Still on their way: only `leave` reads them.
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
        # Nothing was sent if selective recomputation had saved the rows.
        if exchange.sent is not None:
            exchange.sent.current_stream_wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        # They have the shape of the received rows, which autograd would not accept as gradients of
        # the input: `combine` takes them from the exchange.
        exchange.received_gradients, *_, exchange.sent = deepep._buffer.dispatch(
            x=rows.contiguous(), handle=exchange.handle, previous_event=_now(), **_STREAMS
        )
        return rows, None
