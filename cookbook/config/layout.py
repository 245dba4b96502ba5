"""How the ranks of a job are divided among pipeline, data, tensor and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.config.options import Options

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


def layout_of(options: Options, world: int) -> Layout:
    """The layout that `options` give a job of `world` ranks."""
    degrees = {short: options[name] for short, name in DEGREES.items()}
    if degrees["dp_shard"] == -1:
        others = degrees["dp_replicate"] * degrees["cp"] * degrees["tp"] * degrees["pp"]
        degrees["dp_shard"] = world // max(others, 1)
    return Layout(world=world, **degrees)
