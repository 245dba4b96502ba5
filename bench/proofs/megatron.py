"""Train DeepSeek-V3 with Megatron-Core and Transformer Engine: one peer of bench.proofs.peer.

    python -m bench.proofs.megatron cudnn+blockwise+padded --model slice
    torchrun --nproc-per-node=2 -m bench.proofs.megatron deepep      # EP 2

The peer is named by its parts (PARTS), joined with `+`; without one it is BF16, cuDNN's attention
and the all-to-all, with the options of Megatron-Bridge's DeepSeek recipes for Hopper. Nothing waits
for the GPU within a step: with `float(loss)` before the optimizer the peer is 2.6% to 6.1% slower.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

SEQ_LEN = 8192
WARM_UP, STEPS = 3, 10
MARK = "PEER RESULT "
# Tokens that the local corpus uses; the peer draws its tokens below this.
_DRAWN = 2048
# Sizes of a head and of the latent keys and values: both models', and Megatron-Core's defaults.
_LATENT, _NOPE, _ROPE, _VALUE = 512, 128, 64, 128
# The models in MLATransformerConfig's words; the first layer is dense.
MODELS: dict[str, dict[str, Any]] = {
    "16b": {
        "num_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "ffn_hidden_size": 10_944,
        "num_moe_experts": 64,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 2816,
        "moe_router_topk": 6,
        "moe_router_pre_softmax": True,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    # The 671B's widths, 3 layers of 16 experts. Scores are normalized over the chosen experts.
    "slice": {
        "num_layers": 3,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "ffn_hidden_size": 18_432,
        "num_moe_experts": 16,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_bias_update_rate": 1e-3,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
VOCABULARY = {"16b": 102_400, "slice": 129_280}
# Of a microbatch on each GPU.
SEQUENCES = {"16b": 4, "slice": 2}
_FUSIONS = ["apply_rope", "bias_activation", "bias_dropout", "masked_softmax", "moe_permute"]
_FUSIONS += ["moe_router", "cross_entropy_loss", "gradient_accumulation"]
_COMMON: dict[str, Any] = {
    "kv_channels": _VALUE,
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_router_force_load_balancing": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "cross_entropy_fusion_impl": "te",
    "attention_softmax_in_fp32": False,
    "attention_backend": "fused",
    "bf16": True,
    "persist_layer_norm": True,
    **{f"{name}_fusion": True for name in _FUSIONS},
}
# What a part of a peer's name sets.
PARTS: dict[str, dict[str, Any]] = {
    "cudnn": {"attention_backend": "fused"},
    "flash": {"attention_backend": "flash"},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "overlapped": {"moe_shared_expert_overlap": True},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    # FP8 pads the routing map and not the routed rows. In turn it fails: the fused router keeps
    # the map that the padding writes into.
    "padded": {"moe_router_padding_for_quantization": True},
}


def flops_per_token(model: str) -> float:
    """Return the operations of a token's forward and backward, nothing recomputed.

    Two for each weight that the token is multiplied with and each score and value of half a
    sequence; a backward takes twice as many as its forward.
    """
    sizes = MODELS[model]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    layers, rank = sizes["num_layers"], sizes["q_lora_rank"]
    attention = (rank or hidden) * heads * (_NOPE + _ROPE) + hidden * (rank or 0)
    attention += hidden * (_LATENT + _ROPE) + _LATENT * heads * (_NOPE + _VALUE)
    attention += heads * _VALUE * hidden
    expert = sizes["moe_router_topk"] * sizes["moe_ffn_hidden_size"]
    expert += sizes["moe_shared_expert_intermediate_size"]
    moe = 3 * hidden * expert + hidden * sizes["num_moe_experts"]
    weights = layers * attention + 3 * hidden * sizes["ffn_hidden_size"] + (layers - 1) * moe
    weights += hidden * VOCABULARY[model]
    scores = layers * heads * (_NOPE + _ROPE + _VALUE) * SEQ_LEN / 2
    return float(3 * 2 * (weights + scores))


def options_of(peer: str, model: str) -> dict[str, Any]:
    """Return the peer's options of MLATransformerConfig; ValueError for an unknown part."""
    options = _COMMON | MODELS[model]
    options["moe_layer_freq"] = [0] + [1] * (options["num_layers"] - 1)
    for part in peer.split("+"):
        if part not in PARTS:
            raise ValueError(f"{peer}: {part!r} is none of {', '.join(PARTS)}")
        options |= PARTS[part]
    return options


def train(peer: str, model_name: str, microbatches: int, routing: str) -> dict[str, Any]:
    """Train the peer on this process's GPU; return the fields of a training on rank 0."""
    import torch

    _provide_wgrad_gemm()
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    _attend_to_whole_sequences()
    rank, gpus = (int(os.environ.get(key, one)) for key, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(local)
    for key, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(key, value)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=gpus, device_id=local)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=gpus, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(42)
    torch.manual_seed(42)
    options = options_of(peer, model_name) | {"expert_model_parallel_size": gpus}
    options["attention_backend"] = AttnBackend[options["attention_backend"]]
    numbers = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = MLATransformerConfig(**options, **numbers, activation_func=torch.nn.functional.silu)
    if routing == "round-robin":
        _route_in_turn(config.moe_router_topk)
    model, optimizer = _model_and_optimizer(config, VOCABULARY[model_name], gpus)
    sequences, times, losses = SEQUENCES[model_name], [], []
    draw = torch.Generator("cuda").manual_seed(1 + rank)
    positions = torch.arange(SEQ_LEN, device="cuda").repeat(sequences, 1)
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        total = torch.zeros((), device="cuda")
        for number in range(microbatches):
            shape = (sequences, SEQ_LEN + 1)
            drawn = torch.randint(_DRAWN, shape, device="cuda", generator=draw)
            inputs, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
            loss = model(inputs, positions, None, labels=labels).float().mean() / microbatches
            last = number == microbatches - 1 or gpus == 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss.backward()
            total += loss.detach()
        finalize_model_grads([model])
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(total)
    first = losses[0]
    torch.distributed.all_reduce(first)
    import megatron.core
    import transformer_engine
    import transformer_engine_torch  # only `import transformer_engine` finds it

    seconds = statistics.median(times[WARM_UP:])
    return {
        "tokens_per_second": sequences * SEQ_LEN * microbatches / seconds,
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "first_loss": float(first) / gpus,
        "versions": {
            "GPU": torch.cuda.get_device_name(),
            "its torch": torch.__version__,
            "Megatron-Core": megatron.core.__version__,
            "Transformer Engine": transformer_engine.__version__,
            "cuDNN": str(transformer_engine_torch.get_cudnn_version()),
        },
    }


def _model_and_optimizer(config: Any, vocabulary: int, gpus: int) -> tuple[Any, Any]:
    """Return the model with FP32 gradients, and Adam with FP32 main weights and moments."""
    import torch
    from megatron.core.distributed import DistributedDataParallel as Wrapped
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    inner = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=vocabulary,
        max_sequence_length=SEQ_LEN,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).cuda()
    hidden = {"overlap_grad_reduce": gpus > 1, "overlap_param_gather": gpus > 1}
    fp32 = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
    model = Wrapped(config, DistributedDataParallelConfig(**fp32, **hidden), inner)
    adam = {"adam_beta2": 0.95, "weight_decay": 0.1, "lr": 1e-6, "min_lr": 1e-6, "clip_grad": 1.0}
    numbers = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    numbers |= {"overlap_param_gather": gpus > 1, "fp8_recipe": config.fp8 and config.fp8_recipe}
    settings = OptimizerConfig(optimizer="adam", **adam, **numbers)
    return model, get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def _route_in_turn(chosen: int) -> None:
    """Deal experts to tokens as TorchTitan's forced balance does; the peer's own is random."""
    import torch
    from megatron.core.transformer.moe import router

    def dealt(logits: Any) -> Any:
        flat = logits.reshape(-1, logits.shape[-1])
        turn = torch.arange(len(flat) * chosen, device=flat.device).view(-1, chosen)
        scores = torch.zeros_like(flat).scatter_(1, turn % flat.shape[-1], 1.0)
        # Gradients flow to the router in both routings.
        return (flat * 0 + scores).view(logits.shape)

    router.apply_random_logits = dealt


def _provide_wgrad_gemm() -> None:
    """Stand in for APEX's module, which adds a weight gradient to FP32 inside the GEMM."""

    def accumulate(rows: Any, grad: Any, main_grad: Any) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        how = {"layout": "NT", "grad": True, "accumulate": True}
        general_gemm(rows, grad, out_dtype=main_grad.dtype, out=main_grad, **how)

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[module.__name__] = module


def _attend_to_whole_sequences() -> None:
    """Pass None for a window without a limit, for which flash-attn-4 does not know -1."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    attend: Any = getattr(backends, "flash_attn_func_v4", None)

    def corrected(*args: Any, window_size: Sequence[int | None] = (), **options: Any) -> Any:
        window = tuple(None if side is None or side < 0 else side for side in window_size)
        return attend(*args, window_size=window or (None, None), **options)

    if attend is not None:
        backends.flash_attn_func_v4 = corrected


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peer", help=f"parts joined with +: {', '.join(PARTS)}")
    parser.add_argument("--model", choices=MODELS, default="16b")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--routing", choices=("round-robin", "random"), default="round-robin")
    options = parser.parse_args()
    made = train(options.peer, options.model, options.microbatches, options.routing)
    if int(os.environ.get("RANK", 0)) == 0:
        print(MARK + json.dumps(made), flush=True)
    import torch

    # Leave at once: the teardown of NCCL and DeepEP is not measured, and can hang.
    torch.distributed.barrier()
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
