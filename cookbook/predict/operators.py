"""The modules of a layer with their weights, from which all else is counted.

One table, after each family's `model/model.py` and `infra/parallelize.py` of TorchTitan 0.2.2.
Evaluated with the whole model's sizes it gives parameters; with a rank's, its matrix products.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cookbook.base.family import Sizes
from cookbook.config.cell import Cell
from cookbook.config.options import Layout

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Operator:
    """A module's weight; TP cuts `tp_axis`, None for a weight that every TP rank has whole.

    `shape` is (outputs, inputs) of a matrix product, behind the experts where these are grouped.
    """

    module: str
    shape: tuple[int, ...]
    tp_axis: int | None = None

    @property
    def is_expert(self) -> bool:
        """Whether it is one of the routed experts' weights, which EP cuts."""
        return self.module == "moe.experts"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def attention_operators(s: Sizes) -> Iterator[Operator]:
    """Return the projections around attention and the norms of the layer."""
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


def feed_forward_operators(s: Sizes, moe: bool) -> Iterator[Operator]:
    """Return the dense feed-forward network's, or the router's and the shared experts'."""
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


def expert_operators(s: Sizes) -> Iterator[Operator]:
    """Return the routed experts' three grouped products."""
    yield Operator("moe.experts", (s.num_experts, s.expert_hidden, s.dim), 1)
    yield Operator("moe.experts", (s.num_experts, s.expert_hidden, s.dim), 1)
    yield Operator("moe.experts", (s.num_experts, s.dim, s.expert_hidden), 2)


def layer_operators(s: Sizes, moe: bool) -> list[Operator]:
    found = [*attention_operators(s), *feed_forward_operators(s, moe)]
    return [*found, *expert_operators(s)] if moe else found


def embedding_operators(s: Sizes) -> list[Operator]:
    return [Operator("tok_embeddings", (s.vocab, s.dim), 0)]


def head_operators(s: Sizes) -> list[Operator]:
    return [Operator("norm", (s.dim,)), Operator("output", (s.vocab, s.dim), 0)]


@dataclass(frozen=True)
class Unit:
    """An FSDP module, as the first rank of a pipeline stage has it."""

    name: str
    shards: int
    local: int  # elements that the rank stores
    gathered: int  # elements that FSDP gathers over the shards
    bytes: int  # of a stored element

    @property
    def size(self) -> int:
        return self.local * self.bytes


def fsdp_units(
    operators: Iterable[Operator], layout: Layout, layer: int | None = None, *, width: int = 4
) -> list[Unit]:
    """Return the FSDP modules of a layer or of the model's ends; `width`: bytes of an element."""
    units: dict[str, Unit] = {}
    for one in operators:
        name = one.module if layer is None else f"layers.{layer}"
        shape, gathered = list(one.shape), one.numel
        shards, axis, tp = layout.dp_shard * layout.cp, 0, layout.tp
        # Without EP the experts are gathered with their layer.
        if one.is_expert and layout.ep > 1:
            name += ".moe.experts"
            shards = max(shards * layout.tp // (layout.ep * layout.etp), 1)
            # More shards than experts: TorchTitan shards along the next axis.
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
    return list(units.values())


@dataclass(frozen=True)
class Product:
    """A matrix product of (rows, inner) with (inner, columns), by the module that makes it."""

    module: str
    rows: float
    columns: int
    inner: int


def products(operators: Iterable[Operator], rows: float) -> list[Product]:
    """Return the products of `rows` of inputs; norms and biases multiply nothing."""
    return [Product(o.module, rows, *o.shape[-2:]) for o in operators if len(o.shape) > 1]


def linear_format(cell: Cell, module: str) -> str | None:
    """Return the format of a linear layer's GEMMs: `float8` or `mx`; None for BF16."""
    for kind in ("float8", "mx"):
        converter = f"quantize.linear.{kind}"
        is_native = cell.precision not in cell.emulated_parts
        if converter in cell.options["model.converters"] and is_native:
            filtered = cell.options[f"{converter}.filter_fqns"]
            return None if any(name in module for name in filtered) else kind
    return None
