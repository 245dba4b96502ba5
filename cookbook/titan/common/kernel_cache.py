"""FlashAttention-4's kernels that set-up compiled: their folder, and how a job takes them over.

A job gets copies, in FlashAttention-4's own cache in /tmp of each node: that locks its files, which
some shared file systems cannot. Imports no torch, which set-up does without.
"""

import logging
import os
import re
import shutil
import sys
from pathlib import Path

# FlashAttention-4's own variables: "1" where it keeps compiled kernels, and the folder.
ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

COMPILED = Path(sys.prefix) / ".cookbook" / "attention_kernels"
# In a folder of kernels: the features of the CPU that compiled them.
CPU = "cpu"

_CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that a compiler may use on an x86 CPU, by Linux's names.
_INSTRUCTIONS = (
    *("abm", "adx", "amx", "apx", "avx", "bmi", "f16c", "fma", "gfni", "lzcnt", "movbe"),
    *("pclmul", "popcnt", "sha", "sse", "ssse", "tbm", "vaes", "vpclmul", "xop"),
)


def folder_of(capability: int, cuda: int, compiled: Path | None = None) -> Path:
    """Return the folder of one kind of GPU's kernels, 90 for SM90, by a CUDA version's compiler.

    A driver of CUDA 12 cannot load kernels of 13. `compiled` holds all; None for this Python's.
    """
    return (compiled or COMPILED) / f"sm{capability}-cuda{cuda}"


def cpu_features() -> frozenset[str]:
    """Return the instruction sets of this machine's CPU; all that an ARM CPU names."""
    text = _CPUINFO.read_text(encoding="utf-8")
    found = re.search(r"^(flags|Features)\s*:(.*)", text, re.MULTILINE)
    words = found[2].split() if found else ()
    is_arm = found and found[1] == "Features"
    return frozenset(word for word in words if is_arm or word.startswith(_INSTRUCTIONS))


def take_over(folder: Path, cache: Path) -> int:
    """Copy the kernels of `folder` that `cache` lacks; return how many.

    None where set-up compiled none, or on a CPU with instructions that this one lacks. Where the
    cache cannot be written, FlashAttention-4 compiles them anew.
    """
    copied = 0
    try:
        if not folder.is_dir() or not set((folder / CPU).read_text().split()) <= cpu_features():
            return 0
        for kernel in sorted(folder.rglob("*.o")):
            place = cache / kernel.relative_to(folder)
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                # Another rank may read it: there is the whole file, or none.
                part = place.with_name(f".{place.name}.{os.getpid()}.part")
                shutil.copyfile(kernel, part)
                part.replace(place)
                copied += 1
    except OSError as error:
        reason = f"FlashAttention-4's kernels of set-up are not used: {error}"
        logging.getLogger(__name__).warning(f"{reason}; they are compiled here")
    return copied


def keep(cache: Path, folder: Path) -> None:
    """Replace `folder` by the kernels that this machine compiled into `cache`."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    for kernel in cache.rglob("*.o"):
        place = part / kernel.relative_to(cache)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kernel, place)
    (part / CPU).write_text(" ".join(sorted(cpu_features())), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
