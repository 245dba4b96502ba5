"""Compiles FlashAttention-4's kernels for a kind of GPU, on a machine that may have none.

    python -m cookbook.titan.common.compile_attention 90 [--into FOLDER]

Those of the recipes: causal attention of documents with heads of 192/128 in BF16, forward and
backward, told of few documents and of many. Prints what it kept, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cookbook.titan.common import flash_kernels, kernel_cache

# Beyond 256 documents it looks them up by another way, in kernels of their own.
DOCUMENTS = (256, 257)
# Sequences of two tiles and less have kernels of their own, which no recipe needs.
_LENGTH = 4096
_HEAD_DIM, _V_HEAD_DIM = 192, 128
# It wants to know how many processors the GPU has; no kernel of these depends on it.
_PROCESSORS = {9: 132, 10: 148}


def target(capability: int, cache: Path) -> dict[str, str]:
    """The environment variables that FlashAttention-4 and CuTe DSL read when they are imported."""
    return {
        "FLASH_ATTENTION_ARCH": f"sm_{capability}",
        "FLASH_ATTENTION_NUM_SMS": str(_PROCESSORS[capability // 10]),
        "CUTE_DSL_ARCH": f"sm_{capability}a",
        kernel_cache.ENABLED: "1",
        kernel_cache.FOLDER: str(cache),
    }


def compile_kernels(documents: int) -> None:
    """Forward and backward of tensors without values; FlashAttention-4 compiles and calls none."""
    with FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        q, k, v = (tensor(_LENGTH, 1, dim) for dim in (_HEAD_DIM, _HEAD_DIM, _V_HEAD_DIM))
        told = (tensor(documents + 1, dtype=torch.int32), _LENGTH, 1.0)
        out, lse = flash_kernels.forward(q, k, v, *told)
        flash_kernels.backward(torch.empty_like(out), q, k, v, out, lse, *told)


def kept_kernels(interface: Any) -> list[Path]:
    """The files of the kernels that this process compiled.

    Raises:
        RuntimeError: one has no file, which FlashAttention-4 passes over.
    """
    caches = [getattr(found, "compile_cache", None) for found in vars(interface).values()]
    files = [
        cache.cache_path / f"{cache._key_to_hash(key)}.o"
        for cache in caches
        if cache is not None
        for key in cache.cache
    ]
    lost = [str(file) for file in files if not file.is_file()]
    if lost or not files:
        raise RuntimeError(f"FlashAttention-4 kept {len(files) - len(lost)} kernels, not {lost}")
    return files


def main(arguments: list[str] | None = None) -> int:
    """Compile all for one kind of GPU, and keep them together or not at all."""
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.titan.common.compile_attention",
        description="Compile FlashAttention-4's kernels for a kind of GPU.",
    )
    parser.add_argument("capability", type=int, help="90 for H100 and H200, 100 for B200")
    parser.add_argument("--into", type=Path, help="where the folders of all GPUs are")
    parsed = parser.parse_args(arguments)
    for name in [*os.environ]:
        # What a user tries out would be in the kernels, or in the names they are found by.
        if name.startswith(("FLASH_ATTENTION_", "FA_", "CUTE_DSL_")):
            del os.environ[name]
    # On no shared file system, since it locks its files; they take a megabyte.
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        cache = Path(scratch, "cache")
        os.environ.update(target(parsed.capability, cache))
        interface = import_module(flash_kernels.INTERFACE)
        for documents in DOCUMENTS:
            compile_kernels(documents)
        kernels = sorted(str(file.relative_to(cache)) for file in kept_kernels(interface))
        cuda = flash_kernels.compiler_version()
        folder = kernel_cache.folder_of(parsed.capability, cuda, parsed.into)
        kernel_cache.keep(cache, folder)
    print(json.dumps({"folder": str(folder), "kernels": kernels}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
