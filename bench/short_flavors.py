"""TorchTitan's 16B with fewer layers: the same layers, a shorter start, room on fewer GPUs.

Named by `--experimental.custom_import=bench.short_flavors` where TorchTitan trains as released.
"""

from __future__ import annotations

import copy

from torchtitan.protocols.train_spec import get_train_spec


def add_flavors() -> None:
    """Add `16B_4layers` and `16B_8layers` to the flavors of the registered DeepSeek-V3."""
    flavors = get_train_spec("deepseek_v3").model_args
    for num_layers in (4, 8):
        args = copy.deepcopy(flavors["16B"])
        args.n_layers = num_layers
        flavors.setdefault(f"16B_{num_layers}layers", args)


add_flavors()
