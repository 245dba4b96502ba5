"""The EP backend `deepep`: an MoE layer that overlaps dispatch and combine with shared experts.

The dispatch sends each token's hidden state, a row, to its experts' ranks; the combine returns the
results. TorchTitan waits for each transfer right after starting it, except for the forward's
combine. Here one autograd node starts a transfer, and a later node waits for it. The GPU computes
half of the shared experts in between:

    node        forward                          backward (runs from the bottom up)
    leave       records a "rows ready" event     waits for the rows' gradients
      first half of the shared experts
    dispatch    sends the rows, and waits        starts to send their gradients back
      routed experts
    combine     starts to send the rows back     waits for their gradients
      second half of the shared experts
    arrive      waits for the rows               starts to send their gradients

Only the forward's dispatch starts a transfer and waits for it in the same node. It still overlaps
with the first half of the shared experts, which is already queued on the GPU at that time. The
transfer runs on another stream and waits only for the event that `leave` recorded. If autograd
chose another order for the backward, training would be slower but still correct.
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

from cookbook.titan.common.expert_groups import collect, plan_groups, row_scores, spread
from cookbook.titan.tt_0_2_2 import activity, token_shard
from cookbook.titan.tt_0_2_2.recomputation import in_recompute, last_product, not_saved
from cookbook.titan.tt_0_2_2.row_kernels import Groups, experts_with_probs, mix_in, sum_of_experts

# Run transfers asynchronously on DeepEP's stream and allocate their results there; DeepEP keeps the
# tensors alive for both streams.
_STREAMS = {"async_finish": True, "allocate_on_comm_stream": True}


@dataclass(eq=False)
class Transfer:
    """State shared by the autograd nodes that handle one chunk of a layer's tokens."""

    ready: Any = None  # CUDA event: the rows and scores are computed and may be sent
    handle: Any = None  # DeepEP's record of the dispatch, which later transfers reuse
    sent: Any = None  # CUDA event: the transfer that was started last has ended
    # The experts' output gradients: `_Arrive.backward` stores them for `_Combine.backward`.
    received_gradients: Tensor | None = None


class Routing(SimpleNamespace):
    """The experts and scores of one chunk's rows.

    Not a tuple or a dataclass: FSDP would cast the tensors to BF16, but scores must stay float32.
    """

    experts: Tensor  # (tokens, top k) int64, -1 for no expert
    scores: Tensor  # (tokens, top k) float32
    num_experts: int
    exchange: Transfer


def leave(
    rows: Tensor, scores: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Routing]:
    """Record a CUDA event that tells `dispatch` when `rows` (tokens, features) can be sent.

    Return the rows and their routing. A token is not sent to an expert for which its score is 0.
    """
    exchange = Transfer()
    # DeepEP needs contiguous tensors and float32 scores. Convert before `ready` is recorded,
    # because the transfer waits only for that event.
    experts = experts.masked_fill(scores == 0, -1).contiguous()
    rows, scores = _Leave.apply(rows.contiguous(), scores.float().contiguous(), exchange)
    return rows, Routing(experts=experts, scores=scores, num_experts=num_experts, exchange=exchange)


def dispatch(
    rows: Tensor, routing: Routing, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Send the rows that `leave` returned to the ranks of their experts.

    Return the received rows (received, features), their local experts (received, top k; -1 for an
    expert on another rank), their scores, and the number of rows for each local expert.
    """
    deepep.get_buffer(group, deepep.get_hidden_bytes(rows))
    received, experts, scores, counts = _Dispatch.apply(rows, routing.scores, routing)
    return received, experts, scores, counts.tolist()


def arrive(rows: Tensor, exchange: Transfer) -> Tensor:
    """Wait for the combine, and then return its result `rows` (tokens, features)."""
    return _Arrive.apply(rows, exchange)


def _now() -> Any:
    """Return an event recorded after all work queued on the current stream."""
    return deepep.EventOverlap(deepep.EventHandle())


# The exchange of the layer that runs now. It is global because the two custom operators below can
# take only tensors and numbers.
_current = Transfer()


@torch.library.custom_op("cookbook::deepep_dispatch", mutates_args=())
def _send(
    rows: Tensor, scores: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exchange, buffer = _current, deepep._buffer
    # Allocate these counts on DeepEP's stream. With `--debug.deterministic` PyTorch fills all new
    # memory, and a fill on another stream could overwrite the finished counts.
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
        ctx: Any, rows: Tensor, scores: Tensor, exchange: Transfer
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
        # Do not wait here: only `_Leave` reads these gradients, and it waits for them.
        return rows, scores, None


class _Combine(torch.autograd.Function):
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
    def forward(ctx: Any, rows: Tensor, exchange: Transfer) -> Tensor:
        ctx.exchange = exchange
        # There is nothing to wait for if recomputation has skipped the combine.
        if exchange.sent is not None:
            exchange.sent.current_stream_wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        # Leave these gradients for `_Combine` to return. Autograd would reject them here: they have
        # the shape of the received rows, not of the forward's input.
        exchange.received_gradients, *_, exchange.sent = deepep._buffer.dispatch(
            x=rows.contiguous(), handle=exchange.handle, previous_event=_now(), **_STREAMS
        )
        return rows, None


class SendingExperts(nn.Module):
    """A mixin that makes routed experts dispatch tokens, compute, and combine.

    A layer's tokens come in one or more chunks. While the experts compute one chunk, the next is
    being dispatched and the previous one combined. One call takes all chunks, so that FSDP gathers
    the weights once.
    """

    cookbook_group: ProcessGroup
    cookbook_score_activations: bool

    def forward(
        self, rows: tuple[Tensor, ...], routings: tuple[Routing, ...]
    ) -> tuple[Tensor, ...]:
        """Return each chunk's outputs (tokens, features); call `arrive` before you read them."""
        returned: list[Tensor] = []
        computed: Tensor | None = None
        for index, (part, routing) in enumerate(zip(rows, routings, strict=True)):
            # Dispatch this chunk before combining the previous one, or the dispatch would queue
            # behind the combine. The host waits for this chunk's counts while the GPU computes.
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
        plan = plan_groups(experts, counts, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        activity.patches_applied.add("deepep-padded-groups")
        if getattr(self, "cookbook_fp8", False):
            return sum_of_experts(self, rows, Groups(scores=row_scores(scores, plan), plan=plan))
        grouped = spread(rows, plan)
        if not self.cookbook_score_activations:
            return collect(super().forward(grouped, plan.sizes), scores, plan)
        out = experts_with_probs(self, grouped, row_scores(scores, plan), plan.ends)
        return collect(out, None, plan, is_needed=not in_recompute())


class HalvedFeedForward(FeedForward):
    """TorchTitan's shared experts, computed in two halves: during dispatch and during combine."""

    def forward(self, x: Any = None, halves: Any = None) -> Any:
        if x is not None:
            return self.w1(x), self.w3(x)
        gate, up = halves
        return self.w2(nn.functional.silu(gate) * up)


def cut(values: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Split (tokens, ...) into near-equal chunks; a single autograd node joins their gradients."""
    if chunks == 1:
        return (values,)
    least, more = divmod(len(values), chunks)
    return values.split([least + (index < more) for index in range(chunks)])


class SplitMoE(DeepEPMoE):
    """TorchTitan's DeepEP layer, changed to send each token from only one TP rank."""

    cookbook_chunks: int

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x` (batch, length, features).

        Under TP, `x` and the output hold only this rank's part of each sequence.
        """
        tp_mesh = getattr(self, "cookbook_tp_mesh", None)
        mine = x.to_local() if isinstance(x, DTensor) else x
        whole = mine if tp_mesh is None else token_shard.gather_sequence(mine, tp_mesh)
        length, features = whole.shape[1:]

        tokens = whole.view(-1, features)
        top_scores, experts, counts = self.router(tokens, self.expert_bias)
        # Count all tokens on every TP rank: the expert bias update does not sum over TP ranks.
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        if tp_mesh is not None:
            top_scores, experts = (
                token_shard.shard_tokens(one, length, tp_mesh) for one in (top_scores, experts)
            )
            activity.patches_applied.add("deepep-tokens-split-over-tp")

        sent = (mine.reshape(-1, features), top_scores, experts)
        parts = zip(*(cut(values, self.cookbook_chunks) for values in sent), strict=True)
        count = self.experts.num_experts
        left = [leave(part, scores, chosen, count) for part, scores, chosen in parts]
        rows, routings = zip(*left, strict=True)
        shared = self.shared_experts
        if shared is not None and tp_mesh is not None:
            # Keep this after `leave`. The backward runs in reverse order, so it starts the TP sum
            # before it waits for the rows' gradients.
            tokens = token_shard.with_partial_gradient(whole, mine, tp_mesh).view(-1, features)
        halves = None if shared is None else shared(tokens)
        returned = self.experts(rows, routings)
        with last_product():
            out = None if shared is None else shared(halves=halves)
        if out is not None and tp_mesh is not None:
            out = token_shard.reduce_scatter_sequence(out.view(whole.shape), tp_mesh)
        arrived = [arrive(part, one.exchange) for part, one in zip(returned, routings, strict=True)]
        routed = (arrived[0] if len(arrived) == 1 else torch.cat(arrived)).view(mine.shape)
        return routed if out is None else out.view(mine.shape) + routed


def use_split_moe(moe: Any, group: ProcessGroup, options: Any) -> None:
    """Convert this MoE layer to a `SplitMoE`, and its experts to the classes that it needs."""
    moe.__class__ = SplitMoE
    # TorchTitan's Qwen3 builds the standard layer even for DeepEP. Remove its reorderer.
    moe.reorderer = None
    moe.cookbook_chunks = options.num_chunks
    mix_in(SendingExperts, moe.experts)
    moe.experts.cookbook_group = group
    moe.experts.cookbook_score_activations = options.score_activations
    if moe.shared_experts is not None:
        moe.shared_experts.__class__ = HalvedFeedForward
