"""How FlashAttention-4's kernels are called, by stand-ins; only a GPU says what they compute."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cookbook.titan.common import kernel_cache
from cookbook.titan.common import varlen_attention as varlen

pytestmark = pytest.mark.titan

CU_SEQLENS = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
# Not what FlashAttention-4 takes where it is told nothing.
SCALE = 0.7


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)


class Kernels:
    """FlashAttention-4 4.0.0b36 with its defaults, computed by the reference."""

    def __init__(self) -> None:
        self.is_deterministic: list[bool] = []

    def _packing(self, q: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, float]:
        """The documents and the scale, which must be the same for queries and keys."""
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        found, of_k = (options.pop(f"cu_seqlens_{name}", whole) for name in "qk")
        assert torch.equal(found, of_k)
        assert all(options.pop(f"max_seqlen_{name}") >= found.diff().max() for name in "qk")
        assert options.pop("causal")
        return found, options.pop("softmax_scale", q.shape[-1] ** -0.5)

    def _flash_attn_fwd(self, *inputs: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        packing = self._packing(inputs[0], options)
        assert options == {"return_lse": True}
        q, k, v = (x.as_subclass(torch.Tensor) for x in inputs)
        return *varlen.reference_forward(q, k, v, *packing), None, None, None

    def _flash_attn_bwd(self, *inputs: torch.Tensor, **options: Any) -> None:
        packing = self._packing(inputs[0], options)
        self.is_deterministic.append(options.pop("deterministic", False))
        q, k, v, out, dout, lse = inputs
        grads = varlen.reference_backward(dout, q, k, v, out, lse, *packing)
        assert options.keys() == {"dq", "dk", "dv"}
        for place, grad in zip(options.values(), grads, strict=True):
            place.copy_(grad)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_get_the_documents_and_the_scale(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels()
    monkeypatch.setattr(varlen, "_kernels", lambda: kernels)
    monkeypatch.setattr(varlen, "ran", set())
    was = torch.are_deterministic_algorithms_enabled()

    def gradients(kind: type[torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(20, 2, dim).as_subclass(kind) for dim in (24, 24, 16))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = varlen.varlen_attention(q, k, v, CU_SEQLENS, 8, SCALE)
        grads = torch.autograd.grad(out, inputs, torch.randn(20, 2, 16))
        return [x.detach().as_subclass(torch.Tensor) for x in (out, *grads)]

    torch.use_deterministic_algorithms(is_deterministic)
    try:
        found = gradients(OnGpu)
    finally:
        torch.use_deterministic_algorithms(was)
    assert varlen.ran == {"flash_attention_4"}
    assert kernels.is_deterministic == [is_deterministic]
    for one, other in zip(found, gradients(torch.Tensor), strict=True):
        torch.testing.assert_close(one, other)
    assert kernels.is_deterministic == [is_deterministic]


NAME = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
MODULES = {
    "flash_attn.cute.interface": f"import os\nCACHE = os.environ.get('{NAME}')\n",
    "flash_attn.cute.cache_utils": "from pathlib import Path\n"
    "def get_cache_path():\n    return Path(__file__).parent / 'cache'\n",
    "cutlass.base_dsl.version_info": "class CUDA_VERSION:\n    major = 12\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FlashAttention-4's cache for a job on an H200, and nothing of its kernels."""
    for module, text in MODULES.items():
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        # Each is set first, so that it is as before when the test has ended.
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), None)
            monkeypatch.delitem(sys.modules, ".".join(parts[:length]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernel_cache, "COMPILED", tmp_path / "compiled")
    monkeypatch.setenv(NAME, "")
    return tmp_path


@pytest.mark.parametrize("chosen", [None, "0"])
def test_compiled_kernels_are_kept_for_the_next_job(
    chosen: str | None, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-4 reads the variable when it is imported; what the user has set stays."""
    for folder in ("sm90-cuda12", "sm90-cuda13", "sm100-cuda12"):
        kernel = package / "compiled" / folder / f"fwd/{folder}.o"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(b"kernel")
        (package / "compiled" / folder / kernel_cache.CPU).write_text("")
    if chosen is None:
        monkeypatch.delenv(NAME)
    else:
        monkeypatch.setenv(NAME, chosen)
    assert (chosen or "1") == varlen._kernels().CACHE
    # Those of set-up for this GPU, by the compiler that this machine's driver takes.
    cache = package / "flash_attn/cute/cache"
    expected = [] if chosen else [cache / "fwd/sm90-cuda12.o"]
    assert [*cache.rglob("*.*")] == expected
    # Once for a process: the kernels are called in every layer.
    shutil.rmtree(cache, ignore_errors=True)
    assert varlen._kernels().CACHE and not cache.exists()


def compiled_here(folder: Path) -> Path:
    made = folder.with_name("made")
    for name in ("print/fwd/a.o", "print/bwd/b.o"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    (made / "print/fwd/a.lock").touch()
    kernel_cache.keep(made, folder)
    return folder


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_set_ups_kernels_are_copied_where_they_are_missing(tmp_path: Path) -> None:
    folder, cache = tmp_path / "compiled", tmp_path / "cache"
    (folder / "old").mkdir(parents=True)
    (folder / "old/c.o").touch()
    compiled_here(folder)
    (cache / "print/fwd").mkdir(parents=True)
    (cache / "print/fwd/a.o").write_text("compiled by a job")
    assert kernel_cache.take_over(folder, cache) == 1
    expected = {"print/fwd/a.o": "compiled by a job", "print/bwd/b.o": "print/bwd/b.o"}
    assert files_of(cache) == expected
    assert kernel_cache.take_over(folder, cache) == 0
    # Of another time nothing is left, and no locks.
    assert sorted(files_of(folder)) == ["cpu", "print/bwd/b.o", "print/fwd/a.o"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "compiled", "made"]


@pytest.mark.parametrize(
    ("flags", "copied"),
    [
        ("flags\t\t: fpu avx2 avx512f bmi1 sse4_2", 2),
        ("flags\t\t: fpu vme avx2 bmi1 sse4_2 avx512f avx512_bf16", 2),
        ("flags\t\t: fpu avx2 bmi1 sse4_2", 0),
        ("Features\t: fp asimd", 0),
        ("", 0),
    ],
)
def test_code_for_instructions_that_a_cpu_lacks_is_not_taken_over(
    flags: str, copied: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node's CPU may be newer than those of the nodes."""
    cpu = tmp_path / "cpuinfo"
    monkeypatch.setattr(kernel_cache, "_CPUINFO", cpu)
    cpu.write_text("processor\t: 0\nflags\t\t: fpu pni avx2 avx512f bmi1 sse4_2\n")
    folder = compiled_here(tmp_path / "compiled")
    cpu.write_text(f"processor\t: 0\n{flags}\n")
    assert kernel_cache.take_over(folder, tmp_path / "cache") == copied


def test_a_cache_that_cannot_be_written_costs_the_kernels_and_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = compiled_here(tmp_path / "compiled")
    (tmp_path / "cache").touch()
    with caplog.at_level(logging.WARNING):
        assert kernel_cache.take_over(folder, tmp_path / "cache") == 0
    assert "are not used" in caplog.text and "they are compiled here" in caplog.text
    assert kernel_cache.take_over(tmp_path / "none", tmp_path / "cache") == 0
