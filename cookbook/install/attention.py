"""Installs FlashAttention-4 at its pins, and compiles its kernels for the GPUs of jobs.

    python -m cookbook.install.attention packages [--local]      install it for this Python
    python -m cookbook.install.attention kernels [--arch LIST]   compile the missing kernels

Kernels that are not compiled here are compiled by a job at its first step. --plan only prints what
would be done. Exit status: 0 done or already present, 1 failed, 3 not needed here, 4 (with --plan)
something would be done.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook.base.errors import run_command
from cookbook.base.files import write_whole
from cookbook.base.gpus import installed_gpus
from cookbook.base.paths import REQUIREMENTS
from cookbook.config.stack import Pin, read_pins
from cookbook.install import PIP, find_distribution, package_folder
from cookbook.install.deepep import torch_cuda
from cookbook.titan.common import kernel_cache

FAILED, NOT_NEEDED, TO_DO = 1, 3, 4
PACKAGE = "flash-attn-4"
# This package has one compiler per CUDA major version, and loads the newest the driver supports.
_COMPILER = "nvidia_cutlass_dsl.dsl_packages.cutlass._mlir._mlir_libs"
_COMPILE = "cookbook.titan.common.compile_attention"
# SMs per GPU. FlashAttention-4 asks for the number, but no kernel of the recipes depends on it.
_PROCESSORS = {9: "132", 10: "148"}


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


def compiler_versions(path: Sequence[str] = sys.path) -> list[int]:
    """Return the CUDA major versions whose compiler is installed, in ascending order."""
    folder = package_folder(_COMPILER, path)
    files = folder.glob("_cutlass_ir.cu*.so") if folder else ()
    return sorted(int(match[0]) for file in files if (match := re.search(r"(?<=cu)\d+", file.name)))


def runs_on(capability: float) -> bool:
    """Return whether FlashAttention-4 has kernels for GPUs of this compute capability."""
    return int(capability) in (9, 10)  # Hopper and Blackwell


def _capabilities_here() -> list[float]:
    return sorted({gpu.model.compute_capability for gpu in installed_gpus()})


def install(local: bool, plan: bool) -> int:
    """Install the packages or, with `plan`, print what would be done; return the exit status."""
    pins = flash_attention_pins()
    version = next(pin.value for pin in pins if pin.name == PACKAGE)
    if not differences(pins):
        print(f"FlashAttention-4 {version} is installed")
        return 0
    here, reason = _capabilities_here(), ""
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


def compile_missing(arch: str, plan: bool, into: Path) -> int:
    """Compile missing kernels or, with `plan`, print which ones; return the exit status."""
    if differences(flash_attention_pins()):
        print("FlashAttention-4's kernels are not compiled: it is not installed at its pins")
        return NOT_NEEDED
    named = [float(word.rstrip("a")) for word in arch.split(";") if word]
    # Compute capabilities times ten: 90 for 9.0.
    wanted = sorted({round(10 * one) for one in named or _capabilities_here() if runs_on(one)})
    if not wanted:
        print(
            "FlashAttention-4's kernels are not compiled: no Hopper or Blackwell GPU here. Each "
            "node's first job compiles them, unless you name GPUs here: --arch 10.0 for B200, "
            "--arch 9.0 for H100 and H200"
        )
        return NOT_NEEDED
    # Recompile kernels if any of these versions changed. CuTe DSL selects its compiler by driver.
    made_from = {
        "packages": {pin.name: pin.value for pin in flash_attention_pins()},
        "python": platform.python_version(),
        "drivers": sorted({gpu.driver for gpu in installed_gpus()}),
    }
    missing = [one for one in wanted if not _is_compiled(into, one, made_from)]
    if not missing or plan:
        gpus = " and ".join(f"{one / 10:.1f}" for one in missing or wanted)
        there = "" if missing else " are compiled"
        print(f"FlashAttention-4's kernels for GPUs {gpus}{there}")
        return TO_DO if missing else 0
    # If one kind of GPU fails, still compile for the others.
    failed = [one for one in missing if not _compile(into, one, made_from)]
    if failed:
        gpus = " and ".join(f"{one / 10:.1f}" for one in failed)
        print(f"no kernels for GPUs {gpus}", file=sys.stderr)
    return FAILED if failed else 0


def _is_compiled(into: Path, capability: int, made_from: Mapping[str, Any]) -> bool:
    """Return whether `into` has all kernels for a kind of GPU, compiled with these versions."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stamp = json.loads((into / f"sm{capability}.json").read_text(encoding="utf-8"))
        kernels = [Path(stamp["folder"], kernel) for kernel in stamp["kernels"]]
        return bool(stamp["made_from"] == made_from) and all(map(Path.is_file, kernels))
    return False


def _compile(into: Path, capability: int, made_from: Mapping[str, Any]) -> bool:
    """Compile in a subprocess that imports torch; return success. After a failure, keep nothing."""
    # Drop the user's FlashAttention variables: they could change the kernels or their cache keys.
    tried = ("FLASH_ATTENTION_", "FA_", "CUTE_DSL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tried)}
    # The cache needs file locks, so use a local file system. The kernels take only a megabyte.
    with tempfile.TemporaryDirectory(dir="/tmp") as cache:
        environment |= {
            "FLASH_ATTENTION_ARCH": f"sm_{capability}",
            "FLASH_ATTENTION_NUM_SMS": _PROCESSORS[capability // 10],
            "CUTE_DSL_ARCH": f"sm_{capability}a",
            kernel_cache.ENABLED: "1",
            kernel_cache.FOLDER: cache,
        }
        command, pipe = [sys.executable, "-m", _COMPILE], subprocess.PIPE
        done = subprocess.run(command, env=environment, stdout=pipe, text=True, check=False)
        if done.returncode:
            return False
        made = json.loads(done.stdout.splitlines()[-1])
        folder = kernel_cache.folder_of(capability, made["cuda"], into)
        kernel_cache.keep(Path(cache), folder)
    stamp = {"made_from": made_from, "folder": str(folder), "kernels": made["kernels"]}
    write_whole(into / f"sm{capability}.json", json.dumps(stamp, indent=1) + "\n")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.install.attention",
        description="Install FlashAttention-4 at its pins, or compile its kernels.",
    )
    parser.add_argument("what", choices=["packages", "kernels"])
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    parser.add_argument("--local", action="store_true", help="for runs on this machine alone")
    parser.add_argument("--arch", default="", help='GPUs, "9.0;10.0"; default: those found here')
    parser.add_argument("--into", type=Path, default=kernel_cache.COMPILED, help="kernels' folder")
    parsed = parser.parse_args(arguments)
    if parsed.what == "packages":
        return install(parsed.local, parsed.plan)
    return compile_missing(parsed.arch, parsed.plan, parsed.into)


if __name__ == "__main__":
    sys.exit(run_command("attention", main))
