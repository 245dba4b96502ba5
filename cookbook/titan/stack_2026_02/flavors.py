"""In: nothing. Out: a DeepSeek-V3 flavor that is large enough to learn and fits on one GPU.

TorchTitan's own flavors are a debug model of 6 narrow layers, and then 16B parameters, which take
eight GPUs. `proxy` stands between them: what a precision does to the loss shows on it in minutes.
"""

from __future__ import annotations

from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.moe import MoEArgs

PROXY = DeepSeekV3ModelArgs(
    # As many as the local tokenizer has.
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


def add_flavors() -> None:
    """Make `--model.flavor=proxy` known to TorchTitan's DeepSeek-V3."""
    deepseekv3_args.setdefault("proxy", PROXY)
