"""Builds DeepEP at its pin, or says why it cannot be built on this machine.

    python -m cookbook.install.deepep_build [--arch 10.0]          build it for this Python
    python -m cookbook.install.deepep_build [--arch 10.0] --plan   say what it would do

Exit status: 0 there or built, 1 the build failed, 3 it cannot be built here, 4 it would be built.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cookbook.base.errors import run_command
from cookbook.base.files import write_whole
from cookbook.base.gpus import installed_gpus
from cookbook.config.stack import Pin, read_pins
from cookbook.install.deepep import OLDEST_NVSHMEM, find_deepep, find_nvshmem, torch_cuda
from cookbook.install.packages import find_distribution

FAILED, IMPOSSIBLE, TO_BUILD = 1, 3, 4
STAMP = Path(sys.prefix) / ".cookbook" / "deep_ep.json"

# nvcc can compile for Blackwell from this release on.
BLACKWELL_CUDA = (12, 8)
# One nvcc takes up to 2 GB; more at once only fills the memory of a shared login node.
MOST_JOBS = 16


class CannotBuildError(Exception):
    """DeepEP cannot be built on this machine; the message says why and what would help."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit with compiler and headers, e.g. /usr/local/cuda-12.8, release (12, 8)."""

    home: Path
    release: tuple[int, int]

    def __str__(self) -> str:
        return f"CUDA {self.release[0]}.{self.release[1]} in {self.home}"


@dataclass(frozen=True)
class Plan:
    """What decides the bytes of a build; a build with the same plan need not be repeated."""

    commit: str
    torch: str
    cuda: str
    arch: str
    nvshmem: str

    def __str__(self) -> str:
        kernels = (
            f"with inter-node kernels (NVSHMEM {self.nvshmem})"
            if self.nvshmem
            else "with intra-node kernels only, since torch brought no NVSHMEM wheel"
        )
        return f"DeepEP {self.commit[:7]} for GPUs {self.arch}, {kernels}"


def deepep_pin() -> Pin:
    return next(pin for pin in read_pins() if pin.name == "deep_ep")


def make_plan(arch: str) -> tuple[Plan, Toolkit]:
    """The build for `arch` ("9.0;10.0"; empty: the GPUs found here) on this machine."""
    cuda = torch_cuda()
    torch = find_distribution("torch")
    if torch is None or not cuda:
        raise CannotBuildError("torch is not here or built without CUDA")
    toolkit = _pick_toolkit(cuda, list(_find_toolkits(cuda)))
    arch = arch or _gpu_archs()
    if not arch:
        raise CannotBuildError(
            "no GPU here tells for which one to build; "
            "pass --arch 10.0 for B200 or --arch 9.0 for H100 and H200"
        )
    if arch != "9.0" and toolkit.release < BLACKWELL_CUDA:
        raise CannotBuildError(f"{toolkit} cannot compile for GPUs {arch}; 12.8 or later can")
    for tool in ("git", "g++"):
        if shutil.which(tool) is None:
            raise CannotBuildError(f"{tool} is missing; install it")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CannotBuildError("Python.h is missing; install the headers of this Python")
    nvshmem = find_nvshmem()
    if nvshmem and not _compiles("#include <infiniband/mlx5dv.h>", "-fsyntax-only"):
        raise CannotBuildError(
            "infiniband/mlx5dv.h is missing, which the inter-node kernels need; install "
            "rdma-core's headers (Debian and Ubuntu: libibverbs-dev, Red Hat: rdma-core-devel)"
        )
    for header in ("cublas_v2.h", "cusolverDn.h", "cusparse.h"):
        include = f"-I{toolkit.home}/include"
        if not _compiles(f"#include <{header}>", "-fsyntax-only", include):
            raise CannotBuildError(f"{header} is missing in {toolkit}; install the whole toolkit")
    if not _compiles("", "-shared", "-o", "/dev/null", "-lcuda", libraries=_library_path(toolkit)):
        raise CannotBuildError(
            f"libcuda.so is missing: neither a GPU driver nor {toolkit.home}/lib64/stubs is here"
        )
    if nvshmem and not nvshmem.new_enough:
        oldest = ".".join(map(str, OLDEST_NVSHMEM))
        raise CannotBuildError(f"NVSHMEM is {nvshmem.version}; DeepEP needs {oldest} or later")
    version = nvshmem.version if nvshmem else ""
    return Plan(deepep_pin().value, torch.version, cuda, arch, version), toolkit


def _compiles(source: str, *options: str, libraries: str = "") -> bool:
    """Whether g++ takes `source`; ten minutes of nvcc should not end at a missing file."""
    done = subprocess.run(
        ["g++", "-x", "c++", "-", *options],
        input=source.encode(),
        env={**os.environ, "LIBRARY_PATH": libraries},
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def _library_path(toolkit: Toolkit) -> str:
    # Login nodes have no driver to link with; the toolkit brings a stand-in for its library.
    return ":".join(filter(None, [os.environ.get("LIBRARY_PATH"), f"{toolkit.home}/lib64/stubs"]))


def _find_toolkits(cuda: str) -> Iterator[Toolkit]:
    named = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    compilers = [
        Path(named, "bin/nvcc") if named else None,
        Path(on_path) if on_path else None,
        Path(f"/usr/local/cuda-{cuda}/bin/nvcc"),
        *sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"), reverse=True),
        Path("/usr/local/cuda/bin/nvcc"),
    ]
    for compiler in compilers:
        if compiler is None or not os.access(compiler, os.X_OK):
            continue
        home = compiler.resolve().parent.parent
        # An nvcc alone, or a script that calls one elsewhere, is no toolkit.
        if not (home / "include/cuda_runtime.h").is_file():
            continue
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        if match := re.search(r"release (\d+)\.(\d+)", answer):
            yield Toolkit(home, (int(match[1]), int(match[2])))


def _pick_toolkit(cuda: str, found: list[Toolkit]) -> Toolkit:
    major = int(cuda.split(".")[0])
    for toolkit in found:
        if toolkit.release[0] == major:
            return toolkit
    if not found:
        raise CannotBuildError(
            "no CUDA toolkit (nvcc with its headers) found; name its folder in CUDA_HOME"
        )
    raise CannotBuildError(
        f"torch is built for CUDA {cuda} and the toolkit found is {found[0]}: the major versions "
        f"must agree; install a CUDA {major} toolkit beside it and name it in CUDA_HOME, or take "
        "torch for the other version with --torch-index"
    )


def _gpu_archs() -> str:
    # All that are installed: CUDA_VISIBLE_DEVICES is about one job, and the build serves them all.
    found = {gpu.model.compute_capability for gpu in installed_gpus()}
    if too_old := sorted(capability for capability in found if capability < 9):
        raise CannotBuildError(
            f"DeepEP needs Hopper or Blackwell GPUs; here are GPUs {', '.join(map(str, too_old))}"
        )
    return ";".join(map(str, sorted(found)))


def is_built(arch: str) -> bool:
    """Whether the pin is installed, for this torch and (where it is named) for `arch`."""
    installed, torch = find_deepep(), find_distribution("torch")
    if installed is None or torch is None or installed.library is None:
        return False
    try:
        stamp = Plan(**json.loads(STAMP.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    return (
        (stamp.commit, stamp.torch, stamp.cuda) == (deepep_pin().value, torch.version, torch_cuda())
        and installed.commit == stamp.commit
        and set(filter(None, arch.split(";"))) <= set(stamp.arch.split(";"))
    )


def build(plan: Plan, toolkit: Toolkit) -> None:
    """Build and install; raises CannotBuildError where the library is not what was planned."""
    STAMP.unlink(missing_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    tools = [pin.requirement for pin in read_pins() if pin.extra == "deepep" and not pin.source]
    if tools:
        subprocess.run([*pip, *tools], check=True)
    # A wheel that pip cached may have been built against another torch or another toolkit.
    options = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "--force-reinstall"]
    subprocess.run(
        [*pip, *options, "--verbose", deepep_pin().requirement],
        env=_build_environment(plan, toolkit),
        check=True,
    )
    built = find_deepep()
    if built is None or built.library is None:
        raise CannotBuildError("pip ended well, but deep_ep is not installed")
    if bool(plan.nvshmem) != built.internode:
        raise CannotBuildError(
            f"{built.library.name} was built {'with' if built.internode else 'without'} "
            "inter-node kernels, other than planned"
        )
    write_whole(STAMP, json.dumps(asdict(plan), indent=2) + "\n")


def _build_environment(plan: Plan, toolkit: Toolkit) -> dict[str, str]:
    environment = dict(os.environ)
    # DeepEP finds the wheel of NVSHMEM that torch loads, and its versioned library names, only
    # where NVSHMEM_DIR is not set; a second NVSHMEM in one process would clash with torch's.
    environment.pop("NVSHMEM_DIR", None)
    environment.pop("DISABLE_SM90_FEATURES", None)
    binaries = f"{Path(sys.executable).parent}:{toolkit.home / 'bin'}"
    environment["PATH"] = f"{binaries}:{environment.get('PATH', '')}"
    environment["CUDA_HOME"] = str(toolkit.home)
    environment["TORCH_CUDA_ARCH_LIST"] = plan.arch
    environment["GIT_TERMINAL_PROMPT"] = "0"
    environment.setdefault("MAX_JOBS", str(min(os.cpu_count() or 1, MOST_JOBS)))
    environment["LIBRARY_PATH"] = _library_path(toolkit)
    # From CUDA 13 on, cuda/std/tuple is in a folder that nvcc adds only for its own sources.
    cccl = toolkit.home / "include/cccl"
    if cccl.is_dir():
        environment["CPATH"] = ":".join(filter(None, [str(cccl), environment.get("CPATH")]))
    return environment


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cookbook.install.deepep_build", description="Build DeepEP at its pin."
    )
    parser.add_argument("--arch", default="", help='GPUs to build for, e.g. 10.0 or "9.0;10.0"')
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    parsed = parser.parse_args(arguments)
    if is_built(parsed.arch):
        print(f"DeepEP {deepep_pin().value[:7]} is built")
        return 0
    try:
        plan, toolkit = make_plan(parsed.arch)
    except CannotBuildError as error:
        print(f"DeepEP is not built: {error}")
        return IMPOSSIBLE
    if parsed.plan:
        print(f"{plan}, {toolkit}")
        return TO_BUILD
    try:
        build(plan, toolkit)
    except (CannotBuildError, subprocess.CalledProcessError) as error:
        print(f"DeepEP is not built: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(run_command("deepep_build", main))
