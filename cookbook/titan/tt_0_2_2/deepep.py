"""The EP backend `deepep`: its MoE layer and its two exchanges, under the shared experts' work.

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
Importable only where DeepEP is installed.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torchtitan.distributed.deepep import deepep
from torchtitan.models.moe.moe import FeedForward
from torchtitan.models.moe.moe_deepep import DeepEPMoE

from cookbook.titan.common import token_shard
from cookbook.titan.common.expert_groups import collect, plan_groups, row_scores, spread
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.recomputation import in_recompute, last_product, not_saved
from cookbook.titan.tt_0_2_2.row_kernels import experts_with_probs, mix_in

# Both ends of an exchange on DeepEP's stream; its tensors are allocated there and kept for both.
_STREAMS = {"async_finish": True, "allocate_on_comm_stream": True}


@dataclass(eq=False)
class Exchange:
    """The state shared by the nodes of one layer and one forward."""

    ready: Any = None  # the event after which the rows may be sent
    handle: Any = None  # DeepEP's, of the dispatch
    sent: Any = None  # the event after which the latest transfer has arrived
    received_gradients: Tensor | None = None  # from `arrive` to `combine`


class Routing(SimpleNamespace):
    """The destinations of a layer's rows.

    Neither a tuple nor a dataclass, in which FSDP would cast the scores to BF16.
    """

    experts: Tensor  # (tokens, top k) int64, -1 for none
    scores: Tensor  # (tokens, top k) float32
    num_experts: int
    exchange: Exchange


def leave(
    rows: Tensor, scores: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Routing]:
    """Note that (tokens, features) and their routing are ready; no copy without a score is sent."""
    exchange = Exchange()
    # All that is sent must have been asked for by now: float32, as DeepEP carries it, and dense.
    experts = experts.masked_fill(scores == 0, -1).contiguous()
    rows, scores = _Leave.apply(rows.contiguous(), scores.float().contiguous(), exchange)
    return rows, Routing(experts=experts, scores=scores, num_experts=num_experts, exchange=exchange)


def dispatch(
    rows: Tensor, routing: Routing, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Send the rows that `leave` returned to the ranks of their experts.

    Return the rows received (received, features), their local experts (received, top k), -1 for
    experts elsewhere, their scores, and the number of copies for each local expert.
    """
    deepep.get_buffer(group, deepep.get_hidden_bytes(rows))
    received, experts, scores, counts = _Dispatch.apply(rows, routing.scores, routing)
    return received, experts, scores, counts.tolist()


def arrive(rows: Tensor, exchange: Exchange) -> Tensor:
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
    rows: Tensor, scores: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
def _send_back(rows: Tensor) -> Tensor:
    exchange = _current
    combined: Tensor
    combined, _, exchange.sent = deepep._buffer.combine(
        x=rows, handle=exchange.handle, previous_event=_now(), **_STREAMS
    )
    return combined


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scores: Tensor, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.ready = _now()
        return rows.view_as(rows), scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, rows: Tensor, scores: Tensor) -> tuple[Any, ...]:
        ctx.exchange.sent.current_stream_wait()
        return rows, scores, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scores: Tensor, routing: Routing) -> tuple[Tensor, ...]:
        global _current
        ctx.exchange = _current = routing.exchange
        sent = _send(rows, scores, routing.experts, routing.num_experts)
        ctx.mark_non_differentiable(sent[1], sent[3])
        return sent

    @staticmethod
    def backward(
        ctx: Any, received: Tensor, _: Any, received_scores: Tensor, __: Any
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
    """Start to send (received, features) back, if any rank needs it; the result is for `arrive`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing, is_needed: bool) -> Tensor:
        global _current
        ctx.exchange = _current = routing.exchange
        if not is_needed:
            return rows.new_empty(len(routing.experts), rows.shape[1])
        return _send_back(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        exchange.sent.current_stream_wait()
        received, exchange.received_gradients = exchange.received_gradients, None
        return received, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        # Nothing was sent if selective recomputation had saved the rows.
        if exchange.sent is not None:
            exchange.sent.current_stream_wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        # They have the shape of the received rows, which autograd would not accept as gradients of
        # the input: `combine` takes them from the exchange.
        exchange.received_gradients, *_, exchange.sent = deepep._buffer.dispatch(
            x=rows.contiguous(), handle=exchange.handle, previous_event=_now(), **_STREAMS
        )
        return rows, None


class SendingExperts(nn.Module):
    """Mixed into the class of the routed experts, which then fetch tokens and send them back.

    A layer's tokens come in one or more parts. While the experts compute one part, the next is on
    its way to them and the previous one on its way back. One call takes all parts, so that FSDP
    gathers the weights once.
    """

    cookbook_group: ProcessGroup
    cookbook_score_activations: bool

    def forward(
        self, rows: tuple[Tensor, ...], routings: tuple[Routing, ...]
    ) -> tuple[Tensor, ...]:
        """Return the result of `combine` for each part of (tokens, features)."""
        returned: list[Tensor] = []
        computed: Tensor | None = None
        for index, (part, routing) in enumerate(zip(rows, routings, strict=True)):
            # First, because this part would have to wait for the previous one on its way back. The
            # host waits for DeepEP's counts while the GPU computes the previous part.
            arrived = dispatch(part, routing, self.cookbook_group)
            activity.dispatches.add("deepep")
            if computed is not None:
                returned.append(self._combine(computed, routings[index - 1]))
            computed = self._compute(*arrived)
        assert computed is not None
        return *returned, self._combine(computed, routings[-1])

    def _combine(self, computed: Tensor, routing: Routing) -> Tensor:
        if not self.cookbook_score_activations:
            return _Combine.apply(computed, routing, True)
        with not_saved():
            return _Combine.apply(computed, routing, not in_recompute())

    def _compute(self, rows: Tensor, experts: Tensor, scores: Tensor, counts: list[int]) -> Tensor:
        """Compute the experts' outputs, summed for each row over its local experts."""
        plan = plan_groups(experts, counts, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        activity.patches_applied.add("deepep-padded-groups")
        grouped = spread(rows, plan)
        if not self.cookbook_score_activations:
            return collect(super().forward(grouped, plan.sizes), scores, plan)
        out = experts_with_probs(self, grouped, row_scores(scores, plan), plan.ends)
        return collect(out, None, plan, is_needed=not in_recompute())


class HalvedFeedForward(FeedForward):
    """TorchTitan's shared experts in two halves, each under one of DeepEP's exchanges."""

    def forward(self, x: Any = None, halves: Any = None) -> Any:
        """Compute gate and up projections of `x` (tokens, features), or the output of `halves`."""
        if x is not None:
            return self.w1(x), self.w3(x)
        gate, up = halves
        return self.w2(nn.functional.silu(gate) * up)


def cut(values: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Cut (tokens, ...) into parts of almost equal length; their gradients are joined once."""
    if chunks == 1:
        return (values,)
    least, more = divmod(len(values), chunks)
    return values.split([least + (index < more) for index in range(chunks)])


class SplitMoE(DeepEPMoE):
    """TorchTitan's DeepEP layer, which sends each token from one TP rank only.

    Its experts are `SendingExperts`, its shared experts `HalvedFeedForward`.
    """

    cookbook_chunks: int

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for this rank's tokens.

        Under TP, `x` and the output are this rank's shard of every sequence, (batch, length / TP,
        features). The experts get the shard itself, before any gather. The shared experts' gradient
        of the whole is summed over TP once, while the gradients of the rows are on their way.
        """
        tp_mesh = getattr(self, "cookbook_tp_mesh", None)
        mine = x.to_local() if isinstance(x, DTensor) else x
        whole = mine if tp_mesh is None else token_shard.gather_sequence(mine, tp_mesh)
        length, features = whole.shape[1:]

        tokens = whole.view(-1, features)
        top_scores, experts, counts = self.router(tokens, self.expert_bias)
        # Count all tokens on every TP rank: the sum for the expert bias is over other ranks only.
        if self.load_balance_coeff is not None:
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
        if tp_mesh is not None:
            shard = token_shard.TokenShard.of_mesh(length, tp_mesh)
            top_scores, experts = (
                token_shard.shard_tokens(one, shard) for one in (top_scores, experts)
            )
            activity.patches_applied.add("deepep-tokens-split-over-tp")

        sent = (mine.reshape(-1, features), top_scores, experts)
        parts = zip(*(cut(values, self.cookbook_chunks) for values in sent), strict=True)
        count = self.experts.num_experts
        left = [leave(part, scores, chosen, count) for part, scores, chosen in parts]
        rows, routings = zip(*left, strict=True)
        shared = self.shared_experts
        if shared is not None and tp_mesh is not None:
            # After `leave`, so that in the backward its sum starts before `leave` waits.
            tokens = token_shard.with_partial_gradient(whole, mine, tp_mesh).view(-1, features)
        halves = None if shared is None else shared(tokens)
        returned = self.experts(rows, routings)
        with last_product():
            out = None if shared is None else shared(halves=halves)
        if out is not None and tp_mesh is not None:
            out = token_shard.reduce_scatter_sequence(out.view(whole.shape), tp_mesh)
        pairs = zip(returned, routings, strict=True)
        arrived = [arrive(part, routing.exchange) for part, routing in pairs]
        routed = (arrived[0] if len(arrived) == 1 else torch.cat(arrived)).view(mine.shape)
        return routed if out is None else out.view(mine.shape) + routed


def use_split_moe(moe: Any, group: ProcessGroup, chunks: int, score_activations: bool) -> None:
    """Change the classes of a layer, its experts and shared experts; the instances alone, as FSDP.

    `group` is the EP ranks'.
    """
    moe.__class__ = SplitMoE
    # TorchTitan's Qwen3 builds its standard layer whatever the backend.
    moe.reorderer = None
    moe.cookbook_chunks = chunks
    mix_in(SendingExperts, moe.experts)
    moe.experts.cookbook_group = group
    moe.experts.cookbook_score_activations = score_activations
    if moe.shared_experts is not None:
        moe.shared_experts.__class__ = HalvedFeedForward
