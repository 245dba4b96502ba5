"""Run TorchTitan on the CPU with gloo, on a machine without CUDA.

TorchTitan does not support CPUs, and its modules store their device when imported. On a machine
without CUDA, the whole process is therefore patched to use the CPU.

- BF16 GEMMs are computed in float32 if the CPU has no BF16 instructions:
  PyTorch's own BF16 loops are 70 times slower. The results differ only in the order of summation.
- Each shard of a DTensor is made to draw its own random numbers, which PyTorch does only on CUDA.
  Otherwise all ranks would draw the same numbers, and with EP 2 the second half of the experts
  would start as a copy of the first.
"""

import ctypes
import functools
import os
import platform
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.dual_pipe_v
import torchtitan.models.moe.utils
import torchtitan.tools.utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import _random


class CpuDevice(ModuleType):
    """The functions of `torch.cuda` that TorchTitan calls, implemented for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return platform.machine() or "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return SimpleNamespace(name=self.get_device_name(), total_memory=pages * page_size)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        # Peak RSS is the closest equivalent of CUDA's reserved memory; ru_maxrss is in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), peak)
        return peaks | {"num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        # TorchTitan calls this after each logged step. It can't lower the peak RSS.
        ctypes.CDLL(None).malloc_trim(0)

    def nothing(self, device: Any = None) -> None:
        pass

    # Do nothing: torch.cpu.set_device would warn about any index, and all ranks share the CPU.
    set_device = empty_cache = synchronize = nothing


def prepare_cpu() -> None:
    """Make TorchTitan use the CPU; call this once, before a Trainer exists."""
    own = {"device_type": "cpu", "device_module": CpuDevice("cookbook.titan.tt_0_2_2.cpu.device")}
    for name, module in list(sys.modules.items()):
        # Each Python module has its own reference to the device, so patch them all. `dual_pipe_v`
        # needs the real device when it is imported, so it is imported before the patches.
        if name.startswith("torchtitan."):
            vars(module).update({key: own[key] for key in own if hasattr(module, key)})
        # Make models use torch._grouped_mm, as on GPUs of SM90 or later. Otherwise they would loop
        # over the experts in Python, where quantization has no effect.
        if name.startswith("torchtitan.models.") and hasattr(module, "has_cuda_capability"):
            vars(module)["has_cuda_capability"] = lambda major, minor: True

    # TorchTitan would report MFU against an A100's peak FLOPs; with an infinite peak, MFU is 0.
    torchtitan.tools.utils.get_peak_flops = lambda device_name: float("inf")

    utils: Any = torchtitan.models.moe.utils
    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)

    # Take tensors from glibc's heap: mapping each anew spent a third of a step on page faults. The
    # heap's holes, 90 MB a step of the debug model, go back to the system after each logged step.
    ctypes.CDLL(None).mallopt(-3, 16 << 20)  # M_MMAP_THRESHOLD of malloc.h

    multiply_bf16_in_float32()
    seed_shards_apart()

    # The router counts tokens per expert with `torch.histc` on integers, which only CUDA supports.
    histc = torch.histc

    def counting_histc(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.device.type == "cpu" and not input.is_floating_point():
            return histc(input.float(), *args, **kwargs).to(input.dtype)
        return histc(input, *args, **kwargs)

    torch.histc = counting_histc

    # Before shortening timeouts, TorchTitan calls a barrier with `device_ids`, which gloo rejects.
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)


def sum_gradients_in_fsdp(model: nn.Module) -> None:
    """Make FSDP reduce with plain sums: gloo lacks PREMUL_SUM, which FSDP's divide factor needs."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def cpu_has_bf16() -> bool:
    """Return whether oneDNN, PyTorch's GEMM library, supports BF16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def multiply_bf16_in_float32() -> torch.library.Library | None:
    """Compute BF16 GEMMs on the CPU in float32, including in autograd and in compiled code.

    Return the `Library` that keeps the new kernels registered. If the CPU supports BF16, replace
    nothing and return None.
    """
    if cpu_has_bf16():
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            _replace(library, name)
            _replace(library, f"{name}.out")
    return library


def _replace(library: torch.library.Library, operator: str) -> None:
    kernel = torch.library.get_kernel(f"aten::{operator}", "CPU")

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) else value

    def multiply(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if any(one.dtype is not torch.bfloat16 for one in tensors):
            # PyTorch's own kernel handles other dtypes, or raises its error for mixed ones.
            return kernel.call_boxed(keys, *args, **kwargs)
        options = {name: widened(value) for name, value in kwargs.items()}
        product = kernel.call_boxed(keys, *map(widened, args), **options)
        out = kwargs.get("out")
        return product.bfloat16() if out is None else out.resize_(product.shape).copy_(product)

    library.impl(operator, multiply, "CPU", with_keyset=True, allow_override=True)


class ShardSeededTracker:
    """A DTensor RNG tracker for CPU meshes.

    Random numbers depend on the seed, on the number of earlier random operations, and on the shard.
    Replicas of a shard draw the same numbers.
    """

    distribute_region_enabled = True

    def __init__(self) -> None:
        self._operations = 0

    @contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        places = zip(spec.mesh.get_coordinate(), spec.placements, strict=True)
        shard = [position for position, placement in places if placement.is_shard()]
        self._operations += 1
        seed = hash((torch.initial_seed(), self._operations, *shard))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield


def seed_shards_apart() -> None:
    """Set DTensor's RNG tracker so that each shard on a CPU mesh draws its own random numbers."""
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    _random._rng_tracker = ShardSeededTracker()
