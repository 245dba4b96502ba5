"""Notes in a training process what its allocator holds at every step; adds short flavors.

Named by `--experimental.custom_import=bench.memory_probe`, in place of the stack's hooks, which it
imports.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torchtitan.components.metrics import DeviceMemoryMonitor

import cookbook.titan.tt_0_2_2  # noqa: F401  (as in every job of the cookbook)
from bench.short_flavors import add_flavors

GIB = 2**30


def _probe_every_log() -> None:
    read = DeviceMemoryMonitor.get_peak_stats

    def read_and_note(self: Any) -> Any:
        stats = read(self)
        folder = os.environ.get("MEMORY_PROBE_DIR")
        if folder:
            note = {"reserved_gib": stats.max_reserved_gib, "active_gib": stats.max_active_gib}
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                # All that is in use on the GPU, of every process on it.
                note["device_gib"] = (total - free) / GIB
                note["retries"] = stats.num_alloc_retries
            with open(f"{folder}/{os.environ['RANK']}.jsonl", "a") as file:  # noqa: PTH123
                file.write(json.dumps(note) + "\n")
        return stats

    DeviceMemoryMonitor.get_peak_stats = read_and_note


add_flavors()
_probe_every_log()
