"""Build DeepEP at its pinned commit, or say why this machine cannot; inspect an installed build.

    python -m cookbook.install.deepep [--arch 10.0]          build it for this Python
    python -m cookbook.install.deepep [--arch 10.0] --plan   print what it would do

Exit status: 0 built or already present, 1 failed, 3 cannot be built here, 4 would be built. Imports
neither torch nor DeepEP, because they load the GPU driver, which login nodes lack.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from cookbook.base.errors import run_command
from cookbook.base.files import write_whole
from cookbook.base.gpus import installed_gpus
from cookbook.config.pins import Pin, read_pins
from cookbook.install import PIP, find_distribution, package_folder

FAILED, IMPOSSIBLE, TO_BUILD = 1, 3, 4
STAMP = Path(sys.prefix) / ".cookbook" / "deep_ep.json"
# The first CUDA release whose nvcc can compile for Blackwell.
BLACKWELL_CUDA = (12, 8)
# Limit on parallel compilations: login nodes are shared, and each nvcc takes up to 2 GB of memory.
MOST_JOBS = 16


def torch_cuda(path: Sequence[str] = sys.path) -> str:
    """Return the CUDA version that torch is built for, e.g. "12.8"; empty without torch or CUDA."""
    folder = package_folder("torch", path)
    if folder is None or not (folder / "version.py").is_file():
        return ""
    text = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def find_nvshmem(path: Sequence[str] = sys.path) -> tuple[Path, str] | None:
    """Return the folder and version of the NVSHMEM wheel that torch depends on, if installed."""
    folder = package_folder("nvidia.nvshmem", path)
    # DeepEP links NVSHMEM's device library statically, so the NVSHMEM wheel must contain it.
    if folder is None or not (folder / "lib/libnvshmem_device.a").is_file():
        return None
    found = find_distribution(f"nvidia-nvshmem-cu{torch_cuda(path).split('.')[0]}", path)
    return (folder, found.version) if found else None


class DeepEp(NamedTuple):
    version: str
    commit: str  # the commit it was built from; empty if pip did not build it from a commit
    library: Path | None
    internode: bool  # whether the library can send between nodes


def find_deepep(path: Sequence[str] = sys.path) -> DeepEp | None:
    """Return the installed DeepEP; None if there is none.

    The library's content tells whether it was built with NVSHMEM. If so, it is linked with
    `libnvshmem_host.so`. If not, it contains the error message that inter-node functions raise.
    """
    found = find_distribution("deep_ep", path)
    if found is None:
        return None
    commit = ""
    with contextlib.suppress(ValueError, KeyError):
        commit = json.loads(found.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"]
    libraries = (one for folder in path for one in sorted(Path(folder).glob("deep_ep_cpp*.so")))
    library = next(libraries, None)
    content = library.read_bytes() if library else b""
    is_disabled = b"NVSHMEM is disabled during compilation" in content
    internode = b"libnvshmem_host.so" in content and not is_disabled
    return DeepEp(found.version, commit, library, internode)


class CannotBuildError(Exception):
    """DeepEP cannot be built on this machine; the message gives the reason and a remedy."""


class Toolkit(NamedTuple):
    """A CUDA toolkit with compiler and headers, such as release (12, 8) in /usr/local/cuda-12.8."""

    home: Path
    release: tuple[int, int]

    def __str__(self) -> str:
        return f"CUDA {self.release[0]}.{self.release[1]} in {self.home}"


@dataclass(frozen=True)
class Plan:
    """All inputs of a build. If none has changed, the build need not be repeated."""

    commit: str
    torch: str
    cuda: str
    arch: str
    nvshmem: str

    def __str__(self) -> str:
        return f"DeepEP {self.commit[:7]} for GPUs {self.arch}, with NVSHMEM {self.nvshmem}"


def deepep_pin() -> Pin:
    return next(pin for pin in read_pins() if pin.name == "deep_ep")


def make_plan(arch: str) -> tuple[Plan, Toolkit]:
    """Plan a build for `arch`, such as "9.0;10.0"; empty means the GPUs of this machine."""
    cuda, torch = torch_cuda(), find_distribution("torch")
    if torch is None or not cuda:
        raise CannotBuildError("torch is not installed here, or is built without CUDA")
    found, major = _find_toolkits(), int(cuda.split(".")[0])
    if not found:
        raise CannotBuildError(
            "no CUDA toolkit (nvcc with its headers) found; name its folder in CUDA_HOME"
        )
    toolkit = next((one for one in found if one.release[0] == major), None)
    if toolkit is None:
        raise CannotBuildError(
            f"torch is built for CUDA {cuda} and the toolkit found is {found[0]}: the major "
            f"versions must agree; install a CUDA {major} toolkit beside it and name it in "
            "CUDA_HOME, or take torch for the other version with --torch-index"
        )
    if not arch:
        # Ignore CUDA_VISIBLE_DEVICES: it applies to one job, but the build serves all jobs.
        here = sorted({gpu.model.compute_capability for gpu in installed_gpus()})
        if old := ", ".join(str(one) for one in here if one < 9):
            raise CannotBuildError(f"DeepEP needs Hopper or Blackwell GPUs; here are GPUs {old}")
        arch = ";".join(map(str, here))
    if not arch:
        raise CannotBuildError(
            "no GPU here to build for; name one: --arch 10.0 for B200, --arch 9.0 for H100 and H200"
        )
    if arch != "9.0" and toolkit.release < BLACKWELL_CUDA:
        raise CannotBuildError(f"{toolkit} cannot compile for GPUs {arch}; 12.8 or later can")
    if (nvshmem := find_nvshmem()) is None:
        raise CannotBuildError("torch brought no NVSHMEM wheel, which kernels between nodes need")
    return Plan(deepep_pin().value, torch.version, cuda, arch, nvshmem[1]), toolkit


def _find_toolkits() -> list[Toolkit]:
    on_path = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        Path(on_path).resolve().parents[1] if on_path else None,
        *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
    ]
    found = []
    for home in (Path(one) for one in homes if one):
        # Skip an nvcc outside a toolkit: it has no headers, or is a script that calls another nvcc.
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            command = [str(home / "bin/nvcc"), "--version"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if match := re.search(r"release (\d+)\.(\d+)", answer):
                found.append(Toolkit(home, (int(match[1]), int(match[2]))))
    return found


def is_built(arch: str) -> bool:
    """Return whether DeepEP is installed at its pin, built for this torch and, if given, `arch`."""
    installed, torch = find_deepep(), find_distribution("torch")
    if installed is None or torch is None or installed.library is None:
        return False
    with contextlib.suppress(OSError, ValueError, TypeError):
        stamp = Plan(**json.loads(STAMP.read_text(encoding="utf-8")))
        here = (installed.commit, deepep_pin().value, torch.version, torch_cuda())
        is_this = here == (stamp.commit, stamp.commit, stamp.torch, stamp.cuda)
        return is_this and set(filter(None, arch.split(";"))) <= set(stamp.arch.split(";"))
    return False


def build(plan: Plan, toolkit: Toolkit) -> None:
    """Build and install DeepEP; raise CannotBuildError if the result does not match the plan."""
    STAMP.unlink(missing_ok=True)
    tools = [pin.requirement for pin in read_pins() if pin.extra == "deepep" and not pin.source]
    if tools:
        subprocess.run([*PIP, *tools], check=True)
    # No cache: pip's cached wheel may have been built against another torch or toolkit.
    options = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "--force-reinstall"]
    command = [*PIP, *options, "--verbose", deepep_pin().requirement]
    subprocess.run(command, env=_build_environment(plan, toolkit), check=True)
    built = find_deepep()
    if built is None or built.library is None:
        raise CannotBuildError("pip succeeded, but deep_ep is not installed")
    # A build that does not find NVSHMEM succeeds, but lacks the inter-node kernels.
    if not built.internode:
        raise CannotBuildError(f"{built.library.name} was built without inter-node kernels")
    write_whole(STAMP, json.dumps(asdict(plan), indent=2) + "\n")


def _build_environment(plan: Plan, toolkit: Toolkit) -> dict[str, str]:
    def before(first: str, name: str) -> str:
        return f"{first}:{os.environ.get(name, '')}".rstrip(":")

    environment = os.environ | {
        "PATH": before(f"{Path(sys.executable).parent}:{toolkit.home / 'bin'}", "PATH"),
        "CUDA_HOME": str(toolkit.home),
        "TORCH_CUDA_ARCH_LIST": plan.arch,
        "GIT_TERMINAL_PROMPT": "0",
    }
    # Login nodes lack the driver's library, so link against the toolkit's stub.
    libraries = os.environ.get("LIBRARY_PATH"), f"{toolkit.home}/lib64/stubs"
    environment["LIBRARY_PATH"] = ":".join(filter(None, libraries))
    environment.setdefault("MAX_JOBS", str(min(os.cpu_count() or 1, MOST_JOBS)))
    # Since CUDA 13, nvcc finds cuda/std/tuple by itself, but the host compiler must be told where.
    if (cccl := toolkit.home / "include/cccl").is_dir():
        environment["CPATH"] = before(str(cccl), "CPATH")
    # Without NVSHMEM_DIR, DeepEP uses the same NVSHMEM as torch; two in a process would clash.
    for name in ("NVSHMEM_DIR", "DISABLE_SM90_FEATURES"):
        environment.pop(name, None)
    return environment


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build DeepEP at its pin.")
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
    sys.exit(run_command("deepep", main))
