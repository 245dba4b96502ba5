"""DeepSeek-V3's flavors, two of them the cookbook's; their first use checks a job's options.

TorchTitan's smallest flavors are a debug model of 6 narrow layers and 16B, for at least four GPUs.
`proxy` learns, and fits on one GPU: it shows the effect of a precision on the loss in minutes.
`16B_8layers` is the 16B with 8 of its 27 layers, for the speed of its kernels on two GPUs.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import Any

from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.moe import MoEArgs

from cookbook.titan.tt_0_2_2.attention import choose_attention
from cookbook.titan.tt_0_2_2.checkpoint import save_when_ranks_agree
from cookbook.titan.tt_0_2_2.moe_routing import TRAINED, chosen_routing
from cookbook.titan.tt_0_2_2.mxfp8 import replace_mx_converters
from cookbook.titan.tt_0_2_2.optimizer import watch_gradients
from cookbook.titan.tt_0_2_2.versions import refuse


class ModelArgs(DeepSeekV3ModelArgs):
    """TorchTitan's arguments of DeepSeek-V3; the first door that gets a job's options."""

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Apply the job's options to the arguments; called before the model is built."""
        if not hasattr(job_config, "cookbook"):
            raise refuse(
                f"--experimental.custom_import={__package__} needs the cookbook's options; add "
                f"--job.custom_config_module={__package__}.job_config"
            )
        replace_mx_converters()
        save_when_ranks_agree()
        watch_gradients(job_config)
        choose_attention(self, job_config)
        super().update_from_config(job_config, **kwargs)
        self.moe_args._debug_force_load_balance = chosen_routing(job_config) != TRAINED


PROXY = ModelArgs(
    # That of the local tokenizer.
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
    """Return copies of TorchTitan's flavors of deepseek_v3, and the cookbook's."""
    found = {
        name: ModelArgs(**{part.name: deepcopy(getattr(args, part.name)) for part in fields(args)})
        for name, args in deepseekv3_args.items()
    }
    shorter = deepcopy(found["16B"])
    shorter.n_layers = 8
    return found | {"proxy": deepcopy(PROXY), "16B_8layers": shorter}
