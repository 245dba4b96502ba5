"""FlashAttention-4 against a float32 reference and FlexAttention, at the shapes of the recipes.

    python -m bench.gpu_attention [--only 16B] [--flex 16B-8192-b4 ...] [--activations FILE ...]
        [--deterministic] [-o FILE]

For every shape and kind of packing: BF16 output and gradients of q, k and v, as training computes
them (padded cumulative lengths), compared with plain PyTorch in float32 on the same GPU, a few
heads at a time. An error is a norm of differences over a norm of the reference. It may be 0.01 for
a whole tensor, and 0.05 for each document and head, or twice that of FlexAttention where that ran.
Rounding to BF16 alone makes 0.002 to 0.005; a wrong tile of a long document makes 0.1.

Times are medians with CUDA events; FlexAttention is TorchTitan's, tuned, over a minute a shape.
`--device cpu` tries the script with small shapes and the operator's CPU implementation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.model import Attention

from cookbook.base.files import write_whole
from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.common.documents import attended_keys
from cookbook.titan.selftest.attention import (
    Attend,
    AttentionShape,
    compare,
    differentiate,
    flash_attention_4,
    padded_lengths,
    random_inputs,
)
from cookbook.titan.selftest.attention_errors import (
    PART_BOUND,
    WHOLE_BOUND,
    Tensors,
    within_bounds,
)
from cookbook.titan.selftest.packings import PACKINGS, document_ends_of
from cookbook.titan.tt_0_2_2.reference_attention import flex

# The reference holds four matrices of scores in float32; 8 heads of 8192 tokens are 9 GB.
REFERENCE_HEADS = 8

# Flavor, TP degree, sequences, length. The attention of `proxy` is that of `debugmodel`.
RECIPES = (
    ("debugmodel", 1, 2, 256),
    ("debugmodel", 1, 16, 512),
    ("16B", 1, 4, 8192),
    ("16B", 1, 2, 8192),
    ("16B", 1, 16, 8192),
    ("16B", 1, 4, 4096),
    ("16B", 2, 4, 8192),
    ("671B", 1, 1, 4096),
    ("671B", 1, 1, 8192),
    ("671B", 2, 1, 4096),
    ("671B", 2, 1, 8192),
)


@dataclass(frozen=True)
class Shape(AttentionShape):
    """An attention's shape with a name to ask for it by."""

    name: str

    @classmethod
    def of_recipe(cls, flavor: str, tp: int, batch: int, length: int) -> Shape:
        args = replace(deepseekv3_args[flavor], max_seq_len=length)
        with torch.device("meta"):
            layer = Attention(args)
        return cls(
            name=f"{flavor}-{length}-b{batch}" + (f"-tp{tp}" if tp > 1 else ""),
            batch=batch,
            length=length,
            heads=args.n_heads // tp,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            scale=layer.softmax_scale,
        )

    def small(self) -> Shape:
        """The same kind of shape, for a CPU."""
        return replace(self, batch=min(self.batch, 2), length=160, heads=2)


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """The median time of `work`, after two runs to warm up; one time on the CPU."""
    times = []
    repeats = 10 if device == "cuda" else 1
    for _ in range(repeats + 2):
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
    return float(sorted(times[2:])[repeats // 2])


def measure(
    shape: Shape, ends: torch.Tensor, inputs: Tensors, device: str, with_flex: bool
) -> dict[str, Any]:
    """Errors and times of one shape and packing; `ends` is (batch, length), bool."""
    cu_seqlens = padded_lengths(ends)
    exact = torch.unique_consecutive(cu_seqlens)
    flash = flash_attention_4(shape, ends)
    kinds: dict[str, Attend] = {"flash_attention_4": flash}
    if with_flex:
        kinds["flex"] = flex(shape, ends)
    pairs = int(attended_keys(ends))
    flops = 2 * pairs * shape.heads * (4 * shape.head_dim + 3 * shape.v_head_dim)
    found: dict[str, Any] = {
        "documents": int(ends.sum()),
        "entries": len(cu_seqlens),
        "mean_attended_length": round(pairs / ends.numel(), 1),
    }
    # With gradients: without, FlexAttention would be compiled and tuned a second time.
    q, k, v, _ = inputs
    leaves = (q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_())
    results = {}
    for kind, attend in kinds.items():
        began = time.perf_counter()
        results[kind] = differentiate(attend, inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - began
        forward = milliseconds(partial(attend, *leaves), device)
        both = milliseconds(partial(differentiate, attend, inputs), device)
        found[kind] = {
            "first_call_seconds": round(first, 1),
            "forward_ms": round(forward, 3),
            "forward_backward_ms": round(both, 3),
            "tflops": round(flops / both / 1e9, 1),
        }
    out, *grads = results["flash_attention_4"]
    plain = varlen.varlen_attention(*leaves, exact, shape.length, shape.scale)
    checks = {"empty_documents_change_nothing": torch.equal(out, plain)}
    if torch.are_deterministic_algorithms_enabled():
        again = differentiate(flash, inputs)[1:]
        checks["gradients_repeat"] = all(map(torch.equal, grads, again))
        del again
    del plain

    for kind, errors in compare(shape, results, inputs, exact, REFERENCE_HEADS).items():
        found[kind]["errors"] = errors.relative()
    checks["within_bounds"] = within_bounds(
        found["flash_attention_4"]["errors"], found["flex"]["errors"] if with_flex else None
    )
    return found | checks | {"ok": all(checks.values())}


def kept_case(path: Path, device: str) -> tuple[Shape, torch.Tensor, Tensors]:
    """Shape, ends of documents and inputs of a layer in training, from `bench.keep_attention`."""
    kept = torch.load(path, map_location=device)
    inputs, length = kept["inputs"], kept["length"]
    tokens, heads, head_dim = inputs[0].shape
    ends = torch.zeros(tokens, dtype=torch.bool, device=device)
    ends[kept["cu_seqlens"][1:].long() - 1] = True
    shape = Shape(
        name=f"trained-{length}-b{tokens // length}",
        batch=tokens // length,
        length=length,
        heads=heads,
        head_dim=head_dim,
        v_head_dim=inputs[2].shape[-1],
        scale=kept["scale"],
    )
    return shape, ends.view(-1, length), inputs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_option = parser.add_argument
    add_option("--only", default="", help="shapes whose name begins so")
    add_option("--flex", nargs="*", default=["16B-8192-b4"], help="shapes that FlexAttention gets")
    kinds = list(PACKINGS)
    add_option("--packings", nargs="+", default=kinds, choices=kinds, help="kinds of documents")
    kept = "files of bench.keep_attention"
    add_option("--activations", type=Path, nargs="*", default=[], help=kept)
    add_option("--deterministic", action="store_true", help="as debug.deterministic does")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add_option("--device", default=here, choices=["cuda", "cpu"], help="cpu: small shapes, a trial")
    add_option("-o", "--output", type=Path, help="write all results here, as JSON")
    options = parser.parse_args(argv)
    device = options.device
    if device == "cuda" and (reason := varlen.why_not()):
        parser.error(reason)
    torch.set_float32_matmul_precision("highest")

    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    cases: list[dict[str, Any]] = []

    def add(shape: Shape, packing: str, source: str, ends: torch.Tensor, inputs: Tensors) -> None:
        case: dict[str, Any] = {"shape": shape.name, "packing": packing, "inputs": source}
        try:
            case |= measure(shape, ends, inputs, device, shape.name in options.flex)
        except Exception as error:
            # A kernel that does not compile is a result, and no reason to leave out the others.
            case |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        cases.append(case)
        print(json.dumps(case), flush=True)

    for shape in map(Shape.of_recipe, *zip(*RECIPES, strict=True)):
        if not shape.name.startswith(options.only):
            continue
        shape = shape if device == "cuda" else shape.small()
        for packing in options.packings:
            ends = document_ends_of(packing, shape.batch, shape.length).to(device)
            add(shape, packing, "random", ends, random_inputs(shape, device))
    for path in options.activations:
        shape, ends, inputs = kept_case(path, device)
        add(shape, "trained", path.name, ends, inputs)
    if not cases:
        parser.error(f"--only {options.only}: no shape's name begins so")
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu (tried out)",
        "torch": torch.__version__,
        "computed_by": sorted(varlen.ran),
        "bounds": {"whole": WHOLE_BOUND, "part": PART_BOUND},
        "cases": cases,
        "ok": all(case["ok"] for case in cases),
    }
    if options.output:
        write_whole(options.output, json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "cases"}))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
