"""FlashAttention-4's kernels compiled without a GPU, by the real package: does a job find them?"""

import itertools
import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cookbook.base.paths import ROOT
from cookbook.install.attention import differences, flash_attention_pins
from tests.started import python

pytestmark = [pytest.mark.titan, pytest.mark.nightly]

JOB = """
import sys
from pathlib import Path
from tests.test_titan_compile_attention import first_attention
first_attention(int(sys.argv[1]), Path(sys.argv[2]))
"""
# Ignored by git, and kept for the next time.
PACKAGES = ROOT / "build" / f"flash_attention-{sys.version_info.major}.{sys.version_info.minor}"
GPUS = {90: "sm_90a", 100: "sm_100a"}


@pytest.fixture(scope="module")
def packages() -> dict[str, str]:
    """The variables of a Python that has FlashAttention-4; 0.5 GB, half a minute at first."""
    pins = flash_attention_pins()
    if differences(pins, [str(PACKAGES)]):
        part = PACKAGES.with_name(f"{PACKAGES.name}.part")
        for folder in (part, PACKAGES):
            shutil.rmtree(folder, ignore_errors=True)
        pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps")
        done = python(*pip, "--target", str(part), *(pin.requirement for pin in pins))
        if done.returncode:
            reason = f"FlashAttention-4 cannot be installed: {done.stderr.strip()[-300:]}"
            if os.environ.get("CI") == "true":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
        part.rename(PACKAGES)
    # What nvidia-cutlass-dsl's .pth file adds.
    folders = (PACKAGES, PACKAGES / "nvidia_cutlass_dsl/dsl_packages", ROOT)
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


@pytest.fixture(scope="module")
def compiled(packages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for Hopper and for Blackwell."""
    into = tmp_path_factory.mktemp("compiled")
    words = ("kernels", "--arch", "9.0;10.0", "--into", str(into))
    # Numbers of a user who tries something out.
    tried = {"FLASH_ATTENTION_ARCH": "sm_80", "FA_LOG_LEVEL": "1", "CUTE_DSL_ARCH": "sm_80"}
    done = python("-m", "cookbook.install.attention", *words, variables=packages | tried)
    assert done.returncode == 0, done.stdout + done.stderr
    for capability in GPUS:
        kept = json.loads((into / f"sm{capability}.json").read_text())
        folder = Path(kept["folder"])
        assert folder.parent == into and folder.name.startswith(f"sm{capability}-cuda1")
        assert sorted(kept["kernels"]) == names_of(folder)
        for name in kept["kernels"]:
            code = (folder / name).read_bytes()
            assert {gpu for gpu in GPUS.values() if gpu.encode() in code} == {GPUS[capability]}
    return into


def names_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.o"))


# Of a recipe: sequences, length, heads of a rank, and room for documents.
BATCHES = ((1, 8192, 64, 64), (4, 8192, 8, 256), (8, 8192, 16, 512), (2, 32768, 4, 512))
# Of DeepSeek-V3, Qwen3 30B and 235B: dimensions of queries and keys, query heads to a key.
HEADS = ((192, 1), (128, 8), (128, 16))


def first_attention(capability: int, compiled: Path) -> None:
    """Attention of a job, on tensors of the CPU that say they are on a GPU; no kernel is called.

    Prints the kernels that it loads from disk; an attempt to compile one ends it.
    """
    from cookbook.titan.common import kernel_cache, varlen_attention

    loaded: list[str] = []
    cute: Any = import_module("cutlass.cute")
    load_module = cute.runtime.load_module

    def load(path: str, **options: Any) -> SimpleNamespace:
        assert callable(load_module(path, **options).func)
        loaded.append(path)
        return SimpleNamespace(func=lambda *args: None)

    def compile_anew(*args: Any, **_: Any) -> None:
        raise AssertionError(f"compiled anew: {args[0]}")

    cute.runtime.load_module, cute.compile = load, compile_anew
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: divmod(capability, 10)
    kernel_cache.COMPILED = compiled
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    for (sequences, length, heads, room), (dim, groups) in itertools.product(BATCHES, HEADS):
        keys = max(heads // groups, 1)
        q, k, v = (
            torch.empty(sequences * length, *shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((keys * groups, dim), (keys, dim), (keys, 128))
        )
        cu_seqlens = torch.zeros(room + 1, dtype=torch.int32)
        out = varlen_attention.varlen_attention(q, k, v, cu_seqlens, length, 0.07)
        out.backward(torch.empty_like(out))
    print(json.dumps(sorted(set(loaded))))


@pytest.mark.parametrize("capability", GPUS)
def test_a_job_compiles_no_kernel(
    capability: int, compiled: Path, packages: dict[str, str], tmp_path: Path
) -> None:
    """At other heads, lengths and scales, and with tensors that hold values."""
    # Without a GPU it does not know its processors.
    given = {"FLASH_ATTENTION_NUM_SMS": "140", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path)}
    done = python("-c", JOB, str(capability), str(compiled), variables=packages | given)
    assert done.returncode == 0, done.stderr
    (folder,) = compiled.glob(f"sm{capability}-*")
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == sorted(str(tmp_path / name) for name in names_of(folder))
