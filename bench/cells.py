"""The GPUs of this machine, as the benchmarks ask for them."""

from __future__ import annotations

import os
import sys

from cookbook.base.gpus import Gpu, visible_gpus


def first_gpu(needed: int, instead: str) -> Gpu:
    """This machine's GPU; ends the program where there are fewer than `needed`."""
    gpus = visible_gpus()
    if len(gpus) < needed:
        sys.exit(f"{needed} GPUs are needed, found {len(gpus)}; try {instead}")
    return gpus[0]


def gpu_ids() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may say of one GPU, for each that is visible here."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [str(number) for number in range(len(visible_gpus()))]
    return ids if chosen is None else [word.strip() for word in chosen.split(",") if word.strip()]
