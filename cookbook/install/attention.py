"""Installs FlashAttention-4 at its pins, or says why this machine needs none.

    python -m cookbook.install.attention [--local]          install it for this Python
    python -m cookbook.install.attention [--local] --plan   say what it would do

Exit status: 0 there or installed, 1 the install failed, 3 not needed here, 4 it would be installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cookbook.base.errors import run_command
from cookbook.base.gpus import installed_gpus
from cookbook.base.paths import REQUIREMENTS
from cookbook.config.stack import Pin, read_pins
from cookbook.install.deepep import torch_cuda
from cookbook.install.packages import find_distribution, package_folder

FAILED, NOT_NEEDED, TO_INSTALL = 1, 3, 4
PACKAGE = "flash-attn-4"
_EXTRA = "flash_attention"
# Compute capabilities that it has kernels for, before the point: Hopper's and Blackwell's.
_GENERATIONS = (9, 10)
# Its compiler comes once for each CUDA major version and loads the newest that the driver takes.
_COMPILER = "nvidia_cutlass_dsl.dsl_packages.cutlass._mlir._mlir_libs"
_FLAVOUR = re.compile(r"_cutlass_ir\.cu(\d+)\..*\.so")


def flash_attention_pins(requirements: Path = REQUIREMENTS) -> list[Pin]:
    """FlashAttention-4 and what it needs beyond torch."""
    return [pin for pin in read_pins(requirements) if pin.extra == _EXTRA]


def differences(pins: Iterable[Pin], path: Sequence[str] | None = None) -> list[str]:
    """What of `pins` is missing on `path` (default: sys.path) or there in another version."""
    found = []
    for pin in pins:
        installed = find_distribution(pin.name, path)
        if installed is None:
            found.append(f"{pin.name} is missing")
        # 2.10.0+cu130 is torch 2.10.0 from another index.
        elif installed.version.partition("+")[0] != pin.value:
            found.append(f"{pin.name} is {installed.version}, pinned {pin.value}")
    return found


def has_kernels(path: Sequence[str] | None = None) -> bool:
    """Whether the package that training imports is there."""
    return package_folder("flash_attn.cute", path) is not None


def compiler_versions(path: Sequence[str] | None = None) -> list[int]:
    """The CUDA major versions whose compiler is there, the oldest first."""
    folder = package_folder(_COMPILER, path)
    names = [file.name for file in folder.iterdir()] if folder else []
    return sorted(int(match[1]) for name in names if (match := _FLAVOUR.fullmatch(name)))


def runs_on(capability: float) -> bool:
    """Whether it has kernels for GPUs of this compute capability."""
    return int(capability) in _GENERATIONS


def why_not(local: bool) -> str | None:
    """Why this machine needs none.

    Args:
        local: whether only this machine trains; a login node's GPUs are elsewhere.
    """
    if not torch_cuda():
        return "torch is not here or built without CUDA"
    here = sorted({gpu.model.compute_capability for gpu in installed_gpus()})
    if here and not any(map(runs_on, here)):
        return f"it needs Hopper or Blackwell GPUs; here are GPUs {', '.join(map(str, here))}"
    if local and not here:
        return "no GPU here"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Install it, or only say what would be done."""
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.install.attention",
        description="Install FlashAttention-4 at its pins.",
    )
    parser.add_argument("--local", action="store_true", help="for runs on this machine alone")
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    parsed = parser.parse_args(arguments)
    pins = flash_attention_pins()
    version = next(pin.value for pin in pins if pin.name == PACKAGE)
    if not differences(pins):
        print(f"FlashAttention-4 {version} is installed")
        return 0
    if reason := why_not(parsed.local):
        print(f"FlashAttention-4 is not installed: {reason}")
        return NOT_NEEDED
    if parsed.plan:
        print(f"FlashAttention-4 {version} ({len(pins)} packages)")
        return TO_INSTALL
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    done = subprocess.run([*pip, *(pin.requirement for pin in pins)], check=False)
    if done.returncode or (left := differences(pins)):
        reason = f"pip ended with status {done.returncode}" if done.returncode else "; ".join(left)
        print(f"FlashAttention-4 is not installed: {reason}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(run_command("flash_attention", main))
