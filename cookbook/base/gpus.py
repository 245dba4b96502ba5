"""The GPUs of this machine from NVML, and the GPUs that CUDA can see, without importing torch."""

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU model: its name, compute capability (10.0 for B200) and memory in GiB."""

    name: str
    compute_capability: float
    memory_gib: float


@dataclass(frozen=True)
class InstalledGpu:
    """An installed GPU and its health."""

    model: Gpu
    driver: str
    uuid: str
    memory_used_mib: int = 0  # memory used by all processes, excluding the driver's reserve
    processes: tuple[str, ...] = ()  # compute processes on the GPU, as `4711 (python)`
    ecc_errors: int = 0  # uncorrectable ECC errors since the driver was loaded
    row_pending: bool = False  # whether a memory row will be remapped at the next GPU reset
    row_failed: bool = False  # whether remapping failed for lack of a spare row
    links: int = 0  # number of active NVLinks


class NoGpusError(Exception):
    """NVML lists no GPUs; the message says why."""

    def __init__(self, reason: str, has_driver: bool) -> None:
        self.has_driver = has_driver
        super().__init__(reason)


def read_gpus(timeout_s: float = 20.0) -> tuple[InstalledGpu, ...]:
    """Return this machine's GPUs in NVML's order; raise NoGpusError on timeout or without GPUs."""
    answer: list[tuple[InstalledGpu, ...] | NoGpusError] = []
    # A daemon thread, so that a hanging driver cannot keep the process from exiting.
    thread = threading.Thread(target=lambda: answer.append(_ask_nvml()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    found = answer[0] if answer else NoGpusError(f"NVML: no answer in {timeout_s:.0f} s", True)
    if isinstance(found, NoGpusError):
        raise found
    return found


def _ask_nvml() -> tuple[InstalledGpu, ...] | NoGpusError:
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        return NoGpusError("nvidia-ml-py is not installed", has_driver=False)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded)
        return NoGpusError(f"NVML: {error}", has_driver=not isinstance(error, absent))
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        found = tuple(_installed(nvml, handle, driver) for handle in handles)
    except nvml.NVMLError as error:
        return NoGpusError(f"NVML: {error}", has_driver=True)
    finally:
        nvml.nvmlShutdown()
    return found or NoGpusError("NVML lists no GPU", has_driver=True)


def _installed(nvml: Any, handle: Any, driver: str) -> InstalledGpu:
    def known(otherwise: Any, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query, or `otherwise` if the GPU does not support it."""
        try:
            return query(*arguments)
        except nvml.NVMLError:
            return otherwise

    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    # Version 2 of NVML's memory query reports the driver's reserve separately from used memory.
    memory = known(None, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    total, used = (memory.total, memory.used) if memory else (0, 0)
    running = [one.pid for one in known([], nvml.nvmlDeviceGetComputeRunningProcesses, handle)]
    *_, pending, failed = known((False, False), nvml.nvmlDeviceGetRemappedRows, handle)
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    names = [known("?", nvml.nvmlSystemGetProcessName, pid) for pid in running]
    return InstalledGpu(
        Gpu(nvml.nvmlDeviceGetName(handle), float(f"{major}.{minor}"), round(total / 2**30, 1)),
        driver,
        nvml.nvmlDeviceGetUUID(handle),
        memory_used_mib=used // 2**20,
        processes=tuple(f"{pid} ({name})" for pid, name in zip(running, names, strict=True)),
        ecc_errors=known(0, nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds),
        row_pending=bool(pending),
        row_failed=bool(failed),
        links=sum(known(0, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links),
    )


def installed_gpus() -> tuple[InstalledGpu, ...]:
    """Return all GPUs of this machine; empty if NVML lists none."""
    try:
        return read_gpus()
    except NoGpusError:
        return ()


def select_visible(
    installed: Sequence[InstalledGpu], chosen: str | None
) -> tuple[InstalledGpu, ...]:
    """Return the GPUs that CUDA sees, in CUDA's order.

    `chosen` is the value of CUDA_VISIBLE_DEVICES: GPU indices or UUID prefixes. If it is None
    (unset), all GPUs are visible. CUDA stops reading the list at the first item that does not match
    exactly one GPU. If the list names a GPU twice, no GPU is visible.
    """
    if chosen is None:
        return tuple(installed)
    visible: list[InstalledGpu] = []
    for entry in map(str.strip, chosen.split(",")):
        is_uuid = entry.startswith("GPU-") and entry != "GPU-"
        named = [gpu for gpu in installed if is_uuid and gpu.uuid.startswith(entry)]
        if entry.isdecimal():
            named = list(installed[int(entry) :][:1])
        if len(named) != 1:
            break
        if named[0] in visible:
            return ()
        visible += named
    return tuple(visible)


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """Return the models of the GPUs that CUDA sees in this environment, in CUDA's order."""
    visible = select_visible(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return tuple(gpu.model for gpu in visible)


def driver_version() -> str | None:
    """Return the version that the kernel reports for the NVIDIA driver; None without a driver."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]*)", text)
        return found[1] if found else None
    return None


# Peak TFLOP/s without sparsity, by bits per input element. The 16-bit values equal TorchTitan
# 0.2.2's. The first key that occurs in the GPU's name applies.
_PEAKS: dict[str, dict[int, float]] = {
    "GB200": {16: 2500.0, 8: 5000.0},
    "B200": {16: 2250.0, 8: 4500.0},
    "H200": {16: 989.0, 8: 1979.0},
    "H100 NVL": {16: 835.0, 8: 1671.0},
    "H100 PCIe": {16: 756.0, 8: 1513.0},
    "H100": {16: 989.0, 8: 1979.0},
    "A100": {16: 312.0},
}


def peak_tflops(name: str, bits: int) -> float | None:
    """Return the peak TFLOP/s of matrix products with inputs of `bits` bits; None if unknown."""
    return next((peaks.get(bits) for model, peaks in _PEAKS.items() if model in name), None)
