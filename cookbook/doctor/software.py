"""The doctor's checks of the software: Python, pins, bytecode, compiler, kernels, W&B."""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import sys
import sysconfig
from pathlib import Path

from cookbook.config.stack import read_pins, stack_name
from cookbook.doctor.check import Finding, check
from cookbook.doctor.machine import OLDEST_DRIVER
from cookbook.doctor.surroundings import Surroundings
from cookbook.install.attention import PACKAGE as FLASH_ATTENTION
from cookbook.install.attention import (
    compiler_versions,
    differences,
    flash_attention_pins,
    has_kernels,
    runs_on,
)
from cookbook.install.deepep import find_deepep, holds, torch_cuda
from cookbook.install.packages import find_distribution, package_folder

OLDEST_PYTHON = (3, 11)
TESTED_PYTHONS = {(3, 11), (3, 12)}


@check(local=True)
def python(here: Surroundings) -> Finding:
    version = sys.version_info[:2]
    found = f"{platform.python_version()} in {sys.prefix}"
    if version < OLDEST_PYTHON:
        return Finding(
            "python", "problem", found, "use 3.11 or later: ./setup.sh --python python3.12"
        )
    if version not in TESTED_PYTHONS:
        return Finding("python", "warning", found, "3.11 and 3.12 are the tested ones")
    return Finding("python", "ok", found)


@check(local=True)
def pins(here: Surroundings) -> Finding:
    requirements = here.repository / "requirements.txt"
    pinned = [pin for pin in read_pins(requirements) if not pin.extra]
    missing, other = [], []
    for pin in pinned:
        installed = find_distribution(pin.name, here.site)
        if installed is None:
            missing.append(pin.name)
        # 2.10.0+cu130 is torch 2.10.0 from another index.
        elif installed.version.partition("+")[0] != pin.value:
            other.append(f"{pin.name} is {installed.version}, pinned {pin.value}")
    if len(missing) == len(pinned):
        environment = here.repository / ".venv/bin/python"
        remedy = "run ./setup.sh"
        if environment.exists():
            remedy = "run this with .venv/bin/python, or `source .venv/bin/activate` first"
        return Finding("pins", "problem", "none of the packages is installed here", remedy)
    if missing or other:
        found = "; ".join(other + [f"{name} is missing" for name in missing])
        return Finding("pins", "problem", found, "run ./setup.sh")
    return Finding(
        "pins", "ok", f"stack {stack_name(requirements)}, {len(pinned)} packages as pinned"
    )


@check(local=False)
def torchao_kernels(here: Surroundings) -> Finding:
    """Whether TorchAO's own CUDA kernels can load: they are built for one CUDA major version."""
    cuda, folder = torch_cuda(here.site), package_folder("torchao", here.site)
    if folder is None or not cuda:
        return Finding("torchao kernels", "not here", "torch or torchao has no CUDA here")
    libraries = sorted(folder.glob("_C_mxfp8*.so"))
    major = cuda.split(".")[0]
    if not libraries or not holds(libraries[0], f"libcudart.so.{major}".encode()):
        return Finding(
            "torchao kernels",
            "warning",
            f"its MXFP8 kernels are not for torch's CUDA {cuda}",
            "install torch and torchao from the same index: ./setup.sh --torch-index URL",
        )
    return Finding("torchao kernels", "ok", f"MXFP8 kernels for CUDA {major}")


@check(local=True)
def compiler(here: Surroundings) -> Finding:
    """torch.compile builds small C programs at run time, with Triton's help."""
    missing = [] if any(map(here.which, ("gcc", "cc", "clang"))) else ["a C compiler"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h")
    if missing:
        return Finding(
            "compiler",
            "problem" if here.gpus else "warning",
            f"{' and '.join(missing)} missing, which torch.compile needs",
            "install gcc and the headers of this Python (Debian and Ubuntu: gcc, python3-dev)",
        )
    return Finding("compiler", "ok", "C compiler and Python headers")


@check(local=False)
def bytecode(here: Surroundings) -> Finding | list[Finding]:
    """Whether Python has compiled the packages once; else each rank does, at each start."""
    folder = package_folder("torch", here.site)
    if folder is None:
        return []
    if not Path(importlib.util.cache_from_source(str(folder / "__init__.py"))).is_file():
        return Finding(
            "bytecode",
            "warning",
            "torch has none: each start compiles what it imports, for about 20 s",
            f"run {shlex.join([sys.executable, '-m', 'compileall', '-q', str(folder.parent)])}",
        )
    return Finding("bytecode", "ok", "the packages' modules are compiled")


@check(local=False)
def deepep(here: Surroundings) -> Finding:
    pin = next(pin for pin in read_pins(here.repository / "requirements.txt") if pin.source)
    built = find_deepep(here.site)
    rebuild = "run ./setup.sh on a machine with a CUDA toolkit (--arch where it has no GPU)"
    if built is None:
        return Finding(
            "deepep",
            "warning" if here.trains_for_real else "not here",
            "not installed: cells with deepep are refused",
            rebuild,
        )
    if built.commit != pin.value:
        found = f"{built.version} from {built.commit[:7] or 'another source'}"
        return Finding("deepep", "problem", f"{found}, pinned {pin.value[:7]}", rebuild)
    if built.library is None:
        return Finding("deepep", "problem", f"{built.version} without its library", rebuild)
    if not built.internode:
        return Finding(
            "deepep",
            "warning",
            f"{built.version}, intra-node kernels only: one node at most",
            f"{rebuild}; torch must bring its NVSHMEM wheel",
        )
    return Finding("deepep", "ok", f"{built.version}, inter-node kernels")


@check(local=True)
def flash_attention(here: Surroundings) -> Finding | list[Finding]:
    """FlashAttention-4 by its files, since an import takes seconds and a GPU driver."""
    name = "flash attention"
    models = [gpu.model for gpu in here.gpus]
    if here.sends_jobs and here.cluster:
        models = [here.cluster.gpu] if here.cluster.gpu else []
    if models and not any(runs_on(model.compute_capability) for model in models):
        return Finding(name, "not here", "FlashAttention-4 needs Hopper or Blackwell GPUs")
    if not models and not here.trains_for_real:
        # Nothing that runs from here would use it.
        return []
    pinned = flash_attention_pins(here.repository / "requirements.txt")
    version = next(pin.value for pin in pinned if pin.name == FLASH_ATTENTION)
    if find_distribution(FLASH_ATTENTION, here.site) is None:
        found = "not installed: cells with model.attention=flash_attention_4 are refused"
        return Finding(name, "warning", found, "run ./setup.sh")
    if differing := differences(pinned, here.site):
        return Finding(name, "problem", "; ".join(differing), "run ./setup.sh")
    compilers = compiler_versions(here.site)
    if not has_kernels(here.site) or not compilers:
        lost = "compiler" if has_kernels(here.site) else "kernels"
        remedy = "delete .venv, then run ./setup.sh"
        return Finding(name, "problem", f"{version} without the files of its {lost}", remedy)
    listed = " and ".join(map(str, compilers))
    if not here.gpus:
        return Finding(name, "ok", f"{version}, its compiler for CUDA {listed}")
    driver = here.gpus[0].driver
    branch = re.match("[0-9]+", driver)
    number = int(branch[0]) if branch else 0
    fitting = [major for major in compilers if OLDEST_DRIVER.get(str(major), number + 1) <= number]
    if not fitting:
        found = f"{version}: its compiler is for CUDA {listed}, which driver {driver} does not take"
        return Finding(name, "problem", found, "update the driver")
    return Finding(name, "ok", f"{version}, its compiler for CUDA {fitting[-1]} (driver {driver})")


@check(local=False)
def wandb(here: Surroundings) -> Finding:
    netrc = Path(here.environment.get("HOME", "")) / ".netrc"
    try:
        logged_in = "api.wandb.ai" in netrc.read_text(encoding="utf-8", errors="replace")
    except OSError:
        logged_in = False
    if here.environment.get("WANDB_API_KEY") or logged_in:
        return Finding("wandb", "ok", "a key is there: metrics go to TensorBoard and W&B")
    return Finding(
        "wandb",
        "not here",
        "no key: metrics go to TensorBoard only",
        "export WANDB_API_KEY or run `wandb login` to have them on W&B too",
    )
