"""The matrix products of a layer's forward, on one rank and for one microbatch.

Counted from `torchtitan/models/deepseek_v3/model/model.py` and `torchtitan/models/moe/moe.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cookbook.config.cell import SAVE_LIST, Cell
from cookbook.predict.shapes import Shapes

_FP8_LINEAR, _MX_LINEAR = "quantize.linear.float8", "quantize.linear.mx"
_SHARED_DOWN = "moe.shared_experts.w2"


@dataclass(frozen=True)
class Product:
    """A matrix product of (rows, inner) with (inner, columns), by the module that makes it."""

    module: str
    rows: float
    columns: int
    inner: int


def attention_products(s: Shapes) -> Iterator[Product]:
    """The projections around attention."""
    queries = s.heads * (s.nope + s.rope)
    if s.q_lora:
        yield Product("attention.wq_a", s.tokens, s.q_lora, s.dim)
        yield Product("attention.wq_b", s.tokens, queries, s.q_lora)
    else:
        yield Product("attention.wq", s.tokens, queries, s.dim)
    yield Product("attention.wkv_a", s.tokens, s.kv_lora + s.rope, s.dim)
    yield Product("attention.wkv_b", s.tokens, s.heads * (s.nope + s.v_head), s.kv_lora)
    yield Product("attention.wo", s.tokens, s.dim, s.heads * s.v_head)


def feed_forward_products(s: Shapes, moe: bool) -> Iterator[Product]:
    """The dense layer's, or the router's and the shared experts'."""
    if moe:
        yield Product("moe.router.gate", s.tokens, s.num_experts, s.dim)
    module = "moe.shared_experts" if moe else "feed_forward"
    hidden = s.shared_hidden if moe else s.dense_hidden
    if hidden:
        yield Product(f"{module}.w1", s.tokens, hidden, s.dim)
        yield Product(f"{module}.w3", s.tokens, hidden, s.dim)
        yield Product(f"{module}.w2", s.tokens, s.dim, hidden)


def expert_products(s: Shapes) -> Iterator[Product]:
    """The routed experts', all groups as one."""
    yield Product("moe.experts", s.rows, s.expert_hidden, s.dim)
    yield Product("moe.experts", s.rows, s.expert_hidden, s.dim)
    yield Product("moe.experts", s.rows, s.dim, s.expert_hidden)


def head_products(s: Shapes) -> Iterator[Product]:
    """The output layer's."""
    yield Product("output", s.tokens, s.vocab, s.dim)


def linear_format(cell: Cell, module: str) -> str | None:
    """The format of a linear layer's GEMMs: `float8` or `mx`; None for BF16."""
    converters = cell.options["model.converters"]
    if cell.emulated:
        return None
    for converter, section, kind in (
        ("quantize.linear.float8", _FP8_LINEAR, "float8"),
        ("quantize.linear.mx", _MX_LINEAR, "mx"),
    ):
        if converter in converters:
            left_out = cell.options[f"{section}.filter_fqns"]
            return None if any(name in module for name in left_out) else kind
    return None


def spared_products(cell: Cell, s: Shapes, moe: bool) -> list[Product]:
    """The dense products of a layer that selective recomputation does not repeat in compiled code.

    Those of the save list's `mm` that are worth their memory, in BF16.
    """
    # TorchTitan's own list names `mm` too, and does not see it in compiled code.
    if not (moe and s.compiled and cell.saves and "mm" in cell.options[SAVE_LIST]):
        return []
    found = (*attention_products(s), *feed_forward_products(s, moe))
    return [one for one in found if one.inner >= s.dim and not linear_format(cell, one.module)]


def saved_products(cell: Cell, s: Shapes, moe: bool) -> list[Product]:
    """Those of them whose outputs it keeps."""
    spared = spared_products(cell, s, moe)
    # Of this one a layer with DeepEP knows that no gradient needs it.
    needless = [_SHARED_DOWN] if s.deepep else []
    return [one for one in spared if one.module not in needless]
