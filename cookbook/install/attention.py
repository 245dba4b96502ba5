"""Install the pinned versions of FlashAttention-4 and its dependencies.

    python -m cookbook.install.attention [--local] [--plan]

--plan only prints what would be done. Exit status: 0 done or already present, 1 failed, 3 not
needed here, 4 (with --plan) something would be done.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cookbook.base.errors import run_command
from cookbook.base.gpus import installed_gpus
from cookbook.base.paths import REQUIREMENTS
from cookbook.config.pins import Pin, read_pins
from cookbook.install import PIP, find_distribution
from cookbook.install.deepep import torch_cuda

FAILED, NOT_NEEDED, TO_DO = 1, 3, 4
PACKAGE = "flash-attn-4"


def flash_attention_pins(requirements: Path = REQUIREMENTS) -> list[Pin]:
    """Return the pins of FlashAttention-4 and its dependencies other than torch."""
    return [pin for pin in read_pins(requirements) if pin.extra == "flash_attention"]


def differences(pins: Iterable[Pin], path: Sequence[str] = sys.path) -> list[str]:
    """Describe each pinned package that is missing on `path` or has another version."""
    found = []
    for pin in pins:
        installed = find_distribution(pin.name, path)
        if installed is None:
            found.append(f"{pin.name} is missing")
        # Ignore the local part of a version: 2.10.0+cu130 is torch 2.10.0 from another index.
        elif installed.version.partition("+")[0] != pin.value:
            found.append(f"{pin.name} is {installed.version}, pinned {pin.value}")
    return found


def runs_on(capability: float) -> bool:
    """Return whether FlashAttention-4 has kernels for GPUs of this compute capability."""
    return int(capability) in (9, 10)  # Hopper and Blackwell


def install(local: bool, plan: bool) -> int:
    """Install the packages or, with `plan`, print what would be done; return the exit status."""
    pins = flash_attention_pins()
    version = next(pin.value for pin in pins if pin.name == PACKAGE)
    if not differences(pins):
        print(f"FlashAttention-4 {version} is installed")
        return 0
    here, reason = sorted({gpu.model.compute_capability for gpu in installed_gpus()}), ""
    if not torch_cuda():
        reason = "torch is not installed here, or is built without CUDA"
    elif here and not any(map(runs_on, here)):
        reason = f"it needs Hopper or Blackwell GPUs; here are GPUs {', '.join(map(str, here))}"
    elif local and not here:
        reason = "no GPU here"
    if reason:
        print(f"FlashAttention-4 is not installed: {reason}")
        return NOT_NEEDED
    if plan:
        print(f"FlashAttention-4 {version} ({len(pins)} packages)")
        return TO_DO
    done = subprocess.run([*PIP, *(pin.requirement for pin in pins)], check=False)
    if done.returncode or (left := differences(pins)):
        reason = f"pip ended with status {done.returncode}" if done.returncode else "; ".join(left)
        print(f"FlashAttention-4 is not installed: {reason}", file=sys.stderr)
        return FAILED
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install FlashAttention-4 at its pins.")
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    parser.add_argument("--local", action="store_true", help="for runs on this machine alone")
    parsed = parser.parse_args(arguments)
    return install(parsed.local, parsed.plan)


if __name__ == "__main__":
    sys.exit(run_command("attention", main))
