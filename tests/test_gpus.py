"""GPUs as NVML lists them, and those of them that CUDA shows."""

import sys
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.gpus import (
    Gpu,
    InstalledGpu,
    NoGpusError,
    peak_tflops,
    read_gpus,
    select_visible,
)
from tests.stand_in_gpus import stand_in_gpus

H200 = Gpu("NVIDIA H200", 9.0, 140.4)
A, B = "GPU-98822d69-3857-60a7-432d-d2f07c01937b", "GPU-af8d6c48-55af-fd5f-dead-4a982160bd0d"
PAIR = tuple(InstalledGpu(H200, "580.159.04", uuid) for uuid in (A, B))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ({}, InstalledGpu(H200, "580.159.04", "GPU-0", 4, links=18)),
        (
            {"used_mib": 90000, "processes": {"7": "python", "8": None}, "ecc": 3, "rows": [1, 0]},
            InstalledGpu(
                *(H200, "580.159.04", "GPU-0", 90000, ("7 (python)", "8 (?)"), 3, True, False, 18)
            ),
        ),
        # A card that shares the CPU's memory, counts no errors and has no links.
        (
            {"capability": [12, 1], "mib": None, "ecc": None, "rows": None, "links": None}
            | {"name": "NVIDIA GB10", "processes": None},
            InstalledGpu(Gpu("NVIDIA GB10", 12.1, 0.0), "580.159.04", "GPU-0"),
        ),
        (
            {"rows": [0, 1], "links": 17},
            InstalledGpu(H200, "580.159.04", "GPU-0", 4, (), 0, False, True, 17),
        ),
    ],
)
def test_a_gpu_is_read_with_its_health(
    gpu: dict[str, Any], expected: InstalledGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_gpus(monkeypatch, tmp_path, [gpu])
    assert read_gpus() == (expected,)


@pytest.mark.parametrize(
    ("machine", "reason", "has_driver"),
    [
        (None, "NVML Shared Library Not Found", False),
        ({"gpus": []}, "NVML lists no GPU", True),
        ({"error": "Unknown Error"}, "NVML: Unknown Error", True),
        ({"gpus": [{"capability": None}]}, "NVML: Not Supported", True),
        ({"hangs": True}, r"NVML: no answer in 0 s", True),
    ],
)
def test_without_gpus_there_is_a_reason(
    machine: dict[str, Any] | None,
    reason: str,
    has_driver: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_gpus(monkeypatch, tmp_path, **(machine or {}))
    if machine is None:
        monkeypatch.delenv("STAND_IN_GPUS")
    with pytest.raises(NoGpusError, match=reason) as raised:
        read_gpus(timeout_s=0.3)
    assert raised.value.has_driver == has_driver
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpusError, match="nvidia-ml-py is not installed"):
        read_gpus()


# Value, and the GPUs that CUDA counted and named under it: driver 580.159.04, two H200.
SEEN: list[tuple[str | None, str]] = [
    (None, "01"),
    ("-1", ""),
    ("1,0", "10"),
    ("0,0", ""),
    ("0,5,1", "0"),
    (B, "1"),
    (A[:8], "0"),
    (f"{A},{A[:12]}", ""),
    (A.removeprefix("GPU-"), ""),
]


@pytest.mark.parametrize(("chosen", "seen"), SEEN, ids=[repr(chosen) for chosen, _ in SEEN])
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen: str | None, seen: str) -> None:
    assert select_visible(PAIR, chosen) == tuple(PAIR[int(index)] for index in seen)


@pytest.mark.parametrize(
    ("name", "bits", "peak"),
    [
        ("NVIDIA H200", 16, 989),
        ("NVIDIA H100 PCIe", 16, 756),
        ("NVIDIA B200", 8, 4500),
        ("NVIDIA A100-SXM4-80GB", 8, None),
        ("NVIDIA L4", 16, None),
    ],
)
def test_the_peak_is_the_cards_for_the_format(name: str, bits: int, peak: float | None) -> None:
    assert peak_tflops(name, bits) == peak
