"""A machine on which nothing takes time but what a test says, so that a term is counted by hand."""

import dataclasses
from typing import Any

from cookbook.base.gpus import Gpu
from cookbook.base.paths import RECIPES
from cookbook.config.cell import Cell
from cookbook.config.resolve import this_machine
from cookbook.predict.hardware import Hardware, load_hardware
from tests.check_cells import cell_of

H200 = load_hardware(RECIPES / "hardware/h200.yaml")
FACTS = [one.name for one in dataclasses.fields(Hardware) if one.name not in ("name", "path")]
# More of it is faster; of all else (latencies, bytes, tokens wasted) more is slower.
RATES = ("tflops", "gb_per_s", "share")
_ENDLESS = 1e30
_FREE = {
    name: 1.0 if name.endswith("share") else _ENDLESS if name.endswith(RATES) else 0.0
    for name in FACTS
}


def only(**facts: float) -> Hardware:
    """Rates are endless, shares 1 and costs 0, but for `facts`.

    A rate of 1 TFLOP/s is 1e9 FLOP a millisecond, one of 1 GB/s is 1e6 bytes.
    """
    changed: dict[str, Any] = {**_FREE, **facts}
    return dataclasses.replace(H200, **changed)


def on_gpus(gpus: int, options: dict[str, Any] | None = None, **where: Any) -> Cell:
    """The 16B on one node of so many GPUs: EP over all, 4 sequences each, experts dealt evenly."""
    settings = {
        "parallelism.expert_parallel_degree": gpus,
        "training.local_batch_size": 4,
        "debug.moe_force_load_balance": True,
    }
    machine = this_machine(gpus, Gpu("NVIDIA H200", 9.0, 139.8))
    return cell_of("deepseek_v3_16b", settings | (options or {}), cluster=machine, **where)
