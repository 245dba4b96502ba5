# ruff: noqa: N801, N802, N816, N818
"""Stands in for nvidia-ml-py: the GPUs are those of the JSON file that STAND_IN_GPUS names.

`{"gpus": [{...}], "error": "...", "hangs": true}`; a GPU's keys are those of `GPU` below, of which
null is not supported by the card. Without the variable this machine has no driver.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GPU: dict[str, Any] = {
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "mib": 143771,
    "driver": "580.159.04",
    "uuid": "GPU-0",
    "used_mib": 4,
    "processes": {},
    "ecc": 0,
    "rows": [0, 0],
    "links": 18,
}
nvmlMemory_v2 = 2
NVML_NVLINK_MAX_LINKS = 36
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0


class NVMLError(Exception):
    """Any of NVML's errors."""


class NVMLError_LibraryNotFound(NVMLError):
    """There is no driver."""


class NVMLError_DriverNotLoaded(NVMLError):
    """There is a library without its driver."""


_machine: dict[str, Any] = {}


def nvmlInit() -> None:
    if not (file := os.environ.get("STAND_IN_GPUS")):
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    _machine.clear()
    _machine.update(json.loads(Path(file).read_text(encoding="utf-8")))
    if _machine.get("hangs"):
        time.sleep(1000)
    if error := _machine.get("error"):
        raise NVMLError(error)


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_machine["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    uuid = {"uuid": f"GPU-{index}"}
    return GPU | uuid | dict(_machine["gpus"][index])


def nvmlSystemGetDriverVersion() -> str:
    return str((GPU | dict(*_machine["gpus"][:1]))["driver"])


def _of(handle: dict[str, Any], key: str) -> Any:
    if handle[key] is None:
        raise NVMLError("Not Supported")
    return handle[key]


def nvmlDeviceGetName(handle: dict[str, Any]) -> Any:
    return handle["name"]


def nvmlDeviceGetUUID(handle: dict[str, Any]) -> Any:
    return handle["uuid"]


def nvmlDeviceGetCudaComputeCapability(handle: dict[str, Any]) -> Any:
    return _of(handle, "capability")


def nvmlDeviceGetMemoryInfo(handle: dict[str, Any], version: int) -> Any:
    assert version == nvmlMemory_v2
    return SimpleNamespace(total=_of(handle, "mib") << 20, used=handle["used_mib"] << 20)


def nvmlDeviceGetComputeRunningProcesses(handle: dict[str, Any]) -> Any:
    return [SimpleNamespace(pid=int(pid)) for pid in _of(handle, "processes")]


def nvmlSystemGetProcessName(pid: int) -> str:
    names = {int(one): name for gpu in _machine["gpus"] for one, name in gpu["processes"].items()}
    if names[pid] is None:
        raise NVMLError("Not Found")
    return str(names[pid])


def nvmlDeviceGetRemappedRows(handle: dict[str, Any]) -> Any:
    return (0, 0, *_of(handle, "rows"))


def nvmlDeviceGetTotalEccErrors(handle: dict[str, Any], *kinds: int) -> Any:
    assert kinds == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return _of(handle, "ecc")


def nvmlDeviceGetNvLinkState(handle: dict[str, Any], link: int) -> int:
    if handle["links"] is None or link >= 18:
        raise NVMLError("Not Supported")
    return int(link < handle["links"])
