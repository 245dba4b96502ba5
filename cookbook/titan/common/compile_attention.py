"""Compiles the FlashAttention-4 kernels that the recipes use, without needing a GPU.

`cookbook.install.attention` sets the target GPU and the cache folder in the environment. Prints the
kernels' paths and the compiler's CUDA major version as JSON.
"""

import itertools
import json
import os
from functools import partial
from importlib import import_module

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cookbook.titan.common import kernel_cache, varlen_attention

# FlashAttention-4 has separate kernels for more than 256 documents, so compile for both cases.
DOCUMENTS = (256, 257)
# Longer than two tiles: shorter sequences have separate kernels, which no recipe needs.
_LENGTH = 4096
# The recipes' (head dim of queries and keys, head dim of values, query heads per key head).
_HEADS = ((192, 128, 1), (128, 128, 8), (128, 128, 16))


def main() -> None:
    """Compile all kernels for one kind of GPU."""
    interface = import_module(varlen_attention.INTERFACE)
    empty = partial(torch.empty, device="cuda")
    # Given fake tensors, FlashAttention-4 compiles its kernels but does not launch them.
    with FakeTensorMode():
        for documents, (head_dim, v_head_dim, groups) in itertools.product(DOCUMENTS, _HEADS):
            shapes = (groups, head_dim), (1, head_dim), (1, v_head_dim)
            q, k, v = (empty(_LENGTH, *one, dtype=torch.bfloat16) for one in shapes)
            packing = empty(documents + 1, dtype=torch.int32), _LENGTH, 1.0
            out, lse = varlen_attention.forward(q, k, v, *packing)
            varlen_attention.backward(torch.empty_like(out), q, k, v, out, lse, *packing)
    caches = filter(None, (getattr(one, "compile_cache", None) for one in vars(interface).values()))
    keys = ((cache, key) for cache in caches for key in cache.cache)
    files = [cache.cache_path / f"{cache._key_to_hash(key)}.o" for cache, key in keys]
    # FlashAttention-4 silently skips a kernel file that it cannot write.
    lost = [str(file) for file in files if not file.is_file()]
    if lost or not files:
        raise RuntimeError(f"FlashAttention-4 wrote {len(files) - len(lost)} kernels, not {lost}")
    folder = os.environ[kernel_cache.FOLDER]
    kernels = sorted(str(file.relative_to(folder)) for file in files)
    print(json.dumps({"cuda": varlen_attention.compiler_version(), "kernels": kernels}))


if __name__ == "__main__":
    main()
