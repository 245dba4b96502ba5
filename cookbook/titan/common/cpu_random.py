"""Random numbers for DTensors on CPU ranks, different ones for every shard.

PyTorch keeps the shards of a DTensor apart by offsets into a CUDA generator and leaves CPU meshes
alone: every rank would draw the same numbers, and with EP 2 the second half of the experts would
start as a copy of the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import _random


class ShardSeededTracker:
    """DTensor's tracker of random state, for CPU meshes.

    The numbers depend on the seed, on how many random operations came before, and on the shard;
    replicas of a shard draw the same ones.
    """

    distribute_region_enabled = True

    def __init__(self) -> None:
        self._operations = 0

    @contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        coordinate = spec.mesh.get_coordinate()
        shard = [
            position
            for position, placement in zip(coordinate, spec.placements, strict=True)
            if placement.is_shard()
        ]
        self._operations += 1
        seed = hash((torch.initial_seed(), self._operations, *shard))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield


def seed_shards_apart() -> None:
    """Give every shard of a DTensor on a CPU mesh its own random numbers, in this process."""
    # The tracker below is the support whose absence DTensor warns of.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    _random._rng_tracker = ShardSeededTracker()
