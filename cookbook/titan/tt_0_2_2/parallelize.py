"""Parallelize a model as TorchTitan does, but with correct MoE gradients under TP and EP.

`parallelize` and `apply_moe_ep_tp` call TorchTitan's functions. Only while these run, some parallel
styles and functions in TorchTitan's modules are replaced with the cookbook's.
"""

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
import torchtitan.models.llama4.infra.parallelize as llama4_parallelize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
)

from cookbook.titan.tt_0_2_2 import activity, loss_and_optimizer, routing
from cookbook.titan.tt_0_2_2.checkpoint import save_plain_weights
from cookbook.titan.tt_0_2_2.cpu import sum_gradients_in_fsdp
from cookbook.titan.tt_0_2_2.families import FAMILIES
from cookbook.titan.tt_0_2_2.hidden_states import narrow_hidden_states
from cookbook.titan.tt_0_2_2.mxfp8 import Precisions, QuantizedExpertParallel, prepare_quantized_a2a
from cookbook.titan.tt_0_2_2.recomputation import apply_ac
from cookbook.titan.tt_0_2_2.row_kernels import RowMoE, experts_with_probs, use_row_kernels
from cookbook.titan.tt_0_2_2.token_shard import global_positions, shard_tokens, sum_gradient_over_tp


def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """Parallelize the model, or one pipeline stage, in place of TorchTitan's `parallelize_fn`."""
    parts, layers = FAMILIES[job_config.model.name], routing.moe_layers([model]).values()
    if any(moe.score_before_experts for moe in layers):
        raise ValueError("score_before_experts is on; set it to False: outputs are scored here")
    names: dict[str, Any] = {
        "apply_moe_ep_tp": partial(apply_moe_ep_tp, job_config),
        "apply_ac": apply_ac,
    }
    compiled = job_config.compile
    if compiled.enable and "model" in compiled.components:
        experts_with_probs.compile(compiled.backend)
    has_meshes = parallel_dims.tp_enabled or parallel_dims.ep_enabled
    if job_config.cookbook.row_kernels and not has_meshes:
        # With neither TP nor EP, TorchTitan does not call `apply_moe_ep_tp`, which would do this.
        for moe in layers:
            use_row_kernels(moe, Precisions.of(job_config))
    if job_config.loss.num_chunks:
        loss_and_optimizer.hand_on(model)
        names["ColwiseParallel"] = loss_and_optimizer.HandingOnColwiseParallel
    if routing.chosen_routing(job_config) == routing.RANDOM and job_config.comm.mode == "default":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        routing.route_at_random(model, parallel_dims, job_config, device)
    narrow_hidden_states(model, parallel_dims, job_config.training)
    with patch.multiple(parts.infra, **names):
        model = parts.released().parallelize_fn(model, parallel_dims, job_config)
    if job_config.loss.num_chunks:
        loss_and_optimizer.keep_gathered(model)
    save_plain_weights(model)
    routing.count_tokens(model)
    if not torch.cuda.is_available():
        sum_gradients_in_fsdp(model)
    return model


class PartialOutputRowwiseParallel(RowwiseParallel):
    """The TP style of the shared experts' last linear layer, whose output is a partial sum.

    In the backward, every TP rank already has the full gradient of its output. PyTorch 2.10's
    RowwiseParallel still sums this gradient over TP, which makes the shared experts' gradients TP
    times too large (pytorch/pytorch#172932, fixed in 2.11). This class does not sum it.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = RowwiseParallel._prepare_output_fn(
            output_layouts, False, mod, outputs, device_mesh
        )
        placements = (Replicate() if one.is_partial() else one for one in outputs.placements)
        return outputs.to_local(grad_placements=tuple(placements)) if use_local_output else outputs


class PrepareMoE(PrepareModuleInputOutput):
    """Gathers an MoE layer's input along the sequence and sums its output over TP ranks.

    A DeepEP layer only gets the TP mesh, because its own forward does the communication.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.reorderer is not None:
            return super()._apply(module, device_mesh)
        module.cookbook_tp_mesh = device_mesh
        return module


class SequenceShardReorderer(ParallelStyle):
    """Splits the standard backend's tokens over TP along the sequence.

    TorchTitan's ReordererSequenceParallel splits the flattened batch (batch * sequence) instead. If
    a batch has several sequences, a rank then sends tokens outside its shard of the sequence,
    and the backward of the gather along the sequence drops their gradients.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(mod: nn.Module, inputs: Any) -> tuple[Any, ...]:
            return tuple(shard_tokens(one, mod.cookbook_length, device_mesh) for one in inputs)

        def number_globally(mod: nn.Module, inputs: Any, outputs: Any) -> tuple[Any, Any, Any]:
            top_scores, positions, counts = outputs
            length = mod.cookbook_length
            return top_scores, global_positions(positions, length, device_mesh, mod.top_k), counts

        module.register_forward_pre_hook(cut)
        module.register_forward_hook(number_globally)
        return module


def without_hooks(name: str) -> type[ParallelStyle]:
    """Return TorchTitan's parallel style called `name`, without its input and output hooks."""
    plan = getattr(llama4_parallelize, name)

    def _apply(self: Any, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition_fn)

    return type(f"{name}WithoutHooks", (plan,), {"_apply": _apply})


def _remember_length(moe: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    moe.reorderer.cookbook_length = inputs[0].shape[1]


def _router_hook(tp_mesh: DeviceMesh, router: nn.Module, inputs: Any, outputs: Any) -> Any:
    return sum_gradient_over_tp(outputs[0], tp_mesh), *outputs[1:]


def apply_moe_ep_tp(job_config: Any, model: nn.Module, **options: Any) -> None:
    """Parallelize the MoE layers of `model` with TorchTitan's function of the same name.

    During that call, this module's parallel styles replace those that compute wrong gradients.
    """
    precisions = Precisions.of(job_config)
    # Qwen3's `parallelize_fn` does not pass `use_deepep`, so derive it from the job's options.
    use_deepep = job_config.parallelism.expert_parallel_comm_backend == "deepep"
    options["use_deepep"] = use_deepep
    layers = [block.moe for block in model.layers.values() if block.moe_enabled]
    tp_mesh, ep_mesh, etp_mesh = (options.get(f"{name}_mesh") for name in ("tp", "ep", "etp"))
    names: dict[str, Any] = {
        "PrepareModuleInputOutput": PrepareMoE,
        "ReordererSequenceParallel": SequenceShardReorderer,
        "RowwiseParallel": PartialOutputRowwiseParallel,
        "DeepEPExpertParallel": without_hooks("DeepEPExpertParallel"),
    }
    if precisions.any:
        prepare_quantized_a2a()
        names["ExpertParallel"] = partial(QuantizedExpertParallel, precisions)
    if use_deepep:
        from cookbook.titan.tt_0_2_2.deepep import use_split_moe

        assert ep_mesh is not None
        for moe in layers:
            use_split_moe(moe, ep_mesh.get_group(), job_config.deepep)
    elif job_config.cookbook.row_kernels:
        for name in ("ExpertParallel", "TensorParallel", "ExpertTensorParallel"):
            names[name] = without_hooks(name)
        for moe in layers:
            use_row_kernels(moe, precisions, ep_mesh, tp_mesh if ep_mesh is None else etp_mesh)
    elif ep_mesh is not None and not (precisions.any and etp_mesh is None):
        for moe in layers:
            moe.experts.register_forward_pre_hook(lambda *_: activity.dispatches.add("standard"))
    with patch.multiple(llama4_parallelize, **names), warnings.catch_warnings():
        # Hide the warning that TorchTitan's TP plan names a reorderer, which DeepEP layers lack.
        warnings.filterwarnings("ignore", message="Parallelize plan key 'reorderer'")
        llama4_parallelize.apply_moe_ep_tp(model, **options)
    if tp_mesh is None:
        return
    # Without ETP, EP also spans the TP ranks, and each TP rank sends only its shard of the tokens.
    is_sharded = ep_mesh is not None and etp_mesh is None
    for moe in layers:
        # Sum the gradient of the router's scores over TP. Each TP rank has only part of it, because
        # it computes a partial sum of the experts' outputs or sends only a shard of the tokens.
        moe.router.register_forward_hook(partial(_router_hook, tp_mesh))
        activity.patches_applied.add("router-gradients-summed-over-tp")
        if moe.shared_experts is not None:
            activity.patches_applied.add("shared-expert-gradients-not-summed-over-tp")
        if is_sharded and moe.reorderer is not None:
            moe.register_forward_pre_hook(_remember_length)
        if is_sharded and isinstance(moe, RowMoE):
            moe.cookbook_shard_mesh = tp_mesh
