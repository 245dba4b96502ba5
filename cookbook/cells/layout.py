"""In: a job's options and ranks. Out: how the ranks are divided among pipeline, data and so on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.stack.stack import Stack

DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
}


@dataclass(frozen=True)
class Layout:
    """How the ranks of a job are divided; every degree at least 1.

    `dp_shard` is resolved: TorchTitan's -1 (the ranks that are left) is replaced by the count, and
    is 0 where the other degrees leave none.
    """

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def loss_rank(self) -> int:
        """The rank that prints the real loss, for every schedule but ZBVZeroBubble (rank 0)."""
        return self.stage_ranks * (self.pp - 1)


def layout_of(stack: Stack, options: Mapping[str, Any], world: int) -> Layout:
    """The layout that `options` give a job of `world` ranks."""
    degrees = {short: stack.value(options, name) for short, name in DEGREES.items()}
    if degrees["dp_shard"] == -1:
        others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
        degrees["dp_shard"] = world // max(others, 1)
    return Layout(world=world, **degrees)
