"""The GPUs of this machine, as nvidia-smi lists them and as CUDA shows them; no torch is needed.

The only module that knows nvidia-smi's query. Whoever runs it elsewhere, or has a recorded answer,
takes `NVIDIA_SMI` and `parse_nvidia_smi`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,compute_cap,memory.total,driver_version,uuid",
    "--format=csv,noheader,nounits",
)
_DRIVER = Path("/proc/driver/nvidia/version")

# How the GPUs are, a row each: one UUID, then what its reader wants to know.
GPU_STATES = (
    "nvidia-smi",
    "--query-gpu=uuid,index,memory.used,ecc.errors.uncorrected.volatile.total",
    "--format=csv,noheader,nounits",
)
GPU_ROWS = (
    "nvidia-smi",
    "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure",
    "--format=csv,noheader,nounits",
)
GPU_PROCESSES = (
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,process_name",
    "--format=csv,noheader,nounits",
)
GPU_LINKS = ("nvidia-smi", "nvlink", "--status")


@dataclass(frozen=True)
class Gpu:
    """A GPU model: its name, compute capability (10.0 for B200) and memory in GiB.

    Cluster profiles give exactly these keys; what belongs to one machine is in `InstalledGpu`.
    """

    name: str
    compute_capability: float
    memory_gib: float


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU in a machine: its model, the driver's version, and the UUID that names this one."""

    model: Gpu
    driver: str
    uuid: str


def parse_nvidia_smi(output: str) -> tuple[InstalledGpu, ...]:
    """The GPUs in what `NVIDIA_SMI` printed; a row that names no compute capability is left out."""
    installed = []
    for line in output.splitlines():
        row = [field.strip() for field in line.rsplit(",", 4)]
        if len(row) != 5 or not _is_number(row[1]):
            continue
        name, capability, mib, driver, uuid = row
        # "[N/A]" where the driver does not know, e.g. on a GPU that shares the CPU's memory.
        gib = round(float(mib) / 1024, 1) if _is_number(mib) else 0.0
        installed.append(InstalledGpu(Gpu(name, float(capability), gib), driver, uuid))
    return tuple(installed)


def parse_rows(output: str) -> list[tuple[str, list[str]]]:
    """UUID and other fields of each row that one of the queries above printed."""
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    return [(row[0], row[1:]) for row in rows if row[0].startswith(("GPU-", "MIG-"))]


def parse_links(output: str) -> dict[str, int]:
    """The active NVLinks of each GPU, by UUID, in what `GPU_LINKS` printed."""
    links: dict[str, int] = {}
    uuid = ""
    for line in output.splitlines():
        if named := re.match(r"GPU [0-9]+:.*\(UUID: ([^)]+)\)", line):
            uuid = named[1]
            links[uuid] = 0
        elif uuid and re.match(r"\s+Link [0-9]+: [0-9.]+ [GM]B/s", line):
            links[uuid] += 1
    return links


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None


def select_visible(
    installed: Sequence[InstalledGpu], chosen: str | None
) -> tuple[InstalledGpu, ...]:
    """Those of `installed` that CUDA shows, in its order, where CUDA_VISIBLE_DEVICES is `chosen`.

    All where it is unset (None). Else it lists indices or beginnings of UUIDs, whichever comes
    first; an entry that names no GPU or several ends the list, and a GPU that is named twice
    voids it. Compared with driver 580.159.04 on two H200.
    """
    if chosen is None:
        return tuple(installed)
    select = _by_uuid if chosen.startswith("GPU-") else _by_index
    visible: list[int] = []
    for entry in chosen.split(","):
        index = select(installed, entry)
        if index is None:
            break
        if index in visible:
            return ()
        visible.append(index)
    return tuple(installed[index] for index in visible)


# CUDA reads an entry as far as it can and ignores the rest: "1b" is GPU 1.
def _by_uuid(installed: Sequence[InstalledGpu], entry: str) -> int | None:
    named = re.match(r"GPU-[0-9a-fA-F-]+", entry)
    beginning = named[0].lower() if named else ""
    alike = [i for i, gpu in enumerate(installed) if gpu.uuid.lower().startswith(beginning)]
    return alike[0] if beginning and len(alike) == 1 else None


def _by_index(installed: Sequence[InstalledGpu], entry: str) -> int | None:
    number = re.match(r"\s*[+-]?[0-9]+", entry)
    index = int(number[0]) if number else -1
    return index if 0 <= index < len(installed) else None


def installed_gpus() -> tuple[InstalledGpu, ...]:
    """The GPUs that nvidia-smi lists; none where it is missing or does not work."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return ()
    try:
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return ()
    return parse_nvidia_smi(answer.stdout.decode("utf-8", "replace"))


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """The models of the GPUs that a program started here finds, in CUDA's order."""
    visible = select_visible(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return tuple(gpu.model for gpu in visible)


def driver_version() -> str | None:
    """The version of the loaded NVIDIA driver; None where there is none. Costs no process."""
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]*)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def has_slurm() -> bool:
    """Whether jobs can be handed to Slurm from here."""
    return shutil.which("sbatch") is not None


# Dense, in TFLOP/s, by bits of an input's element; the 16-bit ones are TorchTitan 0.2.2's. Of the
# names that are found in a GPU's, the first counts.
_PEAKS: tuple[tuple[str, dict[int, float]], ...] = (
    ("GB200", {16: 2500.0, 8: 5000.0}),
    ("B200", {16: 2250.0, 8: 4500.0}),
    ("H200", {16: 989.0, 8: 1979.0}),
    ("H100 NVL", {16: 835.0, 8: 1671.0}),
    ("H100 PCIe", {16: 756.0, 8: 1513.0}),
    ("H100", {16: 989.0, 8: 1979.0}),
    ("A100", {16: 312.0}),
)


def peak_tflops(name: str, bits: int) -> float | None:
    """The most TFLOP/s of a matrix product on the GPU called `name`; None where not known here."""
    for model, peaks in _PEAKS:
        if model in name:
            return peaks.get(bits)
    return None
