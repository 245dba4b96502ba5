"""Binds TorchTitan to the CPU and gloo, on a machine without CUDA.

No door: TorchTitan's modules take their device when they are imported, and it supports no CPU. So
on such a machine the whole process is bound, whatever it trains.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torchtitan.components.metrics
import torchtitan.distributed.dual_pipe_v
import torchtitan.distributed.parallel_dims
import torchtitan.distributed.utils
import torchtitan.models.deepseek_v3.model.args
import torchtitan.models.moe.utils
import torchtitan.tools.profiling
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule

from cookbook.titan.common.cpu_bf16 import multiply_bf16_in_float32
from cookbook.titan.common.cpu_random import seed_shards_apart

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
# Modules that keep their own copy of `device_type` or `device_module`, taken at import.
_DEVICE_HOLDERS: tuple[ModuleType, ...] = (
    torchtitan.tools.utils,
    torchtitan.tools.profiling,
    torchtitan.components.metrics,
    torchtitan.distributed.utils,
    torchtitan.distributed.parallel_dims,
    torchtitan.distributed.dual_pipe_v,
)


class CpuProperties(NamedTuple):
    name: str
    total_memory: int


class CpuDevice(ModuleType):
    """The part of `torch.cuda` that TorchTitan calls, answered for the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        # torch.cpu.set_device warns about every index; the host is one device for all ranks.
        pass

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        try:
            for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        except OSError:
            pass
        return platform.machine() or "CPU"

    def get_device_properties(self, device: Any = None) -> CpuProperties:
        pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return CpuProperties(self.get_device_name(), pages * page_size)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        # What a CUDA allocator reserves is nearest to what the process holds; ru_maxrss is in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass


def prepare_cpu() -> None:
    """Bind TorchTitan to the CPU; called once, before a Trainer exists."""
    device = CpuDevice("cookbook.titan.tt_0_2_2.cpu.device")
    for holder in _DEVICE_HOLDERS:
        if hasattr(holder, "device_type"):
            holder.device_type = "cpu"  # type: ignore[attr-defined]
        if hasattr(holder, "device_module"):
            holder.device_module = device  # type: ignore[attr-defined]

    # No peak is known for a CPU; TorchTitan would print its MFU as a part of an A100's peak.
    torchtitan.tools.utils.get_peak_flops = lambda device_name: float("inf")

    # DeepSeek-V3 falls back to a Python loop over experts below SM90, and quantization hooks into
    # torch._grouped_mm alone; the CPU has that operation too, so it takes the same path as a GPU.
    torchtitan.models.deepseek_v3.model.args.has_cuda_capability = lambda major, minor: True

    # The Triton kernel that fills the permutation has a CPU reference beside it.
    utils: Any = torchtitan.models.moe.utils
    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)

    _give_memory_back()
    multiply_bf16_in_float32()
    seed_shards_apart()
    _histc_of_integers()
    _barrier_without_device_ids()


def _give_memory_back() -> None:
    """Let glibc map every large tensor by itself, and unmap it when it is freed.

    By default it soon takes large ones from its heap, where the holes between them grow by 90 MB a
    step of the debug model: after 100 steps a rank had 10 GiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def _histc_of_integers() -> None:
    """The router counts tokens per expert with `torch.histc` of integers, which is CUDA-only."""
    histc = torch.histc

    @wraps(histc)
    def counting_histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.device.type != "cpu" or input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.float(), *args, **kwargs).to(input.dtype)

    torch.histc = counting_histc


def sum_gradients_in_fsdp(model: nn.Module) -> None:
    """Let FSDP reduce by plain sums: gloo lacks PREMUL_SUM, which TorchTitan's factor needs."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _barrier_without_device_ids() -> None:
    """TorchTitan names its device in a barrier, before it shortens the timeouts; gloo refuses."""
    barrier = torch.distributed.barrier

    @wraps(barrier)
    def host_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    torch.distributed.barrier = host_barrier
