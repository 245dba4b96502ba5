"""Cells of the benchmarks: the cookbook's recipes and overlays on this machine's own GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.base.gpus import Gpu, visible_gpus
from cookbook.base.schema import Words
from cookbook.cells.cell import Cell
from cookbook.cells.cluster import Cluster
from cookbook.cells.overlay import load_overlay
from cookbook.cells.recipe import load_recipe
from cookbook.cells.resolve import lay_out
from cookbook.stack.options import Setting


def this_machine(
    ranks: int, gpu: Gpu | None, environment: Mapping[str, str] | None = None
) -> Cluster:
    """One node with `ranks` GPUs of that kind, or CPU ranks, without any settings of its own."""
    return Cluster(
        name="this machine",
        description="the machine that the benchmark runs on",
        # Not `local`: there, large recipes have stand-ins.
        scheduler="slurm",
        settings={},
        path=Path(__file__),
        gpus_per_node=ranks if gpu else None,
        cpu_ranks_per_node=ranks,
        gpu=gpu,
        emulate=True,
        environment=Words(environment or {}),
    )


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


def cell_on(
    cluster: Cluster,
    recipe: str,
    precision: str,
    ep_backend: str,
    options: Mapping[str, Any],
    name: str = "",
) -> Cell:
    """A recipe with its overlays and a benchmark's `options` over them.

    It is not judged: a benchmark may ask for what the rules refuse or do not know.
    """
    cell = lay_out(
        load_recipe(recipe),
        load_overlay("precision", precision),
        load_overlay("ep_backend", ep_backend),
        cluster,
        layers=({}, {}, {name: Setting(value, "bench") for name, value in options.items()}),
    )
    return replace(cell, name=name or cell.name)
