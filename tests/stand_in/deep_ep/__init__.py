"""`deep_ep.Buffer` by plain collectives, for tests on CPU ranks.

With it TorchTitan's and the cookbook's DeepEP path runs in real processes without a GPU. Its
contract is DeepEP's (commit 29d31c0): each token is sent once to every rank that holds one of its
experts, tokens arrive ordered by source rank and then by position, experts of other ranks read -1
with weight 0, and combine sums without weights. `test_titan_stand_in.py` checks it against a
reference.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .utils import EventOverlap


class Config:
    """Sizes of buffers, of which plain collectives need none."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """How a dispatch laid its tokens out."""

    sent: torch.Tensor  # positions of the sent copies, rank by rank
    send_counts: list[int]
    receive_counts: list[int]
    num_tokens: int


class Buffer:
    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0
    ) -> None:
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        _run_torchtitan_operations_on_cpu()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, **streams: Any
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        num_ranks = self.group.size()
        chosen = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(topk_idx < 0, num_experts, topk_idx), True)
        chosen = chosen[:, :num_experts]
        in_rank = chosen.view(-1, num_ranks, num_experts // num_ranks).any(-1)
        return (
            in_rank.sum(0).to(torch.int32),
            None,
            chosen.sum(0).to(torch.int32),
            in_rank,
            EventOverlap(),
        )

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        async_finish: bool = False,
        **streams: Any,
    ) -> tuple[Any, ...]:
        event = EventOverlap()
        if handle is not None:
            received = self._send(x, handle)
            return _later(event, async_finish, received), None, None, None, None, event
        assert topk_idx is not None and topk_weights is not None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_weights.dtype == torch.float32 and x.is_contiguous()
        send_counts = is_token_in_rank.sum(0)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=self.group)
        handle = Handle(
            is_token_in_rank.t().nonzero()[:, 1],
            send_counts.tolist(),
            receive_counts.tolist(),
            x.shape[0],
        )
        experts_per_rank = num_tokens_per_expert.numel() // self.group.size()
        local = self._send(topk_idx, handle) - self.group.rank() * experts_per_rank
        elsewhere = (local < 0) | (local >= experts_per_rank)
        local.masked_fill_(elsewhere, -1)
        weights = self._send(topk_weights, handle).masked_fill_(elsewhere, 0)
        counts = [int((local == expert).sum()) for expert in range(experts_per_rank)]
        received = _later(event, async_finish, self._send(x, handle))
        return received, local, weights, counts, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        async_finish: bool = False,
        **streams: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        assert x.is_contiguous()
        event = EventOverlap()
        weights = None
        if topk_weights is not None:
            weights = _later(event, async_finish, self._return(topk_weights, handle))
        return _later(event, async_finish, self._return(x, handle)), weights, event

    def _send(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        received = rows.new_empty(sum(handle.receive_counts), rows.shape[1])
        dist.all_to_all_single(
            received,
            rows[handle.sent].contiguous(),
            handle.receive_counts,
            handle.send_counts,
            group=self.group,
        )
        return received

    def _return(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        returned = rows.new_empty(len(handle.sent), rows.shape[1])
        dist.all_to_all_single(
            returned, rows, handle.send_counts, handle.receive_counts, group=self.group
        )
        exact = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(handle.num_tokens, rows.shape[1], dtype=exact)
        total.index_add_(0, handle.sent, returned.to(exact))
        return total.to(rows.dtype)


def _later(event: EventOverlap, is_later: bool, values: torch.Tensor) -> torch.Tensor:
    """A tensor that holds `values` once somebody has waited for `event`."""
    if not is_later:
        return values
    arriving = torch.full_like(values, torch.nan)
    # As a kernel writes: autograd counts no change of the tensor.
    event.arrivals.append(lambda: arriving.data.copy_(values))
    return arriving


_operations: list[Any] = []


def _run_torchtitan_operations_on_cpu() -> None:
    """TorchTitan registers its two operations for CUDA alone; the same functions work here."""
    if _operations:
        return
    from torchtitan.distributed.deepep import deepep

    library = torch.library.Library("deepep", "IMPL")
    library.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    library.impl("combine", deepep._combine_op_impl, "CPU")
    _operations.append(library)
