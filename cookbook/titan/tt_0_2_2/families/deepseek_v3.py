"""DeepSeek-V3: multi-head latent attention, shared experts, dense layers at the start.

TorchTitan's smallest flavors are a debug model of 6 narrow layers and 16B, for at least four GPUs.
`proxy` learns, and fits on one GPU: it shows the effect of a precision on the loss in minutes.
`16B_8layers` is the 16B with 8 of its 27 layers, for the speed of its kernels on two GPUs.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torchtitan.models.deepseek_v3.infra.parallelize as infra
from torchtitan.models.deepseek_v3 import (
    DeepSeekV3ModelArgs,
    deepseekv3_args,
    get_train_spec,
)
from torchtitan.models.deepseek_v3.model.model import (
    Attention,
    DeepSeekV3Model,
    apply_rotary_emb,
)
from torchtitan.models.moe import MoEArgs

from cookbook.base.family import Model
from cookbook.titan.tt_0_2_2.families.parts import (
    AttentionChoice,
    CookbookArgs,
    DocumentAttentionKernel,
    FamilyParts,
    copied,
    sizes_of,
)


class ModelArgs(CookbookArgs, DeepSeekV3ModelArgs):
    """TorchTitan's arguments of DeepSeek-V3."""

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dimensions of queries and keys, and of values."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim


PROXY = ModelArgs(
    # The local tokenizer's.
    vocab_size=2048,
    dim=1024,
    inter_dim=4096,
    # Every dimension of the experts' GEMMs is a multiple of 128, as on the large models.
    moe_inter_dim=512,
    n_layers=8,
    n_dense_layers=1,
    n_heads=16,
    moe_args=MoEArgs(
        num_experts=32,
        num_shared_experts=1,
        top_k=4,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.5,
        score_before_experts=False,
    ),
    q_lora_rank=0,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mscale=0.70,
)


def flavors() -> dict[str, ModelArgs]:
    """Return copies of TorchTitan's flavors, and the cookbook's."""
    found = copied(ModelArgs, deepseekv3_args)
    shorter = deepcopy(found["16B"])
    shorter.n_layers = 8
    return found | {"proxy": deepcopy(PROXY), "16B_8layers": shorter}


def sizes(args: ModelArgs) -> Model:
    """Return the sizes of a flavor."""
    return sizes_of(
        args,
        kv_heads=args.n_heads,
        qk_norm=False,
        q_lora=args.q_lora_rank,
        kv_lora=args.kv_lora_rank,
        nope=args.qk_nope_head_dim,
        rope=args.qk_rope_head_dim,
        v_head=args.v_head_dim,
        dense_hidden=args.inter_dim,
        n_dense_layers=args.n_dense_layers,
    )


class DocumentAttention(Attention):
    """TorchTitan's attention layer with cumulative lengths in the place of a BlockMask."""

    def __init__(self, model_args: Any) -> None:
        super().__init__(model_args)
        self.inner_attention = DocumentAttentionKernel()

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor,
        attention_masks: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute as TorchTitan 0.2.2's method of this name, with the same submodules.

        No door: TorchTitan's insists on a BlockMask, or on none.

        Args:
            x: (batch, length, dim).
            attention_masks: cumulative lengths of the folded batch, from `cumulative_lengths`.
        """
        batch, length, _ = x.size()
        q = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        # -1: under TP a rank holds a part of the heads.
        q = q.view(batch, length, -1, self.qk_head_dim)
        q_nope, q_pe = torch.split(q, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q = torch.cat([q_nope, apply_rotary_emb(q_pe, freqs_cis, positions)], dim=-1)

        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), freqs_cis, positions)
        kv = self.wkv_b(self.kv_norm(kv))
        kv = kv.view(batch, length, -1, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = torch.split(kv, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)

        output = self.inner_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            cu_seqlens=attention_masks,
            scale=self.softmax_scale,
        )
        return self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))


class ModelWithAttention(AttentionChoice, DeepSeekV3Model):
    """TorchTitan's DeepSeek-V3 with the attention that its arguments name."""

    document_attention = DocumentAttention
    op_sac_save_list = infra._op_sac_save_list


def transformers_config(args: ModelArgs, seq_len: int) -> dict[str, Any]:
    """Return the keys of transformers' DeepSeek-V3, or of V2 where scores are a softmax."""
    moe = args.moe_args
    is_v3 = moe.score_func == "sigmoid"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if seq_len > args.original_seq_len:
        rope |= {
            "rope_type": "yarn",
            "factor": args.rope_factor,
            "original_max_position_embeddings": args.original_seq_len,
            "beta_fast": args.beta_fast,
            "beta_slow": args.beta_slow,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale,
        }
    groups = moe.num_expert_groups or 1
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "intermediate_size": args.inter_dim,
        "num_key_value_heads": args.n_heads,
        "n_shared_experts": moe.num_shared_experts,
        "n_routed_experts": moe.num_experts,
        "routed_scaling_factor": moe.route_scale,
        "kv_lora_rank": args.kv_lora_rank,
        "q_lora_rank": args.q_lora_rank or None,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "n_group": groups,
        "topk_group": moe.num_limited_groups or groups,
        "first_k_dense_replace": args.n_dense_layers,
        "scoring_func": moe.score_func,
        "max_position_embeddings": max(seq_len, args.original_seq_len),
        "rope_scaling": rope,
        "rope_interleave": True,
        "tie_word_embeddings": False,
    }
    if not is_v3:
        config["topk_method"] = "greedy"
    return config


DEEPSEEK_V3 = FamilyParts(
    title="DeepSeek-V3",
    released=get_train_spec,
    infra=infra,
    flavors=flavors,
    sizes=sizes,
    model=ModelWithAttention,
    attention=Attention,
    scale="softmax_scale",
    transformers_config=transformers_config,
    weights={
        "model.embed_tokens.weight": ("vocab", "dim"),
        "model.layers.0.self_attn.kv_b_proj.weight": (None, "kv_lora"),
        "model.layers.0.mlp.gate_proj.weight": ("dense_hidden", "dim"),
    },
    # It predicts the token after the next one.
    extra_layers=1,
)
