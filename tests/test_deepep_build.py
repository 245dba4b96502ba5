"""DeepEP's build from outside: a stand-in toolkit, and a stand-in DeepEP that records its build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.set_up import Checkout, copy_for_setup
from tests.stand_in_gpus import B200

pytestmark = pytest.mark.titan

SETUP = """
import json, os, pathlib, setuptools
from setuptools.command.build_ext import build_ext

class Record(build_ext):
    def build_extension(self, extension):
        library = pathlib.Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(os.environ["STAND_IN_LIBRARY"].encode())
        record = pathlib.Path(os.environ["STAND_IN_RECORD"])
        record.write_text(json.dumps(dict(os.environ)))

setuptools.setup(
    name="deep_ep",
    version="1.2.1",
    packages=["deep_ep"],
    ext_modules=[setuptools.Extension("deep_ep_cpp", ["csrc.cpp"])],
    cmdclass={"build_ext": Record},
)
"""
WITH_NVSHMEM = "ELF libnvshmem_host.so.3"
WITHOUT_NVSHMEM = "ELF NVSHMEM is disabled during compilation"


@dataclass
class Site:
    """A checkout with a CUDA toolkit and a DeepEP beside it; each test takes a part away."""

    checkout: Checkout
    toolkit: Path
    headers: Path
    record: Path

    def setup(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.checkout.setup("--no-tokenizers", "--no-flash-attention", *options)

    def recorded(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.record.read_text())
        return found

    def says_release(self, release: str) -> None:
        compiler = self.toolkit / "bin/nvcc"
        compiler.parent.mkdir(parents=True, exist_ok=True)
        compiler.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}'\n"
        )
        compiler.chmod(0o755)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    checkout = copy_for_setup(tmp_path)
    toolkit, headers = tmp_path / "cuda", tmp_path / "headers"
    (toolkit / "include/cccl").mkdir(parents=True)
    (toolkit / "lib64/stubs").mkdir(parents=True)
    (headers / "infiniband").mkdir(parents=True)
    for name in ("cuda_runtime.h", "cublas_v2.h", "cusolverDn.h", "cusparse.h"):
        (toolkit / "include" / name).touch()
    (headers / "infiniband/mlx5dv.h").touch()
    driver = toolkit / "lib64/stubs/libcuda.so"
    subprocess.run(
        ["g++", "-x", "c++", "-", "-shared", "-o", driver], input=b"", check=True, timeout=60
    )

    source = tmp_path / "DeepEP"
    (source / "deep_ep").mkdir(parents=True)
    (source / "deep_ep/__init__.py").touch()
    (source / "csrc.cpp").touch()
    (source / "setup.py").write_text(SETUP)
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "stand-in")
    commit = git(source, "rev-parse", "HEAD")
    requirements = checkout.folder / "requirements.txt"
    # The build tools are there already; only the place and the commit of DeepEP change.
    lines = [
        line
        for line in requirements.read_text().splitlines()
        if not line.startswith(("deep_ep", "ninja", "setuptools"))
    ]
    lines.append(f'deep_ep @ git+file://localhost{source}@{commit} ; extra == "deepep"\n')
    requirements.write_text("\n".join(lines))

    site = Site(checkout, toolkit, headers, tmp_path / "record.json")
    site.says_release("12.8")
    checkout.environment |= {
        "CUDA_HOME": str(toolkit),
        "CPATH": str(headers),
        "NVSHMEM_DIR": "/somewhere/else",
        "STAND_IN_LIBRARY": WITH_NVSHMEM,
        "STAND_IN_RECORD": str(site.record),
    }
    return site


def test_built_once_at_its_pin_with_inter_node_kernels(site: Site) -> None:
    result = site.setup("--arch", "9.0 10.0")
    assert result.returncode == 0, result.stdout
    assert "for GPUs 9.0;10.0, with inter-node kernels (NVSHMEM " in result.stdout
    assert re.search(r"^deepep +ok +1.2.1, inter-node kernels$", result.stdout, re.MULTILINE)
    built_with = site.recorded()
    assert built_with["TORCH_CUDA_ARCH_LIST"] == "9.0;10.0"
    assert built_with["CUDA_HOME"] == str(site.toolkit)
    assert built_with["CPATH"] == f"{site.toolkit}/include/cccl:{site.headers}"
    assert built_with["LIBRARY_PATH"].endswith(f"{site.toolkit}/lib64/stubs")
    assert built_with["TMPDIR"].startswith(str(site.checkout.folder))
    assert int(built_with["MAX_JOBS"]) >= 1
    # DeepEP's setup.py finds the NVSHMEM that torch loads only without it.
    assert "NVSHMEM_DIR" not in built_with

    site.record.unlink()
    assert site.setup("--arch", "10.0", "--quiet").stdout == ""
    assert site.setup("--quiet").stdout == ""
    # Built for other GPUs, or lost, it is built again.
    assert site.setup("--arch", "10.3").returncode == 0
    assert site.recorded()["TORCH_CUDA_ARCH_LIST"] == "10.3"


def test_a_library_without_the_kernels_is_a_failure(site: Site) -> None:
    site.checkout.environment["STAND_IN_LIBRARY"] = WITHOUT_NVSHMEM
    result = site.setup("--arch", "10.0")
    assert result.returncode == 1
    assert "without inter-node kernels, other than planned" in result.stdout
    assert "not done: DeepEP" in result.stdout
    assert "intra-node kernels only: one node at most" in result.stdout
    # It is tried again, not taken for built.
    site.checkout.environment["STAND_IN_LIBRARY"] = WITH_NVSHMEM
    assert site.setup("--arch", "10.0").returncode == 0


def test_a_build_that_fails_shows_why_and_the_rest_goes_on(site: Site) -> None:
    del site.checkout.environment["STAND_IN_RECORD"]
    result = site.setup("--arch", "10.0")
    assert result.returncode == 1
    assert "STAND_IN_RECORD" in (site.checkout.folder / "build/setup.log").read_text()
    assert "not done: DeepEP" in result.stdout
    assert "local corpus" in result.stdout


def test_why_it_cannot_be_built(site: Site) -> None:
    """Each obstacle is said, is no failure, and costs no compile."""

    def said(*options: str) -> str:
        result = site.setup(*options)
        assert result.returncode == 0, result.stdout
        return next(line for line in result.stdout.splitlines() if "DeepEP is not built" in line)

    assert "pass --arch 10.0 for B200" in said()
    site.says_release("12.4")
    assert "cannot compile for GPUs 10.0; 12.8 or later can" in said("--arch", "10.0")
    site.says_release("13.0")
    words = said("--arch", "10.0")
    assert "torch is built for CUDA 12.8" in words
    assert f"the toolkit found is CUDA 13.0 in {site.toolkit}" in words
    assert "the major versions must agree" in words
    site.says_release("12.8")
    # A machine may have these headers; the compiler is not to see its own.
    compiler = site.headers / "bin/g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -nostdinc "$@"\n')
    compiler.chmod(0o755)
    site.checkout.environment["PATH"] = f"{compiler.parent}:{os.environ['PATH']}"
    (site.headers / "infiniband/mlx5dv.h").rename(site.headers / "elsewhere")
    assert "libibverbs-dev" in said("--arch", "10.0")
    (site.headers / "elsewhere").rename(site.headers / "infiniband/mlx5dv.h")
    (site.toolkit / "include/cusparse.h").unlink()
    assert "cusparse.h is missing" in said("--arch", "10.0")
    (site.toolkit / "include/cusparse.h").touch()
    shutil.rmtree(site.toolkit / "lib64")
    assert "libcuda.so is missing" in said("--arch", "10.0")
    assert not site.record.exists()


def test_gpus_found_here_decide(site: Site) -> None:
    site.checkout.has_gpus(B200, B200, {"name": "NVIDIA H200"})
    # A shell that is left with one GPU does not narrow the build.
    site.checkout.environment["CUDA_VISIBLE_DEVICES"] = "0"
    assert "for GPUs 9.0;10.0" in site.setup().stdout
    assert site.recorded()["TORCH_CUDA_ARCH_LIST"] == "9.0;10.0"
    site.checkout.has_gpus({"name": "NVIDIA A100", "capability": [8, 0]})
    (site.checkout.folder / ".venv/.cookbook/deep_ep.json").unlink()
    assert "DeepEP needs Hopper or Blackwell GPUs; here are GPUs 8.0" in site.setup().stdout
