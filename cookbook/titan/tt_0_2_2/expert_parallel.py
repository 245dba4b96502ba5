"""TorchTitan's plan for MoE layers under TP and EP, with the right sums.

`apply_moe_ep_tp` takes the place of TorchTitan's function of that name, and calls it with classes
of this package under the names that it looks up. What each class corrects is said at the class.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
import torchtitan.models.llama4.infra.parallelize as llama4_parallelize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
)
from torchtitan.distributed.expert_parallel import ExpertParallel, ExpertTensorParallel

from cookbook.titan.common.token_shard import (
    TokenShard,
    global_positions,
    shard_tokens,
    sum_gradient_over_tp,
)
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.quantized_a2a import (
    Precisions,
    QuantizedExpertParallel,
    prepare_quantized_a2a,
)
from cookbook.titan.tt_0_2_2.row_kernels import (
    RowExpertParallel,
    RowExpertTensorParallel,
    RowMoE,
    RowTensorParallel,
    use_row_kernels,
)


class PartialOutputRowwiseParallel(RowwiseParallel):
    """The last linear layer of the shared experts, whose output is a term of a sum over TP ranks.

    The gradient of every term is that of the sum, the same on all ranks. Unless it is told so,
    PyTorch 2.10 takes that gradient for a term too and sums it: the shared experts' gradients come
    out TP times as large (pytorch/pytorch#172932, fixed in 2.11).
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

    A DeepEP layer does both itself, since its routed experts need neither: each rank sends the
    share that it had before the gather, and gets that share back.
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
        share = TokenShard.of_mesh(mod.cookbook_length, mesh)
        return shard_tokens(top_scores, share), shard_tokens(experts, share)

    def _place(self, mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> tuple[Any, Any, Any]:
        top_scores, positions, counts = outputs
        share = TokenShard.of_mesh(mod.cookbook_length, mesh)
        return top_scores, global_positions(positions, share, mod.top_k), counts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda mod, inputs: self._take(mod, inputs, device_mesh))
        module.register_forward_hook(
            lambda mod, inputs, outputs: self._place(mod, outputs, device_mesh)
        )
        return module


class _NotedDispatch:
    """Notes that the standard backend sent tokens, for the report of the first step."""

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        activity.dispatches.add("standard")
        return super()._token_dispatch(mod, inputs, device_mesh)  # type: ignore[misc]


class StandardExpertParallel(_NotedDispatch, ExpertParallel):
    """TorchTitan's ExpertParallel, whose dispatch is noted."""


class StandardExpertTensorParallel(_NotedDispatch, ExpertTensorParallel):
    """TorchTitan's ExpertTensorParallel, whose dispatch is noted."""


def _remember_length(moe: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """The reorderer sees folded tokens only; the MoE layer around it sees (batch, length, dim)."""
    moe.reorderer.cookbook_length = inputs[0].shape[1]


def _router_hook(tp_mesh: DeviceMesh, router: nn.Module, inputs: Any, outputs: Any) -> Any:
    top_scores, experts, counts = outputs
    return sum_gradient_over_tp(top_scores, tp_mesh), experts, counts


def _has_term_of_scores(moe: Any, is_share: bool) -> bool:
    """Whether a TP rank's gradient of the router's scores is one term of a sum over TP.

    It is where the rank sends only its share of the tokens. Elsewhere TP cuts every expert, and a
    rank has one term of its output, and so of the gradient of the scores that multiply it. Scores
    that multiply the experts' input get the gradient of that, which TorchTitan sums.
    """
    return is_share or not moe.score_before_experts


def _correct_gradients(layers: list[Any], tp_mesh: DeviceMesh, is_share: bool) -> None:
    """Hook the MoE layers of a model under TP.

    Args:
        is_share: whether each TP rank sends a share of the tokens, since EP borrows the TP ranks.
    """
    for moe in layers:
        if _has_term_of_scores(moe, is_share):
            moe.router.register_forward_hook(partial(_router_hook, tp_mesh))
            activity.patches_applied.add("router-gradients-summed-over-tp")
        if moe.shared_experts is not None:
            activity.patches_applied.add("shared-expert-gradients-not-summed-over-tp")
        if is_share and moe.reorderer is not None:
            moe.register_forward_pre_hook(_remember_length)


def apply_moe_ep_tp(
    precisions: Precisions,
    model: nn.Module,
    *,
    chunks: int = 1,
    score_activations: bool = False,
    row_kernels: bool = False,
    use_deepep: bool = False,
    **options: Any,
) -> None:
    """Parallelize the MoE layers of `model` as TorchTitan does, corrected.

    Args:
        precisions: of the standard backend's two exchanges.
        chunks: into how many parts a DeepEP layer cuts its tokens.
        score_activations: whether its experts' activations are scored, not their outputs.
        row_kernels: whether the standard backend's rows are moved by own kernels.
        options: TorchTitan's own, `tp_mesh`, `ep_mesh`, `etp_mesh` and so on.
    """
    layers = [block.moe for block in model.layers.values() if block.moe_enabled]
    names: dict[str, Any] = {
        "PrepareModuleInputOutput": PrepareMoE,
        "ReordererSequenceParallel": SequenceShareReorderer,
        "RowwiseParallel": PartialOutputRowwiseParallel,
        "ExpertParallel": StandardExpertParallel,
        "ExpertTensorParallel": StandardExpertTensorParallel,
    }
    if precisions.any:
        prepare_quantized_a2a()
        names["ExpertParallel"] = partial(QuantizedExpertParallel, precisions)
    if row_kernels and not use_deepep:
        names["ExpertParallel"] = partial(RowExpertParallel, precisions)
        names["TensorParallel"] = RowTensorParallel
        names["ExpertTensorParallel"] = RowExpertTensorParallel
        for moe in layers:
            use_row_kernels(moe)
    if use_deepep:
        # Importable only where DeepEP is installed.
        from cookbook.titan.tt_0_2_2.deepep import ChunkedExpertParallel, correct

        names["DeepEPExpertParallel"] = ChunkedExpertParallel
        for moe in layers:
            correct(moe, chunks, score_activations)
    # No door: TorchTitan's function makes its plan of classes that it looks up by these names. It
    # is used by other model families too, so that they get their own names back.
    with patch.multiple(llama4_parallelize, **names), warnings.catch_warnings():
        # The DeepEP layer has no reorderer, which TorchTitan's plan names all the same.
        warnings.filterwarnings("ignore", message="Parallelize plan key 'reorderer'")
        llama4_parallelize.apply_moe_ep_tp(model, use_deepep=use_deepep, **options)
    tp_mesh, ep_mesh, etp_mesh = (options.get(f"{name}_mesh") for name in ("tp", "ep", "etp"))
    if tp_mesh is not None:
        is_share = ep_mesh is not None and etp_mesh is None
        _correct_gradients(layers, tp_mesh, is_share)
        for moe in layers:
            if isinstance(moe, RowMoE) and is_share:
                moe.cookbook_share = tp_mesh
