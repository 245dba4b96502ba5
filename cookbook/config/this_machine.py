"""Cells on this machine's own GPUs, for benchmarks and for the proofs of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.base.schema import Words
from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster
from cookbook.config.options import Setting
from cookbook.config.overlay import load_overlay
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import lay_out


def this_machine(
    ranks: int, gpu: Gpu | None, environment: Mapping[str, str] | None = None
) -> Cluster:
    """One node with `ranks` GPUs of that kind, or CPU ranks, without any settings of its own."""
    return Cluster(
        name="this machine",
        description="the machine that this runs on",
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


def cell_on(
    cluster: Cluster,
    recipe: str,
    precision: str,
    ep_backend: str,
    options: Mapping[str, Any],
    name: str = "",
    source: str = "bench",
) -> Cell:
    """A recipe with its overlays and `options` over them.

    It is not judged: one may ask for what the rules refuse or do not know.
    """
    cell = lay_out(
        load_recipe(recipe),
        load_overlay("precision", precision),
        load_overlay("ep_backend", ep_backend),
        cluster,
        layers=({}, {}, {name: Setting(value, source) for name, value in options.items()}),
    )
    return replace(cell, name=name or cell.name)
