"""Compiles FlashAttention-4's kernels of the recipes, on a machine that may have no GPU.

The environment says for which GPU and into which cache (`cookbook.install.attention`). Prints the
kernels and the compiler's CUDA major version as JSON.
"""

import itertools
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cookbook.titan.common import kernel_cache, varlen_attention

# Beyond 256 documents it looks them up by another way, in kernels of their own.
DOCUMENTS = (256, 257)
# Sequences of two tiles and less have kernels of their own, which no recipe needs.
_LENGTH = 4096
# Head dimensions of queries and keys, and of values; query heads to a key head.
_HEADS = ((192, 128, 1), (128, 128, 8), (128, 128, 16))


def compile_kernels(documents: int, head_dim: int, v_head_dim: int, groups: int) -> None:
    """Run forward and backward on tensors without values: the kernels are compiled, none called."""
    with FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        shapes = (groups, head_dim), (1, head_dim), (1, v_head_dim)
        q, k, v = (tensor(_LENGTH, *shape) for shape in shapes)
        packing = (tensor(documents + 1, dtype=torch.int32), _LENGTH, 1.0)
        out, lse = varlen_attention.forward(q, k, v, *packing)
        varlen_attention.backward(torch.empty_like(out), q, k, v, out, lse, *packing)


def kept_kernels(interface: Any) -> list[Path]:
    """Return the files of the kernels that this process compiled.

    Raises:
        RuntimeError: one has no file, which FlashAttention-4 passes over.
    """
    caches = filter(None, (getattr(one, "compile_cache", None) for one in vars(interface).values()))
    keys = ((cache, key) for cache in caches for key in cache.cache)
    files = [cache.cache_path / f"{cache._key_to_hash(key)}.o" for cache, key in keys]
    lost = [str(file) for file in files if not file.is_file()]
    if lost or not files:
        raise RuntimeError(f"FlashAttention-4 kept {len(files) - len(lost)} kernels, not {lost}")
    return files


def main() -> None:
    """Compile all for one kind of GPU."""
    interface = import_module(varlen_attention.INTERFACE)
    for documents, heads in itertools.product(DOCUMENTS, _HEADS):
        compile_kernels(documents, *heads)
    cache = Path(os.environ[kernel_cache.FOLDER])
    kernels = sorted(str(file.relative_to(cache)) for file in kept_kernels(interface))
    print(json.dumps({"cuda": varlen_attention.compiler_version(), "kernels": kernels}))


if __name__ == "__main__":
    main()
