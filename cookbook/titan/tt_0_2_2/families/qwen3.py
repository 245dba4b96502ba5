"""Qwen3-MoE: grouped-query attention with QK norm, routed experts in every layer.

TorchTitan's released `qwen3` ignores the job's EP backend, recomputes the all-to-all even under
selective recomputation, and never updates the routing bias; the cookbook corrects all three.
Neither TorchTitan nor the cookbook supports pipelines for Qwen3.
`30B-A3B_4layers` is 30B-A3B with 4 of its 48 layers, for timing its kernels on one GPU.
"""

from typing import Any, ClassVar

import torch.nn as nn
import torchtitan.models.qwen3.infra.parallelize as infra
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec, qwen3_args
from torchtitan.models.qwen3.model.model import Attention, Qwen3Model

from cookbook.titan.tt_0_2_2.families.parts import (
    SIZES,
    AttentionChoice,
    CookbookArgs,
    FamilyParts,
    copied,
)


class ModelArgs(CookbookArgs, Qwen3ModelArgs):
    SIZES: ClassVar = SIZES | {"kv_heads": "n_kv_heads", "qk_norm": "qk_norm"}
    SIZES |= {"rope": "head_dim", "v_head": "head_dim", "dense_hidden": "hidden_dim"}

    def transformers_config(self, seq_len: int) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": self.hidden_dim,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.moe_args.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": max(seq_len, self.max_seq_len),
            "rope_scaling": None,
            "tie_word_embeddings": self.enable_weight_tying,
            "use_sliding_window": False,
        }


def _take_local(attention: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.to_local() if isinstance(one, DTensor) else one for one in inputs)


class ModelWithAttention(AttentionChoice, Qwen3Model):
    """TorchTitan's Qwen3 with the attention selected by `model.attention`."""

    def __init__(self, model_args: ModelArgs) -> None:
        super().__init__(model_args)
        for block in self.layers.values():
            # Under TP, TorchTitan passes DTensors sharded by head, which some kernels reject.
            block.attention.inner_attention.register_forward_pre_hook(_take_local)


_RELEASED = {name: args for name, args in qwen3_args.items() if args.moe_enabled}

QWEN3 = FamilyParts(
    name="qwen3",
    title="Qwen3-MoE",
    released=get_train_spec,
    infra=infra,
    flavors=copied(ModelArgs, _RELEASED, shorter={"30B-A3B": 4}),
    model=ModelWithAttention,
    attention=Attention,
    scale="scaling",
    weights={
        "model.embed_tokens.weight": ("vocab", "dim"),
        "model.layers.0.mlp.gate.weight": ("num_experts", "dim"),
        "model.layers.0.mlp.experts.0.gate_proj.weight": ("expert_hidden", "dim"),
    },
    has_pipelines=False,
    shares_experts=False,
)
