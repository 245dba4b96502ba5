"""The weights of a model's modules: the basis for predicted parameters, memory and time.

The weights have the shapes and the TP sharding of TorchTitan 0.2.2, for the cookbook's families.
Called with the sizes of a TP rank, the functions return the shards of that rank.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cookbook.base.family import Sizes
from cookbook.config.cell import Cell
from cookbook.config.facts import Layout

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Operator:
    """An operation with a weight that TP shards along `tp_axis`, or not at all if that is None.

    `shape`: (outputs, inputs) of a matrix product, (experts, outputs, inputs) of a grouped GEMM.
    """

    module: str
    shape: tuple[int, ...]
    tp_axis: int | None = None

    @property
    def is_expert(self) -> bool:
        """Whether the weight belongs to the routed experts, which EP shards."""
        return self.module == "moe.experts"

    @property
    def is_product(self) -> bool:
        """Whether the module multiplies matrices; norms and biases do not."""
        return len(self.shape) > 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def attention(s: Sizes) -> Iterator[Operator]:
    """Return attention's projections, and all norms of the layer."""
    head = s.nope + s.rope
    queries, keys = s.heads * head, s.kv_heads * head
    if not s.kv_lora:
        yield Operator("attention.wq", (queries, s.dim), 0)
        yield Operator("attention.wk", (keys, s.dim), 0)
        yield Operator("attention.wv", (s.kv_heads * s.v_head, s.dim), 0)
        if s.qk_norm:
            yield Operator("attention.q_norm", (head,))
            yield Operator("attention.k_norm", (head,))
    elif s.q_lora:
        yield Operator("attention.wq_a", (s.q_lora, s.dim))
        yield Operator("attention.q_norm", (s.q_lora,))
        yield Operator("attention.wq_b", (queries, s.q_lora), 0)
    else:
        yield Operator("attention.wq", (queries, s.dim), 0)
    if s.kv_lora:
        yield Operator("attention.wkv_a", (s.kv_lora + s.rope, s.dim))
        yield Operator("attention.kv_norm", (s.kv_lora,))
        yield Operator("attention.wkv_b", (s.heads * (s.nope + s.v_head), s.kv_lora), 0)
    yield Operator("attention.wo", (s.dim, s.heads * s.v_head), 1)
    yield Operator("attention_norm", (s.dim,))
    yield Operator("ffn_norm", (s.dim,))


def feed_forward(s: Sizes, moe: bool) -> Iterator[Operator]:
    """Return the operators of a feed-forward network, or of an MoE's router and shared experts."""
    module, hidden = "feed_forward", s.dense_hidden
    if moe:
        module, hidden = "moe.shared_experts", s.shared_hidden
        yield Operator("moe.router.gate", (s.num_experts, s.dim))
        if s.gate_bias:
            yield Operator("moe.router.gate", (s.num_experts,))
    if hidden:
        yield Operator(f"{module}.w1", (hidden, s.dim), 0)
        yield Operator(f"{module}.w3", (hidden, s.dim), 0)
        yield Operator(f"{module}.w2", (s.dim, hidden), 1)


def experts(s: Sizes) -> Iterator[Operator]:
    """Return the three grouped GEMMs of the routed experts."""
    yield Operator("moe.experts", (s.num_experts, s.expert_hidden, s.dim), 1)
    yield Operator("moe.experts", (s.num_experts, s.expert_hidden, s.dim), 1)
    yield Operator("moe.experts", (s.num_experts, s.dim, s.expert_hidden), 2)


def layer(s: Sizes, moe: bool) -> list[Operator]:
    found = [*attention(s), *feed_forward(s, moe)]
    return [*found, *experts(s)] if moe else found


def embedding(s: Sizes) -> list[Operator]:
    return [Operator("tok_embeddings", (s.vocab, s.dim), 0)]


def head(s: Sizes) -> list[Operator]:
    return [Operator("norm", (s.dim,)), Operator("output", (s.vocab, s.dim), 0)]


@dataclass(frozen=True)
class Unit:
    """An FSDP module, and the size of one rank's shard of it."""

    name: str
    shards: int
    local: int  # elements that the rank stores
    gathered: int  # elements of the module once FSDP has gathered its shards
    bytes: int  # bytes per stored element

    @property
    def size(self) -> int:
        return self.local * self.bytes


def fsdp_units(
    operators: Iterable[Operator], layout: Layout, *, in_layer: bool = False, width: int = 4
) -> tuple[Unit, ...]:
    """Group `operators`, which have the shapes of unsharded weights, into FSDP modules."""
    units: dict[str, Unit] = {}
    for one in operators:
        name = "layer" if in_layer else one.module
        shape, gathered = list(one.shape), one.numel
        shards, axis, tp = layout.dp_shard * layout.cp, 0, layout.tp
        # Without EP the experts belong to the FSDP module of their layer.
        if one.is_expert and layout.ep > 1:
            name += ".moe.experts"
            shards = max(shards * layout.tp // (layout.ep * layout.etp), 1)
            # If there are more shards than experts, TorchTitan shards along the next axis.
            axis, tp = int(shards * layout.ep > shape[0]), layout.etp
            shape[0], gathered = -(-shape[0] // layout.ep), -(-gathered // layout.ep)
        if one.tp_axis is not None:
            shape[one.tp_axis] = -(-shape[one.tp_axis] // tp)
            gathered = -(-gathered // tp)
        shape[axis] = -(-shape[axis] // shards)
        local = math.prod(shape)
        if unit := units.get(name):
            local, gathered = unit.local + local, unit.gathered + gathered
        units[name] = Unit(name, shards, local, gathered, width)
    return tuple(units.values())


def gemm_format(cell: Cell, operator: Operator) -> str | None:
    """Return the format of an operator's quantized GEMMs, such as `float8`; None means BF16."""
    if operator.is_expert:
        active = cell.precision.expects("grouped_gemms")
        return None if active == "bf16" or cell.emulated else active
    linear = [one for one in cell.facts.quantizes if one.gemms == "linear_layers"]
    if not linear or cell.precision in cell.emulated_parts:
        return None
    # The rules refuse a cell with two formats.
    (one, *_) = linear
    is_left_out = any(name in operator.module for name in cell.options[one.filter])
    return None if is_left_out else one.format
