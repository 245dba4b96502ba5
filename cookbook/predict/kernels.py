"""How long the kernels of a layer run, by kind, in milliseconds of one microbatch.

A matrix product takes its FLOPs over a share of the peak, or its bytes over the memory's bandwidth,
whichever is longer; every other pass takes its bytes. docs/reference/models.md has each count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cookbook.config.cell import EP_CHUNKS, Cell
from cookbook.predict.facts import Hardware
from cookbook.predict.operators import (
    Operator,
    Product,
    expert_operators,
    feed_forward_operators,
    linear_format,
    products,
)
from cookbook.predict.rank import Rank
from cookbook.predict.shapes import Shapes

# Milliseconds by kind; the kinds are those of `submit.py profile`.
Terms = dict[str, float]
ATTENTION, GROUPED, DENSE = "attention", "grouped GEMMs", "dense GEMMs"
ROWS, LOSS, POINTWISE, QUANTIZING = "moving rows", "loss", "pointwise", "quantizing"


def add(*terms: Mapping[str, float]) -> Terms:
    """Return the sums, kind by kind."""
    total: Counter[str] = Counter()
    for one in terms:
        total.update(one)
    return dict(total)


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    """Return each kind `factor` times."""
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
        """The number of parts into which a layer of routed experts cuts its tokens."""
        return int(self.cell.options[EP_CHUNKS])

    def bytes_ms(self, size: float) -> float:
        """Return the time in which the memory reads or writes `size` bytes."""
        hw = self.hardware
        return size / (hw.memory_bandwidth_gb_per_s * hw.memory_bandwidth_share * 1e6)

    def dense(self, operators: Iterable[Operator], backward: bool) -> Terms:
        """Time linear layers: the forward, or both products of the backward."""
        return self.multiply(products(operators, self.shapes.tokens), backward)

    def multiply(self, some: Iterable[Product], backward: bool) -> Terms:
        """Time products of linear layers, like `dense`."""
        share = self.hardware.dense_gemm_share
        return add(
            *(
                self._product(one, DENSE, share, linear_format(self.cell, one.module), backward)
                for one in some
            )
        )

    def shared_halves_ms(self, backward: bool) -> tuple[float, float]:
        """Return the shared experts' parts before and behind the routed ones in the forward."""
        found = [
            sum(self.dense([one], backward).values())
            for one in feed_forward_operators(self.shapes, moe=True)
            if one.module.startswith("moe.shared_experts")
        ]
        return sum(found[:2]), sum(found[2:])

    @cached_property
    def _expert_products(self) -> list[Product]:
        """The routed experts' products, all groups as one."""
        return products(expert_operators(self.shapes), self.shapes.rows)

    @property
    def _expert_weights(self) -> int:
        """Elements of the routed experts that the rank has."""
        one_group = sum(one.columns * one.inner for one in self._expert_products)
        return one_group * (self.shapes.num_experts // self.shapes.ep)

    def experts(self, backward: bool) -> Terms:
        """Time grouped GEMMs, in as many chunks as the layer cuts its tokens into."""
        active = self.cell.precision.expects("grouped_gemms")
        share = self.hardware.grouped_gemm_share
        kind = None if active == "bf16" or self.cell.emulated else active
        # Weights are read, and quantized, for each chunk.
        groups = self.shapes.num_experts // self.shapes.ep * self.chunks
        terms = add(
            *(
                self._product(one, GROUPED, share, kind, backward, groups)
                for one in self._expert_products
            )
        )
        if backward and self.chunks > 1:
            # The gradients of the weights, one chunk's added to another's.
            added = 3.0 * self.shapes.act * self._expert_weights * (self.chunks - 1)
            terms = add(terms, {POINTWISE: self.bytes_ms(added)})
        return terms

    def _product(
        self,
        one: Product,
        kind: str,
        share: float,
        quantized: str | None,
        backward: bool,
        groups: int = 1,
    ) -> Terms:
        hw = self.hardware
        flops = 2.0 * one.rows * one.columns * one.inner
        inputs, outputs = one.rows * one.inner, one.rows * one.columns
        weights = one.columns * one.inner * groups
        slow = hw.bf16_peak_tflops * share * 1e9
        fast = hw.fp8_peak_tflops * hw.fp8_gemm_share * 1e9
        count = 2 if backward else 1
        bytes_ms = self.bytes_ms(count * self.shapes.act * (inputs + weights + outputs))
        if quantized is None:
            return {kind: max(count * flops / slow, bytes_ms)}
        gemm, elements = flops / fast, inputs + weights
        if backward:
            # The gradient along both axes, weights and inputs along the other one.
            gemm, elements = 2 * flops / fast, 2 * outputs + weights + inputs
            if quantized.endswith("wgrad_with_hp"):
                gemm, elements = flops / fast + flops / slow, outputs + weights
        is_mx = quantized.startswith("mx")
        per_element = hw.mxfp8_quantize_bytes if is_mx else hw.float8_quantize_bytes
        return {
            kind: max(gemm, bytes_ms / 2),
            QUANTIZING: self.bytes_ms(per_element * elements),
        }

    def attend(self, backward: bool) -> Terms:
        """Time attention itself: two products forward, five backward, over attended tokens."""
        s, hw = self.shapes, self.hardware
        if self.cell.uses_flash_attention:
            waste = hw.flash_attention_4_waste_tokens
            rates = hw.flash_attention_4_forward_tflops, hw.flash_attention_4_backward_tflops
        else:
            waste = hw.flex_attention_waste_tokens
            rates = hw.flex_attention_forward_tflops, hw.flex_attention_backward_tflops
        head = s.nope + s.rope
        widths = 3 * head + 2 * s.v_head if backward else head + s.v_head
        flops = 2.0 * s.tokens * s.heads * widths * (self.attended_tokens + waste)
        return {ATTENTION: flops / (rates[backward] * 1e9)}

    def pointwise(self, moe: bool, backward: bool) -> Terms:
        """Time norms, residuals, rotary embedding, copies around attention, SwiGLU, the router."""
        s = self.shapes
        queries, keys = (heads * (s.nope + s.rope) for heads in (s.heads, s.kv_heads))
        normed = s.q_lora + s.kv_lora + (queries + keys) * s.qk_norm
        # Each norm and each residual reads and writes the hidden states.
        elements = 8.0 * s.sequence_tokens * s.dim
        elements += 2.0 * s.tokens * (normed + queries + keys + s.heads * s.v_head)
        elements += 3.0 * s.tokens * (s.shared_hidden if moe else s.dense_hidden)
        router = 0.0
        if moe:
            elements += 3.0 * s.rows * s.expert_hidden + 3 * s.sequence_tokens * s.dim
            router = 4.0 * 8 * s.tokens * s.num_experts
        factor = 5 / 3 if backward else 1
        size = factor * (s.act * elements + router)
        if s.autocast:
            # A rank alone has hidden states in FP32, and casts its experts' weights each way.
            size += factor * 2 * (11 if moe else 8) * s.sequence_tokens * s.dim
            size += 6.0 * self._expert_weights * moe
        return {POINTWISE: self.bytes_ms(size)}

    def move_rows(self, backward: bool) -> Terms:
        """Time rows brought into the experts' order and back, without their exchange."""
        s, hw = self.shapes, self.hardware
        rows = float(s.act * s.rows * s.dim)
        sent = float(s.act * s.sent_rows * s.dim)
        added_ms = 0.0
        if s.deepep:
            received = s.act * s.sent_tokens * s.ranks_per_token * s.dim
            # The gradient of the scores of outputs reads these and their gradients.
            dotted = 2 * rows if backward and not s.scored_activations else 0
            moved = 2 * (rows + received) + dotted
            if backward and self.is_released:
                added_ms = rows / (hw.released_deepep_rows_gb_per_s * 1e6)
        elif s.row_kernels:
            # Each token is read once, each row written once, and the other way round; with EP they
            # are sorted once more where they arrive, and the weights are laid side by side.
            tokens = float((4 if s.autocast else s.act) * s.sent_tokens * s.dim)
            moved = 2 * (sent + 2 * tokens) + (4 * rows if s.ep > 1 else 0.0)
        else:
            # Under TP each rank fills the rows of all tokens, most of them with zeros.
            every = float(s.act * s.tokens * s.top_k * s.dim)
            # Gathered from the tokens, into the experts' order and out of it; then zeros, the rows
            # put into these, all of it turned to FP32 (twice the bytes) and multiplied by the
            # scores.
            moved = 4 * sent + 4 * rows + 6 * every
            if backward:
                # The gradient of a gather adds rows to tokens, one after another.
                added_ms = sent / (hw.scatter_add_gb_per_s * 1e6)
        return {ROWS: self.bytes_ms(moved) + added_ms}

    def loss(self) -> Terms:
        """Time softmax and its gradient, forward and backward together."""
        s = self.shapes
        passes = 4 * s.act if s.loss_compiled else 20
        return {LOSS: self.bytes_ms(float(passes) * s.tokens * s.vocab)}

    def optimizer(self, rank: Rank) -> float:
        """Time norm, clipping and Adam: 40 bytes for each parameter that the rank stores."""
        return self.bytes_ms(40.0 * rank.local_parameters)

    def copies(self, rank: Rank, gathers: int, reduces: int) -> float:
        """Time FSDP's casts and packing, for so many gathers and reductions of every unit."""
        if not rank.mixed_precision:
            return 0.0
        local, gathered = rank.local_parameters, sum(part.gathered for part in rank.parts)
        size = gathers * (6.0 * local + 4 * gathered) + reduces * (6.0 * gathered + 8 * local)
        return self.bytes_ms(size)

    def kept_gradients_ms(self, rank: Rank) -> float:
        """Time adding a pipeline microbatch's BF16 gradients to the sum, which is not sharded."""
        if not rank.mixed_precision:
            return 0.0
        return self.bytes_ms(10.0 * sum(part.gathered for part in rank.parts))
