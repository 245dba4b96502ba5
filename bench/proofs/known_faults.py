"""Known faults that the gradient comparison must detect; some come from the self-check."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchtitan.models.moe.utils as moe_utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel
from torchtitan.distributed.expert_parallel import ReordererSequenceParallel
from torchtitan.models.llama4.infra import parallelize as released
from torchtitan.models.moe.moe import GroupedExperts

from cookbook.titan.common.expert_groups import collect, plan_groups, row_scores, spread
from cookbook.titan.tt_0_2_2.token_shard import gather_sequence, reduce_scatter_sequence
from tests.self_check_fault import instead, put_in, with_result
from tests.self_check_faults import FAULTS as OF_KERNELS

_STACK = "cookbook.titan.tt_0_2_2"
_GROUPS = "cookbook.titan.common.expert_groups"

Patch = tuple[str, Callable[[Any], Any]]


def _of_kernel(name: str) -> Patch:
    (found,) = [fault for fault in OF_KERNELS if fault.name == name]
    return found.target, found.wrapper


def _as_released(job_config: Any, model: Any, **options: Any) -> None:
    released.apply_moe_ep_tp(model, **options)


def _every_rank_sends_all(moe: Any, x: torch.Tensor) -> torch.Tensor:
    """A DeepEP layer whose TP ranks each send every token, and sum what returns."""
    from cookbook.titan.tt_0_2_2.deepep import arrive, leave

    mesh = moe.cookbook_tp_mesh
    mine = x.to_local() if isinstance(x, DTensor) else x
    whole = gather_sequence(mine, mesh)
    tokens = whole.view(-1, whole.shape[-1])
    scores, experts, counts = moe.router(tokens, moe.expert_bias)
    with torch.no_grad():
        moe.tokens_per_expert.add_(counts)
    rows, routing = leave(tokens, scores, experts, moe.experts.num_experts)
    (returned,) = moe.experts((rows,), (routing,))
    routed = arrive(returned, routing.exchange)
    shared = moe.shared_experts(halves=moe.shared_experts(tokens))
    return reduce_scatter_sequence((routed + shared).view(whole.shape), mesh)


def _scores_squared(sent: tuple[Any, ...]) -> tuple[Any, ...]:
    received, experts, scores, counts = sent
    return received, experts, scores * scores, counts


def _scores_at_the_other_end(
    experts: Any, rows: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    plan = plan_groups(chosen, counts, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
    grouped = (spread(rows, plan) * row_scores(scores, plan)).to(rows.dtype)
    return collect(GroupedExperts.forward(experts, grouped, plan.sizes), None, plan)


FAULTS: dict[str, Patch] = {
    "the released code": (f"{_STACK}.parallelize.apply_moe_ep_tp", instead(_as_released)),
    "every TP rank sends every token": (
        f"{_STACK}.deepep.SplitMoE.forward",
        instead(_every_rank_sends_all),
    ),
    "the router's gradient is one TP rank's": _of_kernel(
        "the router's gradient not summed over TP"
    ),
    "shared experts' gradients are summed over TP": (
        f"{_STACK}.parallelize.PartialOutputRowwiseParallel",
        instead(RowwiseParallel),
    ),
    "rows of the input's gradient are lost": (
        f"{_STACK}.parallelize.SequenceShardReorderer",
        instead(ReordererSequenceParallel),
    ),
    "expert groups are not padded": (
        f"{_GROUPS}.padded_sizes",
        instead(lambda counts, alignment: counts),
    ),
    "a pipeline's gradients are not divided": (
        f"{_STACK}.loss_and_optimizer.scale_gradient",
        instead(lambda loss, factor: loss),
    ),
    "tokens that are no training are counted": (
        f"{_STACK}.routing._after",
        lambda after: lambda *given: after(*given) if torch.is_grad_enabled() else None,
    ),
    "the weight gradient's recipe is ignored": _of_kernel("the weight gradient's recipe ignored"),
    "the dispatch is not quantized": _of_kernel("one exchange of two not quantized"),
    "the combine is not quantized": _of_kernel("the other exchange not quantized"),
    "scores are applied twice": (f"{_STACK}.deepep.dispatch", with_result(_scores_squared)),
    "scores are applied before the experts": (
        f"{_STACK}.deepep.SendingExperts._compute",
        instead(_scores_at_the_other_end),
    ),
}


@contextmanager
def put_in_fault(name: str) -> Iterator[None]:
    """Put the named fault in inside the block."""
    with put_in(*FAULTS[name]):
        yield
