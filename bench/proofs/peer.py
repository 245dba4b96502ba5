"""Train Megatron-Core and the cookbook's cell in turn on one GPU: docs/notebook, 2026-11-24.

    python -m bench.proofs.peer OUT [--python PEER/bin/python] [--repeats 2] [--microbatches 1]

Both train DeepSeek-V3 16B with 8 of its 27 layers: 4 sequences of 8192 tokens a microbatch, BF16
with FP32 main weights, plain causal attention, forced balance. The peer runs once per attention
backend in each round. Exit with status 1 if a run fails or attention backends disagree on the first
loss: then one of them computes something else, however fast.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CELL = "docs/evidence/results/h200/rows_8layers.yaml"
ATTENTION = ("fused", "flash")
SEQ_LEN, SEQUENCES, VOCABULARY = 8192, 4, 102_400
WARM_UP, STEPS = 3, 10
# Transformer Engine 2.20.2 with a wrong window had 11.9367 where 11.9300 is right.
MOST_APART = 0.002
# Tokens that the local corpus uses; the peer draws its tokens below this.
_DRAWN = 2048
_MARK = "PEER RESULT "
# DeepSeek-V3 16B, whose first layer is dense.
LAYERS, HIDDEN, HEADS, DENSE, EXPERT, EXPERTS, CHOSEN, SHARED = 8, 2048, 16, 10_944, 1408, 64, 6, 2
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128


def flops_per_token() -> float:
    """Return the operations of a token's forward and backward, nothing recomputed.

    Two for each weight that the token is multiplied with and each score and value of half a
    sequence; a backward takes twice as many as its forward.
    """
    projections = HIDDEN * HEADS * (NOPE + ROPE) + HIDDEN * (LATENT + ROPE)
    projections += LATENT * HEADS * (NOPE + VALUE) + HEADS * VALUE * HIDDEN
    moe = (CHOSEN + SHARED) * 3 * HIDDEN * EXPERT + HIDDEN * EXPERTS
    weights = LAYERS * projections + 3 * HIDDEN * DENSE + (LAYERS - 1) * moe + HIDDEN * VOCABULARY
    attention = HEADS * (NOPE + ROPE + VALUE) * SEQ_LEN / 2
    return 3 * 2 * (weights + LAYERS * attention)


@dataclass(frozen=True)
class Result:
    """One training: the median speed after warm-up, reserved memory and the first loss."""

    name: str
    tokens_per_second: float
    memory_gib: float
    first_loss: float | None = None


def train_peer(attention: str, microbatches: int) -> Result:
    """Train the peer in this process, with the options of Megatron-Bridge's DeepSeek recipes."""
    import torch

    _provide_wgrad_gemm()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel as Wrapped
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    _attend_to_whole_sequences()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(42)
    model_parallel_cuda_manual_seed(42)
    gc.disable()
    config = _peer_config(attention)
    inner = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LEN,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).cuda()
    fp32 = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
    model = Wrapped(config, DistributedDataParallelConfig(**fp32), inner)
    adam = {"adam_beta2": 0.95, "weight_decay": 0.1, "lr": 1e-6, "min_lr": 1e-6, "clip_grad": 1.0}
    numbers = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    settings = OptimizerConfig(optimizer="adam", **adam, **numbers)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    draw = torch.Generator("cuda").manual_seed(1)
    positions = torch.arange(SEQ_LEN, device="cuda").repeat(SEQUENCES, 1)
    shape, times, losses = (SEQUENCES, SEQ_LEN + 1), [], []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for _ in range(microbatches):
            drawn = torch.randint(_DRAWN, shape, device="cuda", generator=draw)
            inputs, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
            loss = model(inputs, positions, None, labels=labels).float().mean() / microbatches
            loss.backward()
            total += float(loss.detach())
        finalize_model_grads([model])
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(total)
    speed = SEQUENCES * SEQ_LEN * microbatches / statistics.median(times[WARM_UP:])
    memory = torch.cuda.max_memory_reserved() / 2**30
    return Result(f"Megatron-Core, {attention}", speed, memory, losses[0])


def _peer_config(attention: str) -> Any:
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fusions = ["apply_rope", "bias_activation", "bias_dropout", "masked_softmax"]
    fusions += ["cross_entropy_loss", "moe_permute", "moe_router", "gradient_accumulation"]
    # The sizes of attention and YaRN's numbers are the class's defaults.
    return MLATransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=DENSE,
        q_lora_rank=None,
        qk_layernorm=True,
        mscale=0.707,
        mscale_all_dim=0.707,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=EXPERT,
        moe_shared_expert_intermediate_size=SHARED * EXPERT,
        moe_layer_freq=[0] + [1] * (LAYERS - 1),
        moe_router_topk=CHOSEN,
        moe_router_pre_softmax=True,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_force_load_balancing=True,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        cross_entropy_fusion_impl="te",
        attention_softmax_in_fp32=False,
        attention_backend=AttnBackend[attention],
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        persist_layer_norm=True,
        **{f"{name}_fusion": True for name in fusions},
    )


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


def join_documents(texts: Iterable[str], characters: int = 1_300_000) -> list[str]:
    """Join texts into documents of so many characters, so that hardly any sequence has an end."""
    joined = [""]
    for text in texts:
        joined[-1] += text
        if len(joined[-1]) >= characters:
            joined.append("")
    return [one for one in joined if one]


def read_peer(text: str) -> Result:
    """Parse a peer's output; ValueError if it has no result."""
    found = [line for line in text.splitlines() if line.startswith(_MARK)]
    if not found:
        raise ValueError(text.strip()[-2000:] or "the peer printed nothing")
    return Result(**json.loads(found[-1].removeprefix(_MARK)))


def read_report(text: str) -> Result:
    """Parse the one cell of `submit.py report --format json`; ValueError unless it finished."""
    (cell,) = json.loads(text)["cells"]
    if cell["status"] != "finished":
        raise ValueError(f"{cell['name']}: {cell['status']}: {cell['reason']}")
    return Result(cell["name"], cell["tokens_per_second_per_gpu"], cell["memory_gib"])


def first_loss_apart(results: Iterable[Result]) -> float:
    """Return how far apart the peer's first losses are; infinite if one is not finite."""
    losses = [one.first_loss for one in results if one.first_loss is not None]
    apart = max(losses, default=0.0) - min(losses, default=0.0)
    return apart if all(map(math.isfinite, losses)) else math.inf


def _run(words: Sequence[str], **environment: str) -> str:
    env = os.environ | environment
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def train_cell(out: Path, microbatches: int) -> Result:
    """Train the cookbook's cell on long documents."""
    corpus = out / "corpus"
    if not corpus.exists():
        from cookbook.base.paths import LOCAL_ASSETS

        text = (LOCAL_ASSETS / "corpus/stdlib.jsonl").read_text(encoding="utf-8")
        documents = join_documents(json.loads(line)["text"] for line in text.splitlines())
        corpus.mkdir(parents=True)
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (corpus / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    settings = [f"--set=training.dataset_path={corpus}"]
    settings += [f"--set=training.steps={WARM_UP + STEPS}"]
    settings += [f"--set=training.global_batch_size={SEQUENCES * microbatches}"]
    runs = out / f"runs-{time.time_ns()}"
    submit = [sys.executable, "submit.py"]
    where = ["--cluster", "local", "--precision", "bf16", "--ep-backend", "standard"]
    said = _run([*submit, "run", CELL, *where, *settings], COOKBOOK_RUNS=str(runs))
    made = next(runs.glob("*/run.json"), None)
    if made is None:
        raise ValueError(said[-2000:])
    return read_report(_run([*submit, "report", str(made.parent), "--format", "json"]))


def render(results: Sequence[Result]) -> str:
    """Return a line for each training, in the order that they ran, and the check of losses."""
    lines = ["| | tokens/s | TFLOP/s | GiB | first loss |", "| --- | ---: | ---: | ---: | ---: |"]
    for one in results:
        loss = "" if one.first_loss is None else f"{one.first_loss:.4f}"
        tflops = one.tokens_per_second * flops_per_token() / 1e12
        speed = f"{one.tokens_per_second:,.0f} | {tflops:.0f}"
        lines.append(f"| {one.name} | {speed} | {one.memory_gib:.1f} | {loss} |")
    apart = first_loss_apart(results)
    word = "agree" if apart <= MOST_APART else "DISAGREE: attention is wrong in one of them"
    return "\n".join([*lines, "", f"first losses of the peer {word} (within {apart:.4f})"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of the peer's environment")
    parser.add_argument("--repeats", type=int, default=2, help="rounds, default 2")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step, default 1")
    parser.add_argument("--train-peer", choices=ATTENTION, help="only this, in this process")
    options = parser.parse_args()
    if options.train_peer:
        result = train_peer(options.train_peer, options.microbatches)
        print(_MARK + json.dumps(asdict(result)), flush=True)
        return 0
    words = [options.python, "-m", "bench.proofs.peer", str(options.out)]
    words.append(f"--microbatches={options.microbatches}")
    results: list[Result] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for _ in range(options.repeats):
        results.append(train_cell(options.out.resolve(), options.microbatches))
        for attention in ATTENTION:
            results.append(read_peer(_run([*words, f"--train-peer={attention}"])))
        (options.out / "peer.json").write_text(json.dumps([asdict(one) for one in results]))
    print(render(results))
    return int(first_loss_apart(results) > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
