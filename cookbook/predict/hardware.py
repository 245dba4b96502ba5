"""The speed of a GPU and its links: facts from `recipes/hardware/*.yaml`, each with its source."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, described, unknown_name
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import read_yaml
from cookbook.config.cell import Cell

_FOLDER = RECIPES / "hardware"


@dataclass(frozen=True)
class Hardware:
    """The facts, by name; the unit is the last part of each name, a share is of 1.

    Between nodes facts are None for a machine that is a single node.
    """

    name: str
    path: Path
    sources: Mapping[str, str]
    bf16_peak_tflops: float
    fp8_peak_tflops: float
    memory_bandwidth_gb_per_s: float
    nvlink_gb_per_s: float
    dense_gemm_share: float
    grouped_gemm_share: float
    fp8_gemm_share: float
    memory_bandwidth_share: float
    nccl_nvlink_share: float
    nccl_beside_compute_share: float
    compute_beside_nccl_share: float
    flex_attention_forward_tflops: float
    flex_attention_backward_tflops: float
    flex_attention_waste_tokens: float
    flash_attention_4_forward_tflops: float
    flash_attention_4_backward_tflops: float
    flash_attention_4_waste_tokens: float
    deepep_latency_ms: float
    deepep_nvlink_gb_per_s: float
    compute_beside_deepep_share: float
    all_to_all_latency_ms: float
    all_to_all_nvlink_share: float
    scatter_add_gb_per_s: float
    released_deepep_rows_gb_per_s: float
    float8_quantize_bytes: float
    mxfp8_quantize_bytes: float
    host_ms_per_routed_layer: float
    host_ms_per_step: float
    text_us_per_token: float
    infiniband_gb_per_s: float | None = None
    nccl_infiniband_share: float | None = None
    all_to_all_infiniband_share: float | None = None
    deepep_infiniband_share: float | None = None


_PLAIN = ("name", "path", "sources")
_FACTS = {one.name: one.default for one in fields(Hardware) if one.name not in _PLAIN}


def hardware_of(cell: Cell) -> Hardware:
    """Return the facts of the cell's GPU.

    Raises:
        InputError: no GPU, or one without facts.
    """
    place, gpu = f"cluster {cell.cluster.name}", cell.cluster.gpu
    if gpu is None:
        raise InputError(place, "has no GPU", "times are predicted for GPUs only")
    known = [load_hardware(path) for path in sorted(_FOLDER.glob("*.yaml"))]
    found = next((one for one in known if one.name in gpu.name.split()), None)
    if found is None:
        raise InputError(
            place,
            f"nothing is known of the speed of a {gpu.name}",
            f"describe it in recipes/hardware/, as {', '.join(one.path.name for one in known)}",
        )
    if cell.nodes > 1 and found.infiniband_gb_per_s is None:
        raise InputError(
            f"recipes/hardware/{found.path.name}",
            "says nothing of the network between nodes",
            "add infiniband_gb_per_s and the shares of it, or use one node",
        )
    return found


@functools.cache
def load_hardware(path: Path) -> Hardware:
    """Read one file.

    Raises:
        InputError: a fact is missing, unknown, without a source, or no positive number.
    """
    file = read_yaml(path)
    content = {key: value for key, value in file.content.items() if key != "description"}
    name = content.pop("gpu", None)
    if not isinstance(name, str):
        raise InputError(file.place("gpu"), "is missing", "name the GPU as nvidia-smi does")
    for key in content:
        if key not in _FACTS:
            raise unknown_name(file.place(key), "fact", key, _FACTS)
    required = (key for key, default in _FACTS.items() if default is not None)
    if missing := next((key for key in required if key not in content), None):
        remedy = "add {value: ..., source: ...}; nothing is guessed"
        raise InputError(file.place(missing), "is missing", remedy)
    facts = {key: _fact(file.place(key), found) for key, found in content.items()}
    sources = {key: source for key, (_, source) in facts.items()}
    values: dict[str, Any] = {key: value for key, (value, _) in facts.items()}
    return Hardware(name=name, path=path, sources=sources, **values)


def _fact(place: str, found: Any) -> tuple[float, str]:
    if not isinstance(found, Mapping) or set(found) != {"value", "source"}:
        raise InputError(place, f"found {described(found)}, allowed: {{value: ..., source: ...}}")
    value, source = found["value"], found["source"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{place}: value", f"found {described(value)}, allowed: above 0")
    if not isinstance(source, str) or not source.strip():
        raise InputError(f"{place}: source", "is empty", "say where the value is from")
    return float(value), source
