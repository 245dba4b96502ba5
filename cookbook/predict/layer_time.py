"""The time of a layer: its kernels by kind, its exchanges and its recomputation, in milliseconds.

A matrix product takes its FLOPs over a share of the peak, or its bytes over the memory's bandwidth,
whichever is longer; every other pass takes its bytes. docs/reference/models.md has each count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cookbook.config.cell import EP_CHUNKS, Cell
from cookbook.predict.facts import Hardware
from cookbook.predict.operators import (
    Operator,
    Product,
    attention_operators,
    expert_operators,
    feed_forward_operators,
    head_operators,
    linear_format,
    products,
)
from cookbook.predict.rank import Layer, Part, Rank, model_of
from cookbook.predict.shapes import Shapes, spared_products
from cookbook.predict.traffic import Links

# Milliseconds by kind; the kinds are those of `submit.py profile`.
Terms = dict[str, float]
ATTENTION, GROUPED, DENSE = "attention", "grouped GEMMs", "dense GEMMs"
ROWS, LOSS, POINTWISE, QUANTIZING = "moving rows", "loss", "pointwise", "quantizing"


def add(*terms: Mapping[str, float]) -> Terms:
    total: Counter[str] = Counter()
    for one in terms:
        total.update(one)
    return dict(total)


def scaled(terms: Mapping[str, float], factor: float) -> Terms:
    return {kind: factor * time_ms for kind, time_ms in terms.items()}


@dataclass(frozen=True)
class Kernels:
    """The kernels of a cell's layers; a token of the slowest rank attends to `attended_tokens`."""

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
        formats = ((one, linear_format(self.cell, one.module)) for one in some)
        return add(*(self._product(one, DENSE, kind, backward) for one, kind in formats))

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
        kind = None if active == "bf16" or self.cell.emulated else active
        # Weights are read, and quantized, for each chunk.
        groups = self.shapes.num_experts // self.shapes.ep * self.chunks
        products = self._expert_products
        terms = add(*(self._product(one, GROUPED, kind, backward, groups) for one in products))
        if backward and self.chunks > 1:
            # The gradients of the weights, one chunk's added to another's.
            added = 3.0 * self.shapes.act * self._expert_weights * (self.chunks - 1)
            terms = add(terms, {POINTWISE: self.bytes_ms(added)})
        return terms

    def _product(
        self, one: Product, kind: str, quantized: str | None, backward: bool, groups: int = 1
    ) -> Terms:
        hw = self.hardware
        flops = 2.0 * one.rows * one.columns * one.inner
        inputs, outputs = one.rows * one.inner, one.rows * one.columns
        weights = one.columns * one.inner * groups
        share, fp8_share = hw.dense_gemm_share, hw.fp8_dense_gemm_share
        if kind == GROUPED:
            share, fp8_share = hw.grouped_gemm_share, hw.fp8_grouped_gemm_share
        slow = hw.bf16_peak_tflops * share * 1e9
        fast = hw.fp8_peak_tflops * fp8_share * 1e9
        count = 2 if backward else 1
        bytes_ms = self.bytes_ms(count * self.shapes.act * (inputs + weights + outputs))
        if quantized is None:
            return {kind: max(count * flops / slow, bytes_ms)}
        gemm, rows = flops / fast, inputs
        if backward:
            # The gradient along both axes, weights and inputs along the other one.
            gemm, rows = 2 * flops / fast, 2 * outputs + inputs
            if quantized.endswith("wgrad_with_hp"):
                gemm, rows = flops / fast + flops / slow, outputs
        per_row, per_weight = hw.float8_quantize_bytes, hw.float8_quantize_weight_bytes
        if quantized.startswith("mx"):
            per_row = per_weight = hw.mxfp8_quantize_bytes
        quantizing_ms = self.bytes_ms(per_row * rows + per_weight * weights)
        return {kind: max(gemm, bytes_ms / 2), QUANTIZING: quantizing_ms}

    def attend(self, backward: bool) -> Terms:
        """Time attention itself: two products forward, five backward, over attended tokens."""
        s, hw = self.shapes, self.hardware
        head = s.nope + s.rope
        kernel = kind = "flash_attention_4"
        if not self.cell.uses_flash_attention:
            kernel = kind = "sdpa" if model_of(self.cell).attn_type == "sdpa" else "flex_attention"
        elif head == s.v_head == 128:
            kind = f"{kernel}_128"
        # SDPA's rates were measured with all that it wastes.
        waste = getattr(hw, f"{kernel}_waste_tokens", 0.0)
        rate = getattr(hw, f"{kind}_{'backward' if backward else 'forward'}_tflops")
        widths = 3 * head + 2 * s.v_head if backward else head + s.v_head
        flops = 2.0 * s.tokens * s.heads * widths * (self.attended_tokens + waste)
        return {ATTENTION: flops / (rate * 1e9)}

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
            # Gathers: tokens to rows, rows to expert order and back. Then zero-fill, scatter the
            # rows, cast to FP32 (twice the bytes) and multiply by the scores.
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

    def copies(self, rank: Rank, gathers: int, reduces: int, sums: int) -> float:
        """Time FSDP's casts and packing, for so many gathers and reductions of every unit.

        BF16 gradients are added `sums` times to those of a pipeline, which are not sharded.
        """
        if not rank.mixed_precision:
            return 0.0
        local, gathered = rank.local_parameters, sum(part.gathered for part in rank.parts)
        size = gathers * (6.0 * local + 4 * gathered) + reduces * (6.0 * gathered + 8 * local)
        return self.bytes_ms(size + sums * 10.0 * gathered)


EP, TP, HOST = "EP, exposed", "TP, exposed", "host"
_MODE = "activation_checkpoint.mode"
# Hidden states are gathered or reduced over TP this often in a layer's forward. A backward gathers
# twice, sums over all of them once, a reduction and a gather, and with DeepEP reduces once.
# (As profiled it summed three times: eight, of which three were hidden.)
_TP_FORWARD, _TP_BACKWARD = 4, 5
# Compiled attention gathers its input once more where a layer is recomputed, whatever is saved.
_TP_COMPILED = 1


@dataclass(frozen=True)
class RoutedLayer:
    """One pass through a layer whose experts compute beside its exchanges; milliseconds.

    DeepEP's exchanges run one after another on a stream of their own, each when its rows are there
    (`titan/tt_0_2_2/deepep.py`).
    """

    exchange_ms: float  # one exchange of one chunk
    experts_ms: float  # the routed experts, all chunks
    first_ms: float  # the shared experts before the routed ones, in the forward
    second_ms: float  # and behind them
    chunks: int  # the number of parts into which the tokens are cut

    def forward_wait_ms(self) -> float:
        computed_ms, sent_ms = self.first_ms, 0.0
        for chunk in range(self.chunks):
            sent_ms += self.exchange_ms
            arrived_ms = sent_ms
            if chunk:
                # The last chunk goes back behind this one's dispatch.
                sent_ms = max(sent_ms, computed_ms) + self.exchange_ms
            computed_ms = max(computed_ms, arrived_ms) + self.experts_ms / self.chunks
        sent_ms = max(sent_ms, computed_ms) + self.exchange_ms
        end_ms = max(sent_ms, computed_ms + self.second_ms)
        return end_ms - self.first_ms - self.experts_ms - self.second_ms

    def backward_wait_ms(self, before_ms: float = 0.0) -> float:
        """Return how long a backward waits; gradients are sent while it recomputes `before_ms`."""
        sent_ms = self.chunks * self.exchange_ms
        computed_ms = before_ms + self.second_ms
        for chunk in range(self.chunks):
            arrived_ms = (chunk + 1) * self.exchange_ms
            computed_ms = max(computed_ms, arrived_ms) + self.experts_ms / self.chunks
            sent_ms = max(sent_ms, computed_ms) + self.exchange_ms
        end_ms = max(sent_ms, computed_ms + self.first_ms)
        return end_ms - before_ms - self.first_ms - self.experts_ms - self.second_ms


class LayerTimes:
    """The times of a cell's layers; all layers of a kind take the same."""

    def __init__(self, cell: Cell, kernels: Kernels, links: Links, overlapped: bool = True) -> None:
        self._cell, self._kernels, self._links = cell, kernels, links
        s = kernels.shapes
        self._overlapped = overlapped and s.deepep and s.ep > 1 and not kernels.is_released
        self._exchange_ms = links.expert_exchanges_ms()
        self._tensor_ms = links.nccl_ms(links.tensor())
        # One layer of each kind, dense and with routed experts; a backward without recomputation.
        self._forward = {moe: self._compute(moe, False) for moe in (False, True)}
        self._backward = {moe: self._compute(moe, True) for moe in (False, True)}
        # The GPU waits while the host reads the number of received rows.
        host_ms = kernels.hardware.host_ms_per_routed_layer if cell.layout.ep > 1 else 0.0
        self._forward[True] = add(self._forward[True], {EP: self._sent_ms(False), HOST: host_ms})

    def _compute(self, moe: bool, backward: bool) -> Terms:
        """Time a layer's kernels and its exchanges over TP."""
        k = self._kernels
        terms = [
            k.dense(attention_operators(k.shapes), backward),
            k.attend(backward),
            k.dense(feed_forward_operators(k.shapes, moe), backward),
            k.pointwise(moe, backward),
            {TP: (_TP_BACKWARD if backward else _TP_FORWARD) * self._tensor_ms},
        ]
        return add(*terms, *([k.experts(backward), k.move_rows(backward)] if moe else []))

    def _sent_ms(self, backward: bool, before_ms: float = 0.0) -> float:
        """Return how long a layer waits for its exchanges, and how much its compute loses."""
        if not self._overlapped:
            return self._exchange_ms
        k = self._kernels
        experts_ms = sum(add(k.experts(backward), k.move_rows(backward)).values())
        chunk_ms = self._links.deepep_ms(k.chunks)
        shared_ms = [
            sum(k.dense([one], backward).values())
            for one in feed_forward_operators(k.shapes, moe=True)
            if one.module.startswith("moe.shared_experts")
        ]
        halves_ms = sum(shared_ms[:2]), sum(shared_ms[2:])
        layer = RoutedLayer(chunk_ms, experts_ms, *halves_ms, k.chunks)
        wait_ms = layer.backward_wait_ms(before_ms) if backward else layer.forward_wait_ms()
        hidden_ms = 2 * k.chunks * chunk_ms - wait_ms
        return wait_ms + hidden_ms * (1 / k.hardware.compute_beside_deepep_share - 1)

    def _backward_of(self, layer: Layer) -> Terms:
        """Return a backward with all that is computed and sent again."""
        again = self.again(layer.moe, layer.recomputed)
        terms = add(self._backward[layer.moe], again)
        if not layer.moe:
            return terms
        # The first gradients are sent before the forward is recomputed, which is all at once.
        whole = layer.recomputed and self._cell.options[_MODE] != "memory_budget"
        return add(terms, {EP: self._sent_ms(True, _computed(again) if whole else 0.0)})

    def again(self, moe: bool, recomputed: bool) -> Terms:
        """Return the part of a layer's forward that its backward computes and sends again."""
        terms, options, k = self._forward[moe], self._cell.options, self._kernels
        if options[_MODE] == "memory_budget":
            # The compiler keeps activations up to the budget, in compiled code alone. No gradient
            # needs the last of the experts' three products.
            shares = {ATTENTION: 1, DENSE: 1, POINTWISE: 1, GROUPED: 2 / 3, QUANTIZING: 2 / 3}
            again = {kind: share * terms[kind] for kind, share in shares.items() if kind in terms}
            return scaled(again, 1 - options["activation_checkpoint.memory_budget"])
        if not recomputed:
            return {}
        saved, spared = self._cell.saves, set()
        # In compiled code the list sees FlashAttention-4, exchanges, grouped and dense GEMMs.
        if "attention" in saved and self._cell.uses_flash_attention:
            spared.add(ATTENTION)
        if "communication" in saved:
            spared |= {EP, HOST}
            terms = {**terms, TP: _TP_COMPILED * self._tensor_ms}
        dense = k.multiply(spared_products(self._cell, k.shapes, moe), False)
        terms = add(terms, scaled(dense, -1))
        if "grouped_mm" in saved:
            spared |= {GROUPED, QUANTIZING}
        again = {kind: time_ms for kind, time_ms in terms.items() if kind not in spared}
        if moe and k.shapes.scored_activations:
            # Two of three products, and rows on their way to the experts alone.
            parts = {GROUPED: 2 / 3, ROWS: 1 / 2, EP: 1 / 2}
            again = {kind: parts.get(kind, 1) * time_ms for kind, time_ms in again.items()}
        return again

    def part(self, part: Part) -> tuple[Terms, Terms]:
        """Time a microbatch through a part: forward, and backward with recomputation."""
        k, tensor = self._kernels, {TP: self._tensor_ms}
        forward = [self._forward[layer.moe] for layer in part.layers]
        backward = [self._backward_of(layer) for layer in part.layers]
        ends = [tensor] * (part.head + part.embedding)
        if part.head:
            head = head_operators(k.shapes)
            forward += [k.dense(head, False), k.loss()]
            backward.append(k.dense(head, True))
        return add(*forward, *ends), add(*backward, *ends)

    def recompute_ms(self, part: Part) -> float:
        """Return how long a microbatch computes and sends again in a part."""
        return sum(sum(self.again(layer.moe, layer.recomputed).values()) for layer in part.layers)

    def compute_ms(self, layer: Layer) -> tuple[float, float]:
        """Return a layer's compute time, forward and backward, without exchanges."""
        return _computed(self._forward[layer.moe]), _computed(self._backward_of(layer))


def _computed(terms: Mapping[str, float]) -> float:
    return sum(time_ms for kind, time_ms in terms.items() if kind not in (EP, TP, HOST))
