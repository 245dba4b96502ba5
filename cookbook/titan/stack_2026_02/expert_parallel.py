"""In: TorchTitan's plan for MoE layers under TP and EP. Out: the same plan with the right sums.

Names that `apply_moe_ep_tp` uses are replaced, and a hook is added to each router; what each
changes, and why, is said where it is defined.
"""

from __future__ import annotations

import warnings
from functools import partial, wraps
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.expert_parallel as expert_parallel
import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_parallelize
import torchtitan.models.llama4.infra.parallelize as llama4_parallelize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
)
from torchtitan.distributed.expert_parallel import DeepEPExpertParallel

from cookbook.titan.any_stack.token_split import (
    Share,
    global_positions,
    sum_gradient_over_tp,
    take_share,
)
from cookbook.titan.stack_2026_02 import activity, deepep

# What was there before, for the tests and benchmarks that show what it computes.
RELEASED: dict[str, Any] = {
    "reorderer": expert_parallel.ReordererSequenceParallel,
    "rowwise": llama4_parallelize.RowwiseParallel,
    "prepare": llama4_parallelize.PrepareModuleInputOutput,
    "dispatch": DeepEPExpertParallel._token_dispatch,
    "combine": DeepEPExpertParallel._token_combine,
}


class PartialOutputRowwiseParallel(RowwiseParallel):
    """The last linear layer of the shared experts, whose output is a term of a sum over TP ranks.

    The gradient of every term is that of the sum, the same on all ranks. PyTorch 2.10 takes it for
    a term too when it is not told otherwise, sums it, and the shared experts' gradients come out TP
    times as large (pytorch/pytorch#172932, mended in 2.11).
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = RowwiseParallel._prepare_output_fn(
            output_layouts, False, mod, outputs, device_mesh
        )
        if not use_local_output:
            return outputs
        return outputs.to_local(
            grad_placements=tuple(
                Replicate() if placement.is_partial() else placement
                for placement in outputs.placements
            )
        )


class PrepareMoE(PrepareModuleInputOutput):
    """Gathers an MoE layer's input along the sequence and sums its output over TP ranks.

    A DeepEP layer does both itself, since its routed experts take no part in either: each rank
    sends the share that it had before the gather, and gets that share back.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.reorderer is not None:
            return super()._apply(module, device_mesh)
        module.cookbook_tp_mesh = device_mesh
        return module


class SequenceShareReorderer(ParallelStyle):
    """Splits the standard backend's tokens over TP along the sequence.

    TorchTitan's ReordererSequenceParallel cuts the folded batch x sequence. With more than one
    sequence in a batch a rank then sends tokens whose gradient it drops when the gather along the
    sequence is undone, and nobody sends theirs.
    """

    def _take(self, mod: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
        top_scores, experts = inputs
        share = Share.of_mesh(mod.cookbook_length, mesh)
        return take_share(top_scores, share), take_share(experts, share)

    def _place(self, mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> tuple[Any, Any, Any]:
        top_scores, positions, counts = outputs
        share = Share.of_mesh(mod.cookbook_length, mesh)
        return top_scores, global_positions(positions, share, mod.top_k), counts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda mod, inputs: self._take(mod, inputs, device_mesh))
        module.register_forward_hook(
            lambda mod, inputs, outputs: self._place(mod, outputs, device_mesh)
        )
        return module


def _remember_length(moe: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """The reorderer sees folded tokens only; the MoE layer around it sees (batch, length, dim)."""
    moe.reorderer.cookbook_length = inputs[0].shape[1]


def _router_hook(tp_mesh: DeviceMesh, router: nn.Module, inputs: Any, outputs: Any) -> Any:
    top_scores, experts, counts = outputs
    return sum_gradient_over_tp(top_scores, tp_mesh), experts, counts


def correct_moe(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Hook the MoE layers of a model whose TP ranks each send a share of the tokens."""
    for block in model.layers.values():
        if not block.moe_enabled:
            continue
        moe = block.moe
        moe.router.register_forward_hook(partial(_router_hook, tp_mesh))
        if moe.shared_experts is not None:
            activity.corrections.add("shared-expert-gradients-not-summed-over-tp")
        if moe.reorderer is not None:
            moe.register_forward_pre_hook(_remember_length)
    activity.corrections.add("router-gradients-summed-over-tp")


def _dispatch(self: Any, mod: Any, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> Any:
    hidden_states, _, selected_experts_indices, top_scores, num_experts = inputs
    grouped, sizes, self._state = deepep.dispatch_tokens(
        hidden_states,
        selected_experts_indices,
        top_scores,
        num_experts,
        device_mesh.get_group(),
        score_before_experts=self.score_before_experts,
    )
    return grouped, sizes


def _combine(self: Any, mod: Any, routed_output: torch.Tensor, device_mesh: DeviceMesh) -> Any:
    state, self._state = self._state, None
    return deepep.combine_tokens(routed_output, state)


def _correct_apply(apply_moe_ep_tp: Any) -> Any:
    @wraps(apply_moe_ep_tp)
    def apply_and_correct(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_deepep"):
            # Importable here only: without DeepEP installed the module raises.
            from torchtitan.models.moe.moe_deepep import DeepEPMoE

            DeepEPMoE.forward = deepep.forward
        with warnings.catch_warnings():
            # The DeepEP layer has no reorderer, which TorchTitan's plan names all the same.
            warnings.filterwarnings("ignore", message="Parallelize plan key 'reorderer'")
            apply_moe_ep_tp(model, *args, **kwargs)
        tp_mesh, ep_mesh, etp_mesh = (kwargs.get(f"{name}_mesh") for name in ("tp", "ep", "etp"))
        # Only where EP borrows the TP ranks does each of them send tokens of its own.
        if tp_mesh is not None and ep_mesh is not None and etp_mesh is None:
            correct_moe(model, tp_mesh)

    return apply_and_correct


def correct_expert_parallel() -> None:
    """Replace the names; both model families call `apply_moe_ep_tp` with keyword meshes."""
    DeepEPExpertParallel._token_dispatch = _dispatch
    DeepEPExpertParallel._token_combine = _combine
    expert_parallel.ReordererSequenceParallel = SequenceShareReorderer
    llama4_parallelize.ReordererSequenceParallel = SequenceShareReorderer
    llama4_parallelize.RowwiseParallel = PartialOutputRowwiseParallel
    llama4_parallelize.PrepareModuleInputOutput = PrepareMoE
    corrected = _correct_apply(llama4_parallelize.apply_moe_ep_tp)
    llama4_parallelize.apply_moe_ep_tp = corrected
    deepseek_parallelize.apply_moe_ep_tp = corrected
