"""Times on two GPUs what padding groups and splitting tokens cost, as a part of a training step.

    torchrun --nproc-per-node=2 -m bench.gpu_cost [--step-ms 1348.9] [-o cost.json]

Times, forward and backward, what one MoE layer of the 16B model does around its GEMMs on one of 4
ranks at TP 2, EP 4 with 4 sequences of 8192; a step has 26 such layers.

Padding: TorchTitan's released permutation, the cookbook's with groups padded to 32, and the same
with groups left as they are (alignment 1); the last two differ by the padding.

Splitting: the way in and out of a layer whose TP ranks each send their share of the tokens, with
what that needs of the router's scores, and of one whose ranks send all. Both gather the input along
the sequence and sum the output over TP.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cookbook.base.files import write_whole
from cookbook.titan.common.expert_groups import collect, plan_groups, spread
from cookbook.titan.common.token_shard import (
    TokenShard,
    gather_sequence,
    reduce_scatter_sequence,
    shard_tokens,
    sum_gradient_over_tp,
)

SEQUENCES, LENGTH, FEATURES = 4, 8192, 2048
TP, EP, EXPERTS, TOP_K, LAYERS = 2, 4, 64, 6, 26


def milliseconds(work: Callable[[], Any], device: str, repeats: int) -> float:
    """The median time of `work`, after a few runs to warm up."""
    times: list[float] = []
    for _ in range(repeats + 3):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
    return sorted(times[3:])[repeats // 2]


def received(device: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one rank gets of `tokens` on each of EP ranks, routed at random."""
    chosen = torch.rand(EP * tokens, EXPERTS, device=device).topk(TOP_K).indices
    local = chosen.masked_fill(chosen >= EXPERTS // EP, -1)
    local = local[(local >= 0).any(1)]
    values = torch.randn(len(local), FEATURES, device=device, dtype=torch.bfloat16)
    scores = torch.rand(local.shape, device=device).masked_fill(local < 0, 0)
    return values.requires_grad_(), local, scores.requires_grad_()


def padding(device: str, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one layer's permutation and its undoing."""
    values, experts, scores = received(device, tokens)
    counts = [int((experts == expert).sum()) for expert in range(EXPERTS // EP)]

    def permute(alignment: int) -> Callable[[], None]:
        def work() -> None:
            plan = plan_groups(experts, counts, alignment)
            collect(spread(values, None, plan), scores, plan).backward(values)

        return work

    times = {
        "permute, padded to 32": milliseconds(permute(32), device, repeats),
        "permute, not padded": milliseconds(permute(1), device, repeats),
    }
    try:
        from torchtitan.distributed.deepep import deepep
    except ImportError:
        return times

    def released() -> None:
        rows, by_row, indices = deepep._permute_tokens(values, experts, scores)
        rows = rows * by_row.to(rows.dtype).reshape(-1, 1)
        deepep._unpermute_tokens(rows, indices, len(values)).backward(values)

    return times | {"permute, released": milliseconds(released, device, repeats)}


def splitting(
    device: str, tp_mesh: DeviceMesh, sequences: int, length: int, repeats: int
) -> dict[str, float]:
    """Milliseconds of one layer's way in and out; the experts are left out, dispatch included."""
    share = TokenShard.of_mesh(length, tp_mesh)
    shape = (sequences, length // TP, FEATURES)
    mine = torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
    upstream = torch.randn_like(mine)
    scores = torch.rand(sequences * length, TOP_K, device=device).requires_grad_()
    experts = torch.randint(EXPERTS, scores.shape, device=device)

    def split_scores() -> tuple[torch.Tensor, torch.Tensor]:
        own = shard_tokens(sum_gradient_over_tp(scores, tp_mesh), share)
        shard_tokens(experts, share)
        return own, own.detach()

    def split() -> None:
        shared = gather_sequence(mine, tp_mesh)
        own, gradient = split_scores()
        out = reduce_scatter_sequence(shared, tp_mesh) + mine
        torch.autograd.backward([out, own], [upstream, gradient])

    def not_split() -> None:
        whole = gather_sequence(mine, tp_mesh)
        reduce_scatter_sequence(whole + whole, tp_mesh).backward(upstream)

    def scores_only() -> None:
        own, gradient = split_scores()
        own.backward(gradient)

    return {
        "in and out, split": milliseconds(split, device, repeats),
        "in and out, not split": milliseconds(not_split, device, repeats),
        "scores of the split alone": milliseconds(scores_only, device, repeats),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, help="a measured step, for the percentages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    device, real = options.device, options.device == "cuda"
    if int(os.environ.get("WORLD_SIZE", "1")) != TP:
        parser.error(f"start it with torchrun --nproc-per-node={TP}: TP needs {TP} ranks")
    if real:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tp_mesh = init_device_mesh(device, (TP,), mesh_dim_names=("tp",))
    sequences, length, repeats = (SEQUENCES, LENGTH, 50) if real else (2, 64, 3)
    times = padding(device, sequences * length // TP, repeats)
    times |= splitting(device, tp_mesh, sequences, length, repeats)
    per_step = {
        "padding": times["permute, padded to 32"] - times["permute, not padded"],
        "splitting": times["in and out, split"] - times["in and out, not split"],
    }
    per_step = {name: ms * LAYERS for name, ms in per_step.items()}
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if real else "cpu (tried out, not a result)",
        "torch": torch.__version__,
        "milliseconds_per_layer": {name: round(ms, 4) for name, ms in times.items()},
        "milliseconds_per_step": {name: round(ms, 3) for name, ms in per_step.items()},
    }
    if options.step_ms:
        percent = {name: 100 * ms / options.step_ms for name, ms in per_step.items()}
        percent["together"] = sum(percent.values())
        found["step_ms"] = options.step_ms
        found["percent_of_step"] = {name: round(part, 3) for name, part in percent.items()}
    if tp_mesh.get_local_rank() == 0:
        text = json.dumps(found, indent=1)
        print(text)
        if options.output:
            write_whole(options.output, text + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
