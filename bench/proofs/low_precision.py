"""Time FP8 kernels against the bytes they must move, and GEMMs in FP8 and BF16, on one GPU.

    python -m bench.proofs.low_precision OUT [--models 671b 16b qwen3]

Sizes are those of one MoE layer and its dense products: a slice of the 671B with 16 experts and
16,384 tokens, the 16B and Qwen3-30B-A3B with 32,768 tokens. Each figure is the median of runs over
inputs that exceed the cache. Kernels are first compared with `fp8.py`'s PyTorch operations, bit for
bit. OUT/low_precision.json has all figures.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from cookbook.base.tables import markdown_table
from cookbook.titan.common import expert_groups, fp8, weight_copies

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Sizes:
    """One MoE layer, and the dense products (out, in) that go with it."""

    tokens: int
    features: int
    hidden: int
    experts: int
    top_k: int
    dense: tuple[tuple[int, int], ...]


MODELS = {
    "671b": Sizes(
        16384, 7168, 2048, 16, 8,
        ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (18432, 7168),
         (7168, 18432), (2048, 7168), (7168, 2048)),
    ),
    "16b": Sizes(
        32768, 2048, 1408, 64, 6,
        ((3072, 2048), (576, 2048), (4096, 512), (2048, 2048), (10944, 2048), (2048, 10944),
         (2816, 2048), (2048, 2816)),
    ),
    "qwen3": Sizes(32768, 2048, 768, 128, 8, ((4096, 2048), (512, 2048), (2048, 4096))),
}  # fmt: skip


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time of `run` in ms, by CUDA events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    measured: list[float] = [begin.elapsed_time(end) for begin, end in times]
    return statistics.median(measured)


def copy_bandwidth() -> float:
    """Return bytes per second, read and written, of a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    moved: int = 2 * source.numel()
    return moved / milliseconds(lambda: target.copy_(source)) * 1e3


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).mul_(scale).to(dtype)


class Layer:
    """The tensors of one MoE layer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        scores = torch.rand(sizes.tokens, sizes.experts, device="cuda")
        self.scores, chosen = scores.topk(sizes.top_k, dim=1)
        self.plan = expert_groups.plan_on_device(chosen, sizes.experts, 16)
        self.row_scores = expert_groups.row_scores(self.scores, self.plan)
        self.tokens = random(sizes.tokens, sizes.features)
        expert = (sizes.experts, sizes.hidden, sizes.features)
        float32 = {"dtype": torch.float32, "scale": 0.02}
        self.gate, self.up = random(*expert, **float32), random(*expert, **float32)
        self.down = random(sizes.experts, sizes.features, sizes.hidden, **float32)
        numbers = torch.arange(len(self.plan.copies), device="cuda", dtype=torch.int32)
        self.groups = torch.bucketize(numbers, self.plan.ends, right=True, out_int32=True)


def kernels(layer: Layer) -> list[tuple[str, float, float]]:
    """Return name, bytes that must move, and ms of each kernel that quantizes or transposes."""
    sizes, plan = layer.sizes, layer.plan
    rows, features, hidden = len(plan.copies), sizes.features, sizes.hidden
    tokens, count = sizes.tokens, sizes.experts
    weights = count * hidden * features
    quantized = fp8.quantize(layer.tokens.unsqueeze(0))
    gate_up = random(rows, 2 * hidden)
    grad = random(rows, hidden)
    activations = fp8.activate(gate_up, layer.row_scores, layer.groups, count)
    joined = fp8.quantize(layer.gate, layer.up)
    gathered = {"copies": plan.copies, "top_k": sizes.top_k}
    runs: list[tuple[str, float, Callable[[], Any]]] = [
        ("tokens quantized", 3 * tokens * features, lambda: fp8.quantize(layer.tokens[None])),
        ("rows spread", (tokens + rows) * features, lambda: fp8.spread(quantized, plan)),
        (
            "SwiGLU quantized",
            5 * rows * hidden,
            lambda: fp8.activate(gate_up, layer.row_scores, layer.groups, count),
        ),
        (
            "its gradient quantized",
            8 * rows * hidden,
            lambda: fp8.gradient(grad, gate_up, layer.row_scores, layer.groups, count),
        ),
        (
            "tokens gathered and transposed",
            (tokens + rows) * features,
            lambda: fp8.transpose(quantized, **gathered),
        ),
        (
            "activations transposed",
            2 * rows * hidden,
            lambda: fp8.transpose(activations, layer.groups),
        ),
        ("weights quantized", 10 * weights, lambda: fp8.quantize(layer.gate, layer.up)),
        ("weights transposed", 4 * weights, lambda: fp8.transpose(joined)),
    ]
    return [(name, size, milliseconds(run)) for name, size, run in runs]


def grouped(layer: Layer) -> list[tuple[str, float, dict[str, float]]]:
    """Return name, operations, and ms in BF16 and FP8 of the grouped GEMMs."""
    sizes, ends = layer.sizes, layer.plan.ends
    rows, count = len(layer.plan.copies), sizes.experts
    found = []
    forward = (
        ("gate and up", 2 * sizes.hidden, sizes.features),
        ("down", sizes.features, sizes.hidden),
    )
    for name, out, inner in forward:
        found.append((name, out, inner, False))
        found.append((f"{name}, input gradient", inner, out, False))
        found.append((f"{name}, weight gradient", out, inner, True))
    table = []
    for name, out, inner, is_weight in found:
        times: dict[str, float] = {}
        operations = 2.0 * float(ends[-1]) * out * inner
        if is_weight:
            left, right = random(rows, out), random(rows, inner)
            times["bf16"] = milliseconds(partial(torch._grouped_mm, left.t(), right, offs=ends))
            values = [one.t().contiguous().to(FP8) for one in (left, right)]
            scales = [torch.ones(count * size, device="cuda") for size in (out, inner)]
            operands = values[0], values[1].t(), *scales
        else:
            left, right = random(rows, inner), random(count, out, inner)
            times["bf16"] = milliseconds(
                partial(torch._grouped_mm, left, right.transpose(1, 2), offs=ends)
            )
            scales = [torch.ones(rows, device="cuda"), torch.ones(count, out, device="cuda")]
            operands = left.to(FP8), right.to(FP8).transpose(1, 2), *scales
        for fast in (True, False):
            run = partial(
                torch._scaled_grouped_mm, *operands, offs=ends, out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )  # fmt: skip
            times["fp8, fast sums" if fast else "fp8"] = milliseconds(run)
        table.append((name, operations, times))
    return table


def dense(sizes: Sizes) -> list[tuple[str, float, dict[str, float]]]:
    """Return name, operations, and ms in BF16 and FP8 of the linear layers' forward GEMMs."""
    table = []
    for out, inner in sizes.dense:
        shapes = {
            f"{out} x {inner}": (sizes.tokens, inner, out),
            f"{out} x {inner}, weight gradient": (out, sizes.tokens, inner),
        }
        for name, (m, k, n) in shapes.items():
            left, right = random(m, k), random(n, k)
            times = {"bf16": milliseconds(partial(torch.mm, left, right.t()))}
            a, b = left.to(FP8), right.to(FP8).t()
            one = torch.ones((), device="cuda")
            each = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
            for kind, scales in (("a tensor", (one, one)), ("a row", each)):
                for fast in (True, False):
                    run = partial(
                        torch._scaled_mm, a, b, *scales, out_dtype=torch.bfloat16,
                        use_fast_accum=fast,
                    )  # fmt: skip
                    times[f"{kind}{', fast' if fast else ''}"] = milliseconds(run)
            table.append((name, 2.0 * m * k * n, times))
    return table


def whole_layer(layer: Layer) -> dict[str, float]:
    """Return ms of the routed experts' forward and backward in BF16 and FP8, and the errors."""
    sizes, plan = layer.sizes, layer.plan
    parts = (layer.tokens, layer.row_scores, layer.gate, layer.down, layer.up)
    tokens, scores, gate, down, up = (part.detach().requires_grad_() for part in parts)
    grad = random(sizes.tokens, sizes.features)

    def bf16() -> Tensor:
        rows = expert_groups.spread(tokens, plan)
        joined = weight_copies.join(torch.bfloat16, gate, up)
        gate_up = torch._grouped_mm(rows, joined.transpose(1, 2), offs=plan.ends)
        activations = expert_groups.scored_swiglu(gate_up, scores)
        last = weight_copies.join(torch.bfloat16, down)
        out = torch._grouped_mm(activations, last.transpose(1, 2), offs=plan.ends)
        return expert_groups.collect(out, None, plan)

    def low() -> Tensor:
        weights = gate, down, up
        quantized = fp8.quantize_weights(gate.detach(), up.detach(), down.detach())
        return fp8.experts(tokens, scores, None, weights, quantized, plan)

    def train(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        wanted = tokens, scores, gate, down, up
        out = run()
        return out, *torch.autograd.grad(out, wanted, grad)

    exact, found = train(bf16), train(low)
    names = ("output", "tokens", "scores", "gate", "down", "up")
    errors = {
        f"{name}, relative error": float(functional.mse_loss(a.float(), b.float()).sqrt())
        / float(b.float().square().mean().sqrt())
        for name, a, b in zip(names, found, exact, strict=True)
    }
    del exact, found
    times = {
        "bf16": milliseconds(lambda: train(bf16), 8),
        "fp8": milliseconds(lambda: train(low), 8),
    }
    return {**times, **errors}


def compare_with_reference() -> None:
    """Exit with an error unless every kernel writes what `fp8.py` writes on the CPU."""
    torch.manual_seed(0)
    tokens, features, hidden, count, top_k = 300, 272, 208, 5, 3
    chosen = torch.rand(tokens, count).topk(top_k, dim=1).indices
    plan = expert_groups.plan_on_device(chosen, count, 16)
    rows = len(plan.copies)
    groups = torch.bucketize(
        torch.arange(rows, dtype=torch.int32), plan.ends, right=True, out_int32=True
    )
    used = groups < count
    values = (torch.randn(1, tokens, features) * torch.randn(1, tokens, 1).exp()).bfloat16()
    gate_up, grad = torch.randn(rows, 2 * hidden).bfloat16(), torch.randn(rows, hidden).bfloat16()
    scores = torch.rand(rows, 1)
    weights = torch.randn(count, hidden, features), torch.randn(count, hidden, features)

    def made(device: str) -> list[Tensor]:
        there = [one.to(device) for one in (values, gate_up, grad, scores, groups, plan.copies)]
        x, pre, upstream, score, group, copies = there
        quantized = fp8.quantize(x)
        joined = fp8.quantize(*(one.to(device) for one in weights))
        activations = fp8.activate(pre, score, group, count)
        by_pre, _ = fp8.gradient(upstream, pre, score, group, count)
        found = [*quantized, *joined]
        for one in (activations, by_pre):
            found += [one.values[used], one.scales[used], one.group_scales]
        found += [fp8.transpose(quantized, copies=copies, top_k=top_k), fp8.transpose(joined)]
        return [one.cpu().float() for one in found]

    names = [
        "values",
        "scales",
        "tops",
        "values",
        "scales",
        "tops",
        "swiglu",
        "scales",
        "tops",
        "grad",
        "scales",
        "tops",
        "t",
        "t",
    ]
    for name, a, b in zip(names, made("cuda"), made("cpu"), strict=True):
        differ = int((a != b).sum())
        # SwiGLU's exponential differs in its last bit.
        allowed = a.numel() // 500 if name in ("swiglu", "grad") else 0
        print(f"{name}: {differ} of {a.numel()} differ")
        if differ > allowed:
            raise SystemExit(f"{name}: the kernel and the reference differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    compare_with_reference()
    bandwidth = copy_bandwidth()
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"copy: {bandwidth / 1e12:.2f} TB/s; {versions}")
    results: dict[str, Any] = {"copy_bytes_per_second": bandwidth}
    for name in options.models:
        layer = Layer(MODELS[name])
        moved = kernels(layer)
        rows = [
            [kernel, f"{size / 1e9:.2f}", f"{ms:.3f}", f"{size / ms * 1e3 / bandwidth:.0%}"]
            for kernel, size, ms in moved
        ]
        print(f"\n{name}\n" + markdown_table(["kernel", "GB", "ms", "of a copy"], rows, "lrrr"))
        products = [*grouped(layer), *dense(layer.sizes)]
        heads = list(products[0][2]), list(products[-1][2])
        for head in heads:
            rows = [
                [
                    product,
                    *(f"{times[kind]:.3f} ({work / times[kind] / 1e9:,.0f})" for kind in head),
                ]
                for product, work, times in products
                if list(times) == head
            ]
            print("\n" + markdown_table(["ms (TFLOP/s)", *head], rows, "l" + "r" * len(head)))
        layer_times = whole_layer(layer)
        print(
            "\n" + ", ".join(f"{key} {value:.3f}" for key, value in layer_times.items()), flush=True
        )
        results[name] = {
            "sizes": asdict(layer.sizes),
            "kernels": moved,
            "products": products,
            "layer": layer_times,
        }
        del layer
        torch.cuda.empty_cache()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "low_precision.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
