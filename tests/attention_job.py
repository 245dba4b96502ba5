"""A job's first attention, on tensors of the CPU that say they are on a GPU: does it compile?

    python -m tests.attention_job CAPABILITY COMPILED

Prints, as JSON, the kernels that it loads from disk. The kernels are loaded and never called; an
attempt to compile one ends it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cookbook.titan.common import kernel_cache, varlen_attention

# Of a recipe: sequences, length, heads of a rank, and room for documents.
BATCHES = ((1, 8192, 64, 64), (4, 8192, 8, 256), (8, 8192, 16, 512), (2, 32768, 4, 512))


def main(capability: int, compiled: Path) -> None:
    loaded: list[str] = []
    cute: Any = import_module("cutlass.cute")
    load_module = cute.runtime.load_module

    def load(path: str, **options: Any) -> SimpleNamespace:
        assert callable(load_module(path, **options).func)
        loaded.append(path)
        return SimpleNamespace(func=lambda *args: None)

    def compile_anew(*args: Any, **_: Any) -> None:
        raise AssertionError(f"compiled anew: {args[0]}")

    cute.runtime.load_module, cute.compile = load, compile_anew
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: divmod(capability, 10)
    kernel_cache.COMPILED = compiled
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    for sequences, length, heads, room in BATCHES:
        q, k, v = (
            torch.empty(sequences * length, heads, dim, dtype=torch.bfloat16, requires_grad=True)
            for dim in (192, 192, 128)
        )
        cu_seqlens = torch.zeros(room + 1, dtype=torch.int32)
        out = varlen_attention.varlen_attention(q, k, v, cu_seqlens, length, 0.07)
        out.backward(torch.empty_like(out))
    print(json.dumps(sorted(set(loaded))))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
