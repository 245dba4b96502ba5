"""Times the routed experts on one GPU: w1 and w3 one after the other, and as one product.

    python -m bench.gpu_experts [--rows 196608] [--experts 16] [--rounds 3] [--quack]

Forward and backward of the recipes' experts (`scored_experts`), compiled, and of the same with w1
and w3 joined; how far the gradients of the two are apart; and each grouped GEMM by itself. With
`--quack` also those of quack, which FlashAttention-4 brings; it tunes each for 10 to 30 s.
By default the 16B's experts on one of 4 ranks at EP 4, with 4 sequences of 8192 tokens a rank.
`--device cpu` tries it out: not a result.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from cookbook.titan.tt_0_2_2 import probs_on_activations

Tensors = tuple[torch.Tensor, ...]
_REPEATS = 10
_NAMES = ("output", "rows", "scores", "w1", "w3", "w2")


def joined(
    w1: torch.Tensor, w3: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Scored activations (rows, hidden), by one grouped GEMM where the recipes have two."""
    both = torch.cat([w1.bfloat16(), w3.bfloat16()], 1).transpose(-2, -1)
    gate, up = torch._grouped_mm(rows.bfloat16(), both, offs=ends).chunk(2, -1)
    activations = silu(gate) * up
    return (activations * scores).type_as(activations)


def uneven_ends(experts: int, rows: int, device: str) -> torch.Tensor:
    """(experts,) int32: where each group ends; every second one is an eighth larger."""
    sizes = torch.full((experts,), rows // experts)
    more = rows // experts // 64 * 8
    sizes[::2] += more
    sizes[1::2] -= more
    return sizes.cumsum(0).int().to(device)


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """The median of ten times, after two to warm up; one on a CPU."""
    times = []
    for _ in range(_REPEATS + 2 if device == "cuda" else 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def differentiate(activate: Callable[..., torch.Tensor], batch: Tensors, grad: torch.Tensor) -> Any:
    """The outputs, and the gradients of rows, scores, w1, w3 and w2."""
    w1, w3, w2, rows, scores, ends = batch
    activations = activate(w1, w3, rows, scores, ends)
    out = torch._grouped_mm(activations, w2.bfloat16().transpose(-2, -1), offs=ends)
    return out.detach(), *torch.autograd.grad(out, (rows, scores, w1, w3, w2), grad)


def products(
    batch: Tensors, grad: torch.Tensor, quack: bool
) -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
    """Each grouped GEMM of a layer, and how many times the work of w1's it does."""
    w1, w3, w2, rows, _, ends = (one.detach() for one in batch)
    both = torch.cat([w1, w3], 1)
    hidden = torch._grouped_mm(rows, w1.transpose(-2, -1), offs=ends)
    hidden_both = torch.cat([hidden, hidden], 1)

    def by_torch(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(left, right, offs=ends)

    kinds: dict[str, Callable[..., torch.Tensor]] = {"torch": by_torch}
    if quack:
        gemm = importlib.import_module("quack.gemm_interface").gemm
        starts = torch.cat([ends.new_zeros(1), ends])

        def by_quack(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            groups = "cu_seqlens_k" if right.dim() == 2 else "cu_seqlens_m"
            result: torch.Tensor = gemm(left, right, **{groups: starts})
            return result

        kinds["quack"] = by_quack
    operands = {
        "w1": (rows, w1.transpose(-2, -1), 1),
        "w1 and w3": (rows, both.transpose(-2, -1), 2),
        "w2": (hidden, w2.transpose(-2, -1), 1),
        "gradient of w1's input": (hidden, w1, 1),
        "gradient of their input": (hidden_both, both, 2),
        "gradient of w2's input": (grad, w2, 1),
        "gradient of w1": (hidden.t(), rows, 1),
        "gradient of w1 and w3": (hidden_both.t(), rows, 2),
    }
    return {
        f"{kind}, {name}": (partial(by, left, right), share)
        for name, (left, right, share) in operands.items()
        for kind, by in kinds.items()
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4 * 8192 * 6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1408)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quack", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    device, dim, hidden = asked.device, asked.dim, asked.hidden
    if asked.rows % (8 * asked.experts):
        parser.error("--rows: a multiple of 8 for each of --experts")
    torch.manual_seed(0)

    def made(*shape: int, size: float = 0.02) -> torch.Tensor:
        values = torch.randn(*shape, device=device) * size
        return values.bfloat16().requires_grad_()

    weights = (made(asked.experts, hidden, dim), made(asked.experts, hidden, dim))
    scores = torch.rand(asked.rows, 1, device=device).requires_grad_()
    batch = (
        *(*weights, made(asked.experts, dim, hidden)),
        *(made(asked.rows, dim, size=1.0), scores),
        uneven_ends(asked.experts, asked.rows, device),
    )
    grad = torch.randn(asked.rows, dim, device=device).bfloat16()
    backend = "inductor" if device == "cuda" else "eager"
    ways = {
        name: torch.compile(way, backend=backend, fullgraph=True)
        for name, way in (("w1, w3", probs_on_activations._activate), ("joined", joined))
    }
    results = [differentiate(way, batch, grad) for way in ways.values()]
    for name, one, other in zip(_NAMES, *results, strict=True):
        apart = (one.float() - other.float()).norm() / one.float().norm()
        print(f"{name}: apart by {float(apart):.1e}")
    del results
    flop = 2 * asked.rows * dim * hidden
    for _ in range(asked.rounds):
        for name, way in ways.items():
            spent = milliseconds(partial(differentiate, way, batch, grad), device)
            print(f"{name}: {spent:.2f} ms, {9 * flop / spent / 1e9:.0f} TFLOP/s", flush=True)
    for name, (work, share) in products(batch, grad, asked.quack).items():
        spent = milliseconds(work, device)
        print(f"{name}: {spent:.2f} ms, {share * flop / spent / 1e9:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
