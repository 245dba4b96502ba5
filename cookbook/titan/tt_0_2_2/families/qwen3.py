"""Qwen3-MoE: grouped-query attention with normed queries and keys, routed experts in every layer.

As released, TorchTitan's `qwen3` ignores the EP backend, recomputes the all-to-all where operators
are saved, and never moves the routing bias. It has no pipelines.
`30B-A3B_4layers` is the 30B with 4 of its 48 layers, for the speed of its kernels on one GPU.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn as nn
import torchtitan.models.qwen3.infra.parallelize as infra
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec, qwen3_args
from torchtitan.models.qwen3.model.model import Attention, Qwen3Model, apply_rotary_emb

from cookbook.base.family import Model
from cookbook.titan.tt_0_2_2.families.parts import (
    AttentionChoice,
    CookbookArgs,
    DocumentAttentionKernel,
    FamilyParts,
    copied,
    sizes_of,
)


class ModelArgs(CookbookArgs, Qwen3ModelArgs):
    """TorchTitan's arguments of Qwen3."""

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dimensions of queries and keys, and of values."""
        return self.head_dim, self.head_dim


def flavors() -> dict[str, ModelArgs]:
    """Return copies of TorchTitan's flavors with experts, and the cookbook's."""
    found = copied(ModelArgs, {name: one for name, one in qwen3_args.items() if one.moe_enabled})
    shorter = deepcopy(found["30B-A3B"])
    shorter.n_layers = 4
    return found | {"30B-A3B_4layers": shorter}


def sizes(args: ModelArgs) -> Model:
    """Return the sizes of a flavor."""
    return sizes_of(
        args,
        kv_heads=args.n_kv_heads,
        qk_norm=args.qk_norm,
        q_lora=0,
        kv_lora=0,
        nope=0,
        rope=args.head_dim,
        v_head=args.head_dim,
        dense_hidden=args.hidden_dim,
        n_dense_layers=0,
    )


class DocumentAttention(Attention):
    """TorchTitan's attention layer with cumulative lengths in the place of a BlockMask."""

    def __init__(self, model_args: Any) -> None:
        super().__init__(model_args)
        self.inner_attention = DocumentAttentionKernel()

    def forward(
        self,
        x: torch.Tensor,
        rope_cache: torch.Tensor,
        attention_masks: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute as TorchTitan 0.2.2's method of this name, with the same submodules.

        Args:
            x: (batch, length, dim).
            attention_masks: cumulative lengths of the folded batch, from `cumulative_lengths`.
        """
        batch, length, _ = x.shape
        # -1: under TP a rank holds a part of the heads.
        shape = batch, length, -1, self.head_dim
        q, k, v = (linear(x).view(shape) for linear in (self.wq, self.wk, self.wv))
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = *apply_rotary_emb(q, k, rope_cache, positions), v
        q, k, v = (one.transpose(1, 2) for one in heads)
        output = self.inner_attention(q, k, v, cu_seqlens=attention_masks, scale=self.scaling)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))


def _take_local(attention: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.to_local() if isinstance(one, DTensor) else one for one in inputs)


class ModelWithAttention(AttentionChoice, Qwen3Model):
    """TorchTitan's Qwen3 with the attention that its arguments name."""

    document_attention = DocumentAttention
    op_sac_save_list = infra._op_sac_save_list

    def __init__(self, model_args: ModelArgs) -> None:
        super().__init__(model_args)
        for block in self.layers.values():
            # Under TP, TorchTitan passes DTensors sharded by head; not every attention takes them.
            block.attention.inner_attention.register_forward_pre_hook(_take_local)
        # As TorchTitan does for DeepSeek-V3.
        self.op_sac_save_list.add(torch.ops._c10d_functional.all_to_all_single.default)


def transformers_config(args: ModelArgs, seq_len: int) -> dict[str, Any]:
    """Return the keys of transformers' Qwen3-MoE."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": args.hidden_dim,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "num_experts": args.moe_args.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": max(seq_len, args.max_seq_len),
        "rope_scaling": None,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_sliding_window": False,
    }


QWEN3 = FamilyParts(
    title="Qwen3-MoE",
    released=get_train_spec,
    infra=infra,
    flavors=flavors,
    sizes=sizes,
    model=ModelWithAttention,
    attention=Attention,
    scale="scaling",
    transformers_config=transformers_config,
    weights={
        "model.embed_tokens.weight": ("vocab", "dim"),
        "model.layers.0.mlp.gate.weight": ("num_experts", "dim"),
        "model.layers.0.mlp.experts.0.gate_proj.weight": ("expert_hidden", "dim"),
    },
    has_pipelines=False,
)
