"""Where set-up keeps the FlashAttention-4 kernels it compiled, and how a job gets a copy.

A job copies them to FlashAttention-4's own cache in each node's /tmp. The cache needs file locks,
which some shared file systems lack. Does not import torch, because set-up runs without it.
"""

import logging
import os
import re
import shutil
import sys
from pathlib import Path

# FlashAttention-4's environment variables: "1" in the first enables its kernel cache; the second
# names the cache's folder.
ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

COMPILED = Path(sys.prefix) / ".cookbook" / "attention_kernels"
# The file in a folder of kernels that lists the features of the CPU they were compiled on.
CPU = "cpu"

_CPUINFO = Path("/proc/cpuinfo")
# Prefixes of Linux's names for the x86 instruction sets that a compiler may use.
_INSTRUCTIONS = (
    *("abm", "adx", "amx", "apx", "avx", "bmi", "f16c", "fma", "gfni", "lzcnt", "movbe"),
    *("pclmul", "popcnt", "sha", "sse", "ssse", "tbm", "vaes", "vpclmul", "xop"),
)


def folder_of(capability: int, cuda: int, compiled: Path | None = None) -> Path:
    """Return the folder of kernels for a GPU's compute capability (90 for SM90) and a CUDA version.

    A CUDA 12 driver cannot load kernels of CUDA 13. `compiled` is the parent folder; None means
    this Python environment's.
    """
    return (compiled or COMPILED) / f"sm{capability}-cuda{cuda}"


def cpu_features() -> frozenset[str]:
    """Return the instruction sets of this machine's CPU; on ARM, all features that Linux lists."""
    text = _CPUINFO.read_text(encoding="utf-8")
    found = re.search(r"^(flags|Features)\s*:(.*)", text, re.MULTILINE)
    words = found[2].split() if found else ()
    is_arm = found and found[1] == "Features"
    return frozenset(word for word in words if is_arm or word.startswith(_INSTRUCTIONS))


def take_over(folder: Path, cache: Path) -> None:
    """Copy the kernels of `folder` that `cache` lacks.

    Copy none if set-up compiled none, or compiled on a CPU with instructions that this CPU lacks.
    If the cache cannot be written, FlashAttention-4 compiles the kernels again.
    """
    try:
        if not folder.is_dir() or not set((folder / CPU).read_text().split()) <= cpu_features():
            return
        for kernel in sorted(folder.rglob("*.o")):
            place = cache / kernel.relative_to(folder)
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                # Rename a finished copy, so that other ranks never read a partial file.
                part = place.with_name(f".{place.name}.{os.getpid()}.part")
                shutil.copyfile(kernel, part)
                part.replace(place)
    except OSError as error:
        reason = f"FlashAttention-4 kernels from set-up are not used: {error}"
        logging.getLogger(__name__).warning(f"{reason}; they are compiled here")


def keep(cache: Path, folder: Path) -> None:
    """Replace the contents of `folder` with the kernels that this machine compiled into `cache`."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.copytree(cache, part, ignore=shutil.ignore_patterns("*.lock"))
    (part / CPU).write_text(" ".join(sorted(cpu_features())), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
