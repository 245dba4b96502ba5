"""DeepSeek-V3: multi-head latent attention, shared experts, and dense first layers.

TorchTitan's smallest flavors are a debug model of 6 narrow layers, and 16B, which needs four GPUs.
`proxy` fits on one GPU and is large enough to learn: it shows within minutes how a precision
affects the loss. `16B_8layers` is 16B with 8 of its 27 layers, for timing its kernels on two GPUs.
"""

from typing import Any, ClassVar

import torchtitan.models.deepseek_v3.infra.parallelize as infra
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args, get_train_spec
from torchtitan.models.deepseek_v3.model.model import Attention, DeepSeekV3Model
from torchtitan.models.moe import MoEArgs

from cookbook.titan.tt_0_2_2.families.parts import (
    SIZES,
    AttentionChoice,
    CookbookArgs,
    FamilyParts,
    copied,
)


class ModelArgs(CookbookArgs, DeepSeekV3ModelArgs):
    SIZES: ClassVar = SIZES | {"kv_heads": "n_heads", "n_dense_layers": "n_dense_layers"}
    SIZES |= {"q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "dense_hidden": "inter_dim"}
    SIZES |= {"nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v_head": "v_head_dim"}

    def transformers_config(self, seq_len: int) -> dict[str, Any]:
        """Return `config.json` entries of DeepSeek-V3, or of V2 if the router scores by softmax."""
        moe = self.moe_args
        is_v3 = moe.score_func == "sigmoid"
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if seq_len > self.original_seq_len:
            rope |= {
                "rope_type": "yarn",
                "factor": self.rope_factor,
                "original_max_position_embeddings": self.original_seq_len,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "mscale": self.mscale,
                "mscale_all_dim": self.mscale,
            }
        groups = moe.num_expert_groups or 1
        return {
            "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
            "intermediate_size": self.inter_dim,
            "num_key_value_heads": self.n_heads,
            "n_shared_experts": moe.num_shared_experts,
            "n_routed_experts": moe.num_experts,
            "routed_scaling_factor": moe.route_scale,
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": self.q_lora_rank or None,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "n_group": groups,
            "topk_group": moe.num_limited_groups or groups,
            "first_k_dense_replace": self.n_dense_layers,
            "scoring_func": moe.score_func,
            "max_position_embeddings": max(seq_len, self.original_seq_len),
            "rope_scaling": rope,
            "rope_interleave": True,
            "tie_word_embeddings": False,
            **({} if is_v3 else {"topk_method": "greedy"}),
        }


class ModelWithAttention(AttentionChoice, DeepSeekV3Model):
    """TorchTitan's DeepSeek-V3 with the attention selected by `model.attention`."""


PROXY = ModelArgs(
    # The vocabulary size of the tokenizer that `cookbook.install.corpus` makes.
    vocab_size=2048,
    dim=1024,
    inter_dim=4096,
    # Keeps every dimension of the experts' GEMMs a multiple of 128, as in the large models.
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


DEEPSEEK_V3 = FamilyParts(
    name="deepseek_v3",
    title="DeepSeek-V3",
    released=get_train_spec,
    infra=infra,
    flavors=copied(ModelArgs, {**deepseekv3_args, "proxy": PROXY}, shorter={"16B": 8}),
    model=ModelWithAttention,
    attention=Attention,
    scale="softmax_scale",
    weights={
        "model.embed_tokens.weight": ("vocab", "dim"),
        "model.layers.0.self_attn.kv_b_proj.weight": (None, "kv_lora"),
        "model.layers.0.mlp.gate_proj.weight": ("dense_hidden", "dim"),
        "model.layers.{n_dense_layers}.mlp.gate.weight": ("num_experts", "dim"),
    },
    # Published weights have one more layer, for multi-token prediction.
    extra_layers=1,
)
