"""Has FlashAttention-4's kernels compiled for the GPUs that jobs run on, which may not be here.

    python -m cookbook.install.attention_kernels [--arch LIST]          compile what is missing
    python -m cookbook.install.attention_kernels [--arch LIST] --plan   say what it would do

Jobs without them compile them at their first step. Exit status: 0 there or compiled, 1 it failed,
3 not needed or not known for which GPUs, 4 they would be compiled.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cookbook.base.errors import run_command
from cookbook.base.files import write_whole
from cookbook.base.gpus import installed_gpus
from cookbook.install.attention import differences, flash_attention_pins, runs_on
from cookbook.titan.common import kernel_cache

FAILED, NOT_NEEDED, TO_COMPILE = 1, 3, 4
_COMPILE = "cookbook.titan.common.compile_attention"


def capabilities(arch: str) -> list[int]:
    """The GPUs to compile for, 90 for 9.0, of those that FlashAttention-4 has kernels for.

    Args:
        arch: as for DeepEP, "9.0;10.0"; empty for the GPUs of this machine.
    """
    words = [word.rstrip("a") for word in arch.split(";") if word]
    wanted = [*map(float, words)] or [gpu.model.compute_capability for gpu in installed_gpus()]
    return sorted({round(10 * one) for one in wanted if runs_on(one)})


def made_from() -> dict[str, Any]:
    """What decides the kernels beside the GPU; those of the same need not be compiled again.

    The driver is there because it decides which of the two compilers CuTe DSL takes.
    """
    return {
        "packages": {pin.name: pin.value for pin in flash_attention_pins()},
        "python": platform.python_version(),
        "drivers": sorted({gpu.driver for gpu in installed_gpus()}),
    }


def _stamp(capability: int) -> Path:
    return kernel_cache.COMPILED / f"sm{capability}.json"


def is_compiled(capability: int, made: Mapping[str, Any]) -> bool:
    """Whether the kernels for a kind of GPU are there, all of them and made from the same."""
    try:
        stamp = json.loads(_stamp(capability).read_text(encoding="utf-8"))
        folder = Path(stamp["folder"])
        return bool(stamp["made_from"] == made) and all(
            (folder / kernel).is_file() for kernel in stamp["kernels"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def compile_for(capability: int, made: Mapping[str, Any]) -> bool:
    """Compile in a process that imports torch, and note what was kept."""
    done = subprocess.run(
        [sys.executable, "-m", _COMPILE, str(capability)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return False
    kept = json.loads(done.stdout.splitlines()[-1])
    write_whole(_stamp(capability), json.dumps({"made_from": made, **kept}, indent=1) + "\n")
    return True


def name_gpus(found: Iterable[int]) -> str:
    """9.0 and 10.0 for 90 and 100, as --arch has them."""
    return " and ".join(f"{one / 10:.1f}" for one in found)


def main(arguments: list[str] | None = None) -> int:
    """Compile them, or only say what would be done."""
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.install.attention_kernels",
        description="Compile FlashAttention-4's kernels for the GPUs that jobs run on.",
    )
    parser.add_argument("--arch", default="", help='GPUs, "9.0;10.0"; default: those found here')
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    parsed = parser.parse_args(arguments)
    if differences(flash_attention_pins()):
        print("FlashAttention-4's kernels are not compiled: it is not installed at its pins")
        return NOT_NEEDED
    wanted = capabilities(parsed.arch)
    if not wanted:
        print(
            "FlashAttention-4's kernels are not compiled, each node's first job does that: no "
            "Hopper or Blackwell GPU here tells for which; pass --arch 10.0 for B200 or --arch 9.0 "
            "for H100 and H200"
        )
        return NOT_NEEDED
    made = made_from()
    missing = [one for one in wanted if not is_compiled(one, made)]
    if not missing:
        print(f"FlashAttention-4's kernels for GPUs {name_gpus(wanted)} are compiled")
        return 0
    if parsed.plan:
        print(f"FlashAttention-4's kernels for GPUs {name_gpus(missing)}")
        return TO_COMPILE
    # All, also where one fails.
    failed = [one for one in missing if not compile_for(one, made)]
    if failed:
        print(f"no kernels for GPUs {name_gpus(failed)}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(run_command("attention_kernels", main))
