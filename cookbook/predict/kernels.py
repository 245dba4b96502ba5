"""How long the kernels of a layer run, by kind, in milliseconds of one microbatch.

A matrix product takes its FLOPs over a share of the peak, or its bytes over the memory's bandwidth,
whichever is longer; every other pass takes its bytes. docs/time.md says how each is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.config.cell import EP_CHUNKS, Cell
from cookbook.predict.hardware import Hardware
from cookbook.predict.operators import (
    Product,
    expert_products,
    feed_forward_products,
    linear_format,
)
from cookbook.predict.shapes import Shapes

# Milliseconds by kind; the kinds are those of `submit.py profile`.
Terms = dict[str, float]
ATTENTION, GROUPED, DENSE = "attention", "grouped GEMMs", "dense GEMMs"
ROWS, LOSS, POINTWISE, QUANTIZING = "moving rows", "loss", "pointwise", "quantizing"


def add(*terms: Mapping[str, float]) -> Terms:
    """The sums, kind by kind."""
    total: Terms = {}
    for one in terms:
        for kind, time_ms in one.items():
            total[kind] = total.get(kind, 0.0) + time_ms
    return total


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    """Each kind, `factor` times."""
    return {kind: factor * time_ms for kind, time_ms in terms.items()}


@dataclass(frozen=True)
class Kernels:
    """The kernels of a cell's layers on a GPU.

    Attributes:
        attended_tokens: of a token on the slowest rank, on average.
    """

    cell: Cell
    hardware: Hardware
    shapes: Shapes
    attended_tokens: float

    @property
    def is_released(self) -> bool:
        """Whether TorchTitan runs as it was released, without the cookbook's corrections."""
        return self.cell.hooks != self.cell.options.stack.hooks

    @property
    def chunks(self) -> int:
        """Into how many parts a layer of routed experts cuts its tokens."""
        return int(self.cell.options[EP_CHUNKS])

    def dense(self, products: Iterable[Product], backward: bool) -> Terms:
        """Linear layers: the forward, or both products of the backward."""
        found = []
        for one in products:
            quantized = linear_format(self.cell, one.module)
            found.append(self._product(one, DENSE, quantized, backward))
        return add(*found)

    def shared_halves_ms(self, backward: bool) -> tuple[float, float]:
        """The shared experts: what computes before the routed ones in the forward, and behind."""
        found = [
            sum(self.dense([one], backward).values())
            for one in feed_forward_products(self.shapes, moe=True)
            if one.module.startswith("moe.shared_experts")
        ]
        return sum(found[:2]), sum(found[2:])

    def experts(self, backward: bool) -> Terms:
        """Grouped GEMMs, in as many chunks as the layer cuts its tokens into."""
        active = self.cell.precision.expects("grouped_gemms")
        kind = None if active == "bf16" or self.cell.emulated else active
        terms = add(
            *(self._product(p, GROUPED, kind, backward) for p in expert_products(self.shapes))
        )
        if backward and self.chunks > 1:
            # The gradients of the weights, one chunk's added to another's.
            weights = sum(
                one.columns * one.inner * self._groups(one) for one in expert_products(self.shapes)
            )
            added = 3.0 * self.shapes.act * weights * (self.chunks - 1)
            terms = add(terms, {POINTWISE: self.bytes_ms(added)})
        return terms

    def _product(self, one: Product, kind: str, quantized: str | None, backward: bool) -> Terms:
        hw, act = self.hardware, self.shapes.act
        flops = 2.0 * one.rows * one.columns * one.inner
        inputs, outputs = one.rows * one.inner, one.rows * one.columns
        weights = one.columns * one.inner * self._groups(one)
        if kind == GROUPED:
            # Read, and quantized, for each chunk.
            weights *= self.chunks
        share = hw.grouped_gemm_share if kind == GROUPED else hw.dense_gemm_share
        slow = hw.bf16_peak_tflops * share * 1e9
        fast = hw.fp8_peak_tflops * hw.fp8_gemm_share * 1e9
        count = 2 if backward else 1
        bytes_ms = self.bytes_ms(count * act * (inputs + weights + outputs))
        if quantized is None:
            return {kind: max(count * flops / slow, bytes_ms)}
        per_element = (
            hw.mxfp8_quantize_bytes if quantized.startswith("mx") else hw.float8_quantize_bytes
        )
        gemm, elements = flops / fast, inputs + weights
        if backward:
            # The gradient along both axes, weights and inputs along the other one.
            gemm, elements = 2 * flops / fast, 2 * outputs + weights + inputs
            if quantized.endswith("wgrad_with_hp"):
                gemm, elements = flops / fast + flops / slow, outputs + weights
        return {
            kind: max(gemm, bytes_ms / 2),
            QUANTIZING: self.bytes_ms(per_element * elements),
        }

    def _groups(self, one: Product) -> int:
        return self.shapes.num_experts // self.shapes.ep if one.module == "moe.experts" else 1

    def attend(self, backward: bool) -> Terms:
        """Attention itself: two products forward, five backward, over what tokens attend to."""
        s, hw = self.shapes, self.hardware
        flash = self.cell.uses_flash_attention
        waste = hw.flash_attention_4_waste_tokens if flash else hw.flex_attention_waste_tokens
        attended = self.attended_tokens + waste
        head = s.nope + s.rope
        products = 3 * head + 2 * s.v_head if backward else head + s.v_head
        flops = 2.0 * s.tokens * s.heads * products * attended
        if flash:
            forward, again = (
                hw.flash_attention_4_forward_tflops,
                hw.flash_attention_4_backward_tflops,
            )
        else:
            forward, again = hw.flex_attention_forward_tflops, hw.flex_attention_backward_tflops
        return {ATTENTION: flops / ((again if backward else forward) * 1e9)}

    def pointwise(self, moe: bool, backward: bool) -> Terms:
        """Norms, residuals, rotary embedding, copies around attention, SwiGLU, the router."""
        s = self.shapes
        queries = s.heads * (s.nope + s.rope)
        hidden = s.shared_hidden + 0.0 if moe else float(s.dense_hidden)
        # Each norm and each residual reads and writes the hidden states.
        elements = 8.0 * s.sequence_tokens * s.dim
        elements += 2.0 * s.tokens * (s.q_lora + s.kv_lora)
        elements += 2.0 * s.tokens * (2 * queries + s.heads * s.v_head)
        elements += 3 * s.tokens * hidden
        router = 0.0
        if moe:
            elements += 3.0 * s.rows * s.expert_hidden + 3 * s.sequence_tokens * s.dim
            router = 4.0 * 8 * s.tokens * s.num_experts
        factor = 5 / 3 if backward else 1
        size = factor * (s.act * elements + router)
        if s.autocast:
            # A rank alone has hidden states in FP32, and casts its experts' weights each way.
            size += factor * 2 * (11 if moe else 8) * s.sequence_tokens * s.dim
            weights = sum(one.columns * one.inner * self._groups(one) for one in expert_products(s))
            size += 6.0 * weights if moe else 0.0
        return {POINTWISE: self.bytes_ms(size)}

    def move_rows(self, backward: bool) -> Terms:
        """Rows brought into the experts' order and back, without their exchange."""
        s = self.shapes
        rows = float(s.act * s.rows * s.dim)
        if s.deepep:
            received = s.act * s.sent_tokens * s.ranks_per_token * s.dim
            # The gradient of the scores of outputs reads these and their gradients.
            dotted = 2 * rows if backward and not s.scored_activations else 0
            moved = 2 * (rows + received) + dotted
            time_ms = self.bytes_ms(moved)
            if backward and self.is_released:
                time_ms += rows / (self.hardware.released_deepep_rows_gb_per_s * 1e6)
            return {ROWS: time_ms}
        sent = float(s.act * s.sent_rows * s.dim)
        if s.row_kernels:
            # Each token is read once, each row written once, and the other way round; with EP they
            # are sorted once more where they arrive, and the weights are laid side by side.
            tokens = float((4 if s.autocast else s.act) * s.sent_tokens * s.dim)
            moved = 2 * (sent + 2 * tokens) + (4 * rows if s.ep > 1 else 0.0)
            return {ROWS: self.bytes_ms(moved)}
        # Under TP each rank fills the rows of all tokens, most of them with zeros.
        every = float(s.act * s.tokens * s.top_k * s.dim)
        # Gathered from the tokens, into the experts' order and out of it; then zeros, the rows put
        # into these, all of it turned to FP32 (twice the bytes) and multiplied by the scores.
        moved = 2 * sent + 4 * rows + every + 2 * sent + 3 * every + 2 * every
        time_ms = self.bytes_ms(moved)
        if backward:
            # The gradient of a gather adds rows to tokens, one after another.
            time_ms += sent / (self.hardware.scatter_add_gb_per_s * 1e6)
        return {ROWS: time_ms}

    def loss(self) -> Terms:
        """Softmax and its gradient, forward and backward together."""
        s = self.shapes
        passes = 4 * s.act if s.loss_compiled else 20
        return {LOSS: self.bytes_ms(float(passes) * s.tokens * s.vocab)}

    def optimizer(self, view: Mapping[str, Any]) -> float:
        """Norm, clipping and Adam: 40 bytes for each parameter that the rank stores."""
        local = sum(unit["local"] for part in view["parts"] for unit in part["units"])
        return self.bytes_ms(40.0 * local)

    def copies(self, view: Mapping[str, Any], gathers: int, reduces: int) -> float:
        """FSDP's casts and packing, for so many gathers and reductions of every unit."""
        if not view["mixed_precision"]:
            return 0.0
        units = [unit for part in view["parts"] for unit in part["units"]]
        local = float(sum(unit["local"] for unit in units))
        gathered = float(sum(unit["gathered"] for unit in units))
        return self.bytes_ms(
            gathers * (6 * local + 4 * gathered) + reduces * (6 * gathered + 8 * local)
        )

    def bytes_ms(self, size: float) -> float:
        """The time in which the memory reads or writes `size` bytes."""
        hw = self.hardware
        return size / (hw.memory_bandwidth_gb_per_s * hw.memory_bandwidth_share * 1e6)
