"""In: this machine. Out: its GPUs and whether Slurm is here, found without torch."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU model: its name, compute capability (10.0 for B200) and memory in GiB."""

    name: str
    compute_capability: float
    memory_gib: float


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi shows and CUDA_VISIBLE_DEVICES leaves; none where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = "--query-gpu=name,compute_cap,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return ()
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line.count(", ") == 2]
    # "[N/A]" stands where the driver does not know, e.g. the memory of a GPU that shares the CPU's.
    gpus = [
        Gpu(name, float(capability), round(float(mib) / 1024, 1) if mib[0].isdigit() else 0.0)
        for name, capability, mib in rows
        if capability[0].isdigit()
    ]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpus)
    return tuple(gpus[: len([word for word in chosen.split(",") if word.strip()])])


def has_slurm() -> bool:
    """Whether jobs can be handed to Slurm from here."""
    return shutil.which("sbatch") is not None
