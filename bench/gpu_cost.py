"""In: one GPU. Out: what padding groups and splitting tokens cost, as a part of a training step.

    python -m bench.gpu_cost [--step-ms 1500] [-o cost.json]

Times, forward and backward, what one MoE layer of the 16B model does around its GEMMs on one of 4
ranks at TP 2, EP 4 with 4 sequences of 8192: TorchTitan's released permutation, the cookbook's with
groups padded to 32 and with groups left as they are (alignment 1), and the split over TP. The cost
of padding is the difference of the middle two; a step has 26 such layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cookbook.files import write_whole
from cookbook.titan.expert_groups import collect, plan_groups, spread
from cookbook.titan.token_split import Share, put_share, take_share

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


def measure(device: str, sequences: int, length: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one layer, forward and backward."""
    tokens = sequences * length // TP
    values, experts, scores = received(device, tokens)
    counts = [int((experts == expert).sum()) for expert in range(EXPERTS // EP)]

    def permute(alignment: int) -> Callable[[], None]:
        def work() -> None:
            plan = plan_groups(experts, counts, alignment)
            collect(spread(values, None, plan), scores, plan).backward(values)

        return work

    whole = torch.randn(sequences, length, FEATURES, device=device, dtype=torch.bfloat16)
    whole.requires_grad_()
    share = Share.of_rank(length, 1, TP)

    def split() -> None:
        mine = take_share(whole.view(-1, FEATURES), share).view(sequences, -1, FEATURES)
        put_share(whole, mine, share).backward(whole)

    def whole_sum() -> None:
        # What the layer does without a split: add the routed output to the shared experts'.
        (whole + whole).backward(whole)

    times = {
        "permute, padded to 32": milliseconds(permute(32), device, repeats),
        "permute, not padded": milliseconds(permute(1), device, repeats),
        "split over TP and sum": milliseconds(split, device, repeats),
        "sum without a split": milliseconds(whole_sum, device, repeats),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, help="a measured step, for the percentages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    real = options.device == "cuda"
    size = (SEQUENCES, LENGTH, 20) if real else (2, 64, 1)
    times = measure(options.device, *size)
    padding = times["permute, padded to 32"] - times["permute, not padded"]
    splitting = times["split over TP and sum"] - times["sum without a split"]
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if real else "cpu (tried out, not a result)",
        "torch": torch.__version__,
        "milliseconds_per_layer": {name: round(ms, 4) for name, ms in times.items()},
        "padding_ms_per_step": round(padding * LAYERS, 3),
        "splitting_ms_per_step": round(splitting * LAYERS, 3),
    }
    if options.step_ms:
        percent = 100 * (padding + splitting) * LAYERS / options.step_ms
        found |= {"step_ms": options.step_ms, "percent_of_step": round(percent, 3)}
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        write_whole(options.output, text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
