"""The parameters of a DeepSeek-V3 model, and how TP, EP and FSDP cut each of them.

Counted from `models/deepseek_v3/model/model.py` and `infra/parallelize.py` of TorchTitan 0.2.2. A
test holds every rank of many layouts against what TorchTitan itself builds in the fake world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.config.options import Layout

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model; `tp_axis` is the axis that TP cuts, None where it is whole.

    `unit` is the FSDP module that gathers it.
    """

    unit: str
    shape: tuple[int, ...]
    tp_axis: int | None = None
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


def layer_parameters(model: Mapping[str, Any], layer: int) -> Iterator[Parameter]:
    """The parameters of one transformer block."""
    unit, dim = f"layers.{layer}", model["dim"]
    heads, rope, latent = model["n_heads"], model["qk_rope_head_dim"], model["kv_lora_rank"]
    queries = heads * (model["qk_nope_head_dim"] + rope)
    if model["q_lora_rank"]:
        yield Parameter(unit, (model["q_lora_rank"], dim))
        yield Parameter(unit, (model["q_lora_rank"],))
        yield Parameter(unit, (queries, model["q_lora_rank"]), 0)
    else:
        yield Parameter(unit, (queries, dim), 0)
    yield Parameter(unit, (latent + rope, dim))
    yield Parameter(unit, (latent,))
    yield Parameter(unit, (heads * (model["qk_nope_head_dim"] + model["v_head_dim"]), latent), 0)
    yield Parameter(unit, (dim, heads * model["v_head_dim"]), 1)
    yield Parameter(unit, (dim,))
    yield Parameter(unit, (dim,))
    if not is_moe(model, layer):
        yield from _feed_forward(unit, dim, model["inter_dim"])
        return
    experts, hidden = model["moe_args.num_experts"], model["moe_inter_dim"]
    yield Parameter(unit, (experts, dim))
    if model["moe_args.gate_bias"]:
        yield Parameter(unit, (experts,))
    if shared := model["moe_args.num_shared_experts"]:
        yield from _feed_forward(unit, dim, hidden * shared)
    own = f"{unit}.moe.experts"
    yield Parameter(own, (experts, hidden, dim), 1, is_expert=True)
    yield Parameter(own, (experts, dim, hidden), 2, is_expert=True)
    yield Parameter(own, (experts, hidden, dim), 1, is_expert=True)


def is_moe(model: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer has routed experts."""
    return bool(layer >= model["n_dense_layers"])


def embedding_parameters(model: Mapping[str, Any]) -> Iterator[Parameter]:
    """The token embedding."""
    yield Parameter("tok_embeddings", (model["vocab_size"], model["dim"]), 0)


def head_parameters(model: Mapping[str, Any]) -> Iterator[Parameter]:
    """The last norm and the output layer, which are FSDP modules of one group, by two names."""
    yield Parameter("norm", (model["dim"],))
    yield Parameter("output", (model["vocab_size"], model["dim"]), 0)


def _feed_forward(unit: str, dim: int, hidden: int) -> Iterator[Parameter]:
    yield Parameter(unit, (hidden, dim), 0)
    yield Parameter(unit, (dim, hidden), 1)
    yield Parameter(unit, (hidden, dim), 0)


def unit_sizes(
    parameters: Iterable[Parameter], layout: Layout, experts: int
) -> list[dict[str, Any]]:
    """FSDP modules with the elements that the first rank of a stage stores, and gathers.

    Args:
        experts: how many routed experts the model has in a layer.
    """
    units: dict[str, dict[str, Any]] = {}
    for one in parameters:
        # Without EP the experts are gathered with their layer.
        name = one.unit
        if one.is_expert and layout.ep == 1:
            name = name.removesuffix(".moe.experts")
        unit = units.setdefault(
            name, {"name": name, "shards": 1, "local": 0, "gathered": 0, "bytes": _FLOAT32_BYTES}
        )
        local, gathered, shards = _cut(one, layout, experts)
        unit["local"] += local
        unit["gathered"] += gathered
        unit["shards"] = max(unit["shards"], shards)
    return list(units.values())


def _cut(one: Parameter, layout: Layout, experts: int) -> tuple[int, int, int]:
    """Elements stored by the first rank, elements once gathered over FSDP, FSDP's shards."""
    shape, gathered = list(one.shape), one.numel
    shards, axis = layout.dp_shard * layout.cp, 0
    if one.is_expert and layout.ep > 1:
        shards = max(layout.dp_shard * layout.cp * layout.tp // (layout.ep * layout.etp), 1)
        shape[0], gathered = -(-shape[0] // layout.ep), -(-gathered // layout.ep)
        # More shards than experts: TorchTitan shards along the next axis.
        axis = 1 if shards * layout.ep > experts else 0
        tensor_parallel = layout.etp
    else:
        tensor_parallel = layout.tp
    if one.tp_axis is not None and tensor_parallel > 1:
        shape[one.tp_axis] = -(-shape[one.tp_axis] // tensor_parallel)
        gathered = -(-gathered // tensor_parallel)
    shape[axis] = -(-shape[axis] // shards)
    return math.prod(shape), gathered, shards
