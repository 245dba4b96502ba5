"""The cells whose speed `bench.gpu_throughput` compares, by name; a new one is a line of CELLS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cells import cell_on
from cookbook.cells.cell import Cell
from cookbook.cells.cluster import Cluster

GPUS, CPU_RANKS = 4, 2


@dataclass(frozen=True)
class Trained:
    """What a cell trains.

    Attributes:
        options: over the recipe's and those of every cell below.
        released: TorchTitan as it is, without the cookbook's hooks; on a CPU it needs them.
    """

    ep_backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    recipe: str = "deepseek_v3_16b"
    released: bool = False


_TP2 = {"parallelism.tensor_parallel_degree": 2}
_REAL = {"debug.moe_force_load_balance": False}
_NOT_RECOMPUTED = {"activation_checkpoint.mode": "none", "training.local_batch_size": 2}

CELLS: dict[str, Trained] = {
    # The published options, in the code that was published.
    "released-standard": Trained("standard", released=True),
    "released-deepep": Trained("deepep", released=True),
    "released-deepep-real": Trained("deepep", _REAL, released=True),
    "standard": Trained("standard"),
    "deepep": Trained("deepep"),
    "deepep-real": Trained("deepep", _REAL),
    "standard-tp2": Trained("standard", _TP2),
    "deepep-tp2": Trained("deepep", _TP2),
    "deepep-no-recompute": Trained("deepep", _NOT_RECOMPUTED),
    "deepep-float8": Trained("deepep", precision="float8"),
}

# One node's share of the recipes: EP within it, a batch that full recomputation leaves room for.
_EVERY = {
    "parallelism.expert_parallel_degree": 4,
    "training.local_batch_size": 4,
    "training.dataset": "c4_test",
    "debug.moe_force_load_balance": True,
    "checkpoint.enable": False,
    "metrics.enable_tensorboard": False,
    "comm.trace_buf_size": 0,
}
# Over all options, to try the benchmark out on a CPU in seconds.
_TINY = {
    "parallelism.expert_parallel_degree": CPU_RANKS,
    "training.seq_len": 128,
    "training.local_batch_size": 2,
    "compile.enable": False,
}


def cell_of(name: str, machine: Cluster, text: Path, tokenizer: Path, steps: int) -> Cell:
    """The cell called `name` on `machine`; on a CPU the debug model with the cell's own options."""
    trained, on_cpu = CELLS[name], machine.gpu is None
    options = {
        **_EVERY,
        **trained.options,
        **(_TINY if on_cpu else {}),
        "training.dataset_path": str(text),
        "model.hf_assets_path": str(tokenizer),
        "training.steps": steps,
    }
    recipe = "debug" if on_cpu else trained.recipe
    return cell_on(machine, recipe, trained.precision, trained.ep_backend, options, name)


def seq_len_of(names: list[str], machine: Cluster) -> int:
    """The length of the sequences, which all of the cells must share."""
    lengths = {
        cell_of(name, machine, Path(), Path(), 1).options["training.seq_len"] for name in names
    }
    if len(lengths) > 1:
        raise ValueError(f"sequences of {sorted(lengths)} tokens cannot be compared")
    return int(lengths.pop())
