"""A stack: pinned packages, and the options and models that its TorchTitan knows.

Read from `requirements.txt` and from `tables/<name>.json`, which is made from the installed
TorchTitan (see `option_table.py` of the stack's package in `titan/`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, nearest, unknown_name
from cookbook.base.paths import REQUIREMENTS
from cookbook.config.option import Option
from cookbook.config.pins import read_pins, stack_name

_TABLES = Path(__file__).parent / "tables"
# What the scripts tell TorchTitan themselves, after all settings, and what to do instead.
_SET_BY_SCRIPTS = {
    "job.dump_folder": "set CELL_DIR or COOKBOOK_RUNS in the environment",
    "metrics.save_tb_folder": "it is in the attempt's folder",
    "comm.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_traces_folder": "it is in the attempt's folder",
    "profiling.save_memory_snapshot_folder": "it is in the attempt's folder",
    "job.custom_config_module": "add options to the stack's job_config.py in cookbook/titan",
    "experimental.custom_import": "add it to the stack's spec.py in cookbook/titan",
    "cookbook.precision": "use --precision",
    "cookbook.ep_backend": "use --ep-backend",
    "cookbook.grouped_gemms": "set grouped_gemms in the precision's `active` block",
    "cookbook.linear_layers": "set linear_layers in the precision's `active` block",
    "cookbook.dispatch": "set dispatch in the EP backend's `active` block",
    "cookbook.emulated": "it follows from precision and cluster",
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model flavor that a layout must divide, or a kernel must take."""

    n_layers: int
    n_heads: int
    vocab_size: int
    num_experts: int
    top_k: int
    qk_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, eq=False)
class Stack:
    """A pinned set of packages and the options its TorchTitan understands.

    `model_args` are all arguments of every flavor, by dotted name.
    """

    name: str
    pins: Mapping[str, str]
    options: Mapping[str, Option]
    models: Mapping[str, Mapping[str, ModelSizes]]
    datasets: tuple[str, ...]
    model_args: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """The first words of the options: `training`, `parallelism`, ..."""
        return frozenset(name.partition(".")[0] for name in self.options)

    @property
    def hooks(self) -> str:
        """The package that TorchTitan imports in every training process."""
        return f"cookbook.titan.tt_{self.pins['torchtitan'].replace('.', '_')}"

    def option(self, place: str, name: str) -> Option:
        """The option called `name`; a misspelt one is an error that names the nearest real ones."""
        if name not in self.options:
            close = nearest(name, self.options, 3) or self._nearest_keys(name)
            remedy = f"nearest: {', '.join(close)}" if close else ""
            raise InputError(
                place,
                f"TorchTitan {self.pins['torchtitan']} has no option {name!r}",
                remedy or "see `python -m torchtitan.train --help`",
            )
        return self.options[name]

    def _nearest_keys(self, name: str) -> list[str]:
        """Options of any section whose last word is near that of `name`."""
        keys = {full.rpartition(".")[2] for full in self.options}
        close = nearest(name.rpartition(".")[2], keys)
        return [full for full in self.options for key in close if full.endswith(f".{key}")]

    def setting(self, place: str, name: str) -> Option:
        """`option`, for YAML files and `--set`, where what the scripts set may not stand."""
        if name in _SET_BY_SCRIPTS:
            raise InputError(place, f"{name} is set by the scripts", _SET_BY_SCRIPTS[name])
        return self.option(place, name)


@functools.cache
def load_stack(name: str | None = None) -> Stack:
    """Read the stack called `name`; by default the one that this checkout's requirements pin."""
    name = name or stack_name()
    known = sorted(path.stem for path in _TABLES.glob("*.json"))
    if name not in known:
        raise unknown_name("requirements.txt", "stack", name, known)
    table = json.loads((_TABLES / f"{name}.json").read_text(encoding="utf-8"))
    options = {
        option: Option(
            option,
            entry["kind"],
            entry["default"],
            entry.get("optional", False),
            tuple(entry.get("choices", ())),
        )
        for option, entry in table["options"].items()
    }
    models = {
        model: {flavor: ModelSizes(**sizes) for flavor, sizes in flavors.items()}
        for model, flavors in table["models"].items()
    }
    pins = {pin.name: pin.value for pin in read_pins(REQUIREMENTS)}
    return Stack(name, pins, options, models, tuple(table["datasets"]), table["model_args"])
