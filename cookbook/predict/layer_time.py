"""Predict the time of a layer: of each kind of kernel, of communication and of recomputation.

The time of a matrix product follows from its FLOPs or from the bytes that it moves, whichever take
longer. That of attention follows from its FLOPs, that of other kernels from their bytes.
docs/reference/models.md lists these FLOPs and bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cookbook.predict import operators
from cookbook.predict.rank import Layer, ModelPart, Rank, model_of
from cookbook.predict.shapes import spared_products
from cookbook.predict.traffic import Links

# Milliseconds by kind of kernel; the kinds are those of `submit.py profile`.
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
class Kernels(Links):
    """The times of a cell's kernels, beside those of its links."""

    attended_tokens: float = 0.0  # keys that a token attends to: mean, on the slowest rank
    is_released: bool = False  # whether TorchTitan runs as released, without the cookbook's patches

    @property
    def chunks(self) -> int:
        """The number of chunks into which an MoE layer splits its tokens."""
        return self.cell.facts.ep_chunks

    def bytes_ms(self, size: float) -> float:
        """Return the time to read or write `size` bytes of GPU memory."""
        hw = self.hardware
        return size / (hw.memory_bandwidth_gb_per_s * hw.memory_bandwidth_share * 1e6)

    @property
    def _expert_weights(self) -> int:
        return sum(one.numel for one in operators.experts(self.shapes)) // self.shapes.ep

    def experts(self, backward: bool) -> Terms:
        """Return the time of the routed experts' GEMMs and row permutations; no communication."""
        terms = self.multiply(operators.experts(self.shapes), backward)
        if backward and self.chunks > 1:
            # Each chunk computes its own weight gradients, which have to be added up.
            added = 3.0 * self.shapes.act * self._expert_weights * (self.chunks - 1)
            terms = add(terms, {POINTWISE: self.bytes_ms(added)})
        return add(terms, self.move_rows(backward))

    def multiply(self, operators: Iterable[operators.Operator], backward: bool) -> Terms:
        """Return the time of the operators' GEMMs and quantization, in forward or backward."""
        return add(*(self._product(one, backward) for one in operators if one.is_product))

    def _product(self, one: operators.Operator, backward: bool) -> Terms:
        hw, s, quantized = self.hardware, self.shapes, operators.gemm_format(self.cell, one)
        columns, inner = one.shape[-2:]
        kind, rows, weights = DENSE, s.tokens, one.numel
        share, fp8_share = hw.dense_gemm_share, hw.fp8_dense_gemm_share
        if one.is_expert:
            # The layer splits its tokens into chunks. Each chunk reads and quantizes all weights.
            kind, rows, weights = GROUPED, s.rows, one.numel // s.ep * self.chunks
            share, fp8_share = hw.grouped_gemm_share, hw.fp8_grouped_gemm_share
        flops = 2.0 * rows * columns * inner
        inputs, outputs = rows * inner, rows * columns
        slow = hw.bf16_peak_tflops * share * 1e9
        fast = hw.fp8_peak_tflops * fp8_share * 1e9
        count = 2 if backward else 1
        bytes_ms = self.bytes_ms(count * s.act * (inputs + weights + outputs))
        if quantized is None:
            return {kind: max(count * flops / slow, bytes_ms)}
        gemm, activations = flops / fast, inputs
        if backward:
            gemm, activations = 2 * flops / fast, 2 * outputs + inputs
            if quantized.endswith("wgrad_with_hp"):
                gemm, activations = flops / fast + flops / slow, outputs
        per_activation, per_weight = hw.float8_quantize_bytes, hw.float8_quantize_weight_bytes
        if quantized.startswith("mx"):
            per_activation = per_weight = hw.mxfp8_quantize_bytes
        quantizing_ms = self.bytes_ms(per_activation * activations + per_weight * weights)
        return {kind: max(gemm, bytes_ms / 2), QUANTIZING: quantizing_ms}

    def attend(self, backward: bool) -> Terms:
        """Return the time of attention: 2 matrix products in the forward, 5 in the backward."""
        s, hw = self.shapes, self.hardware
        head = s.nope + s.rope
        # `waste`: masked keys per query that the kernel computes anyway. SDPA's measured rates
        # include them.
        if self.cell.facts.uses_flash_attention:
            waste = hw.flash_attention_4_waste_tokens
            rates = hw.flash_attention_4_forward_tflops, hw.flash_attention_4_backward_tflops
            if head == s.v_head == 128:
                forward_rate = hw.flash_attention_4_128_forward_tflops
                rates = forward_rate, hw.flash_attention_4_128_backward_tflops
        elif model_of(self.cell).attn_type == "sdpa":
            waste, rates = 0.0, (hw.sdpa_forward_tflops, hw.sdpa_backward_tflops)
        else:
            waste = hw.flex_attention_waste_tokens
            rates = hw.flex_attention_forward_tflops, hw.flex_attention_backward_tflops
        widths = 3 * head + 2 * s.v_head if backward else head + s.v_head
        flops = 2.0 * s.tokens * s.heads * widths * (self.attended_tokens + waste)
        return {ATTENTION: flops / (rates[backward] * 1e9)}

    def pointwise(self, moe: bool, backward: bool) -> Terms:
        """Return the time of norms, residuals, RoPE, attention's copies, SwiGLU and the router."""
        s = self.shapes
        queries, keys = (heads * (s.nope + s.rope) for heads in (s.heads, s.kv_heads))
        normed = s.q_lora + s.kv_lora + (queries + keys) * s.qk_norm
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
            # A rank alone casts the experts' weights, and copies the gradients of two thirds.
            size += (8 / 3 if backward else 6.0) * self._expert_weights * moe
        return {POINTWISE: self.bytes_ms(size)}

    def move_rows(self, backward: bool) -> Terms:
        """Return the time to permute rows into expert order and back, without communication."""
        s, hw = self.shapes, self.hardware
        rows = float(s.act * s.rows * s.dim)
        sent = float(s.act * s.sent_rows * s.dim)
        added_ms = 0.0
        if s.deepep:
            received = s.act * s.sent_tokens * s.ranks_per_token * s.dim
            dotted = 2 * rows if backward and not s.scored_activations else 0
            moved = 2 * (rows + received) + dotted
            if backward and self.is_released:
                added_ms = rows / (hw.released_deepep_rows_gb_per_s * 1e6)
        elif s.row_kernels:
            tokens = float(s.act * s.sent_tokens * s.dim)
            moved = 2 * (sent + 2 * tokens) + (4 * rows if s.ep > 1 else 0.0)
        else:
            every = float(s.act * s.tokens * s.top_k * s.dim)
            # A gather copies each of this TP rank's tokens to one row per chosen expert. Two more
            # permute the rows to expert order and back. Then they are scattered into a zero-filled
            # tensor with rows for the tokens of all TP ranks (`every`). It is cast to FP32, twice
            # the bytes, and multiplied by the scores.
            moved = 4 * sent + 4 * rows + 6 * every
            if backward:
                # The gradient of a gather is a scatter-add, which adds rows serially.
                added_ms = sent / (hw.scatter_add_gb_per_s * 1e6)
        return {ROWS: self.bytes_ms(moved) + added_ms}

    def loss(self) -> Terms:
        """Return the time of softmax and its gradient, forward and backward together."""
        s = self.shapes
        passes = 4 * s.act if s.loss_compiled else 20
        return {LOSS: self.bytes_ms(float(passes) * s.tokens * s.vocab)}

    def optimizer(self, rank: Rank) -> float:
        """Return the time of clipping and Adam, which move 40 bytes per stored parameter."""
        return self.bytes_ms(40.0 * rank.local_parameters)

    def copies(self, rank: Rank, rounds: int, sums: int) -> float:
        """Return the time that FSDP takes to cast and pack parameters and gradients.

        `rounds`: how often it gathers the modules and reduces their gradients.
        `sums`: how often it adds a microbatch's gradients to those of others; 0 without a pipeline.
        """
        if not self.shapes.mixed_precision:
            return 0.0
        local, gathered = rank.local_parameters, sum(part.gathered for part in rank.parts)
        size = self.gathers * (6.0 * local + 4 * gathered) + 6.0 * gathered + 8 * local
        return self.bytes_ms(rounds * size + sums * 10.0 * gathered)


EP, TP, HOST = "EP, exposed", "TP, exposed", "host"
# The number of TP collectives in a layer's forward and backward. An all-reduce counts as two.
# Without DeepEP the backward has only four, but five are assumed for every layer.
_TP_FORWARD, _TP_BACKWARD = 4, 5
# Recomputing compiled attention always repeats one TP collective, the all-gather of its input, even
# if selective recomputation saves the results of communication.
_TP_COMPILED = 1


def exchange_wait_ms(
    exchange_ms: float,
    experts_ms: float,
    chunks: int,
    before_ms: float,
    after_ms: float,
    queued: int,
) -> float:
    """Return how long the forward (or backward) of an MoE layer waits for DeepEP.

    The layer splits its tokens into `chunks`. DeepEP dispatches and combines each chunk separately.
    `exchange_ms`: the time of one chunk's dispatch, which is also the time of its combine.
    `experts_ms`: the time that the routed experts compute, all chunks together.
    `before_ms`: the time of other compute, such as shared experts, during the first dispatch.
    `after_ms`: the time of other compute during the last combine.
    `queued`: how many chunks are dispatched before the first chunk is combined.
    """
    arrived_ms: list[float] = []
    sent_ms, computed_ms = 0.0, before_ms
    for chunk in range(chunks):
        while len(arrived_ms) < min(chunk + queued, chunks):
            sent_ms += exchange_ms
            arrived_ms.append(sent_ms)
        computed_ms = max(computed_ms, arrived_ms[chunk]) + experts_ms / chunks
        sent_ms = max(sent_ms, computed_ms) + exchange_ms
    return max(sent_ms, computed_ms + after_ms) - before_ms - experts_ms - after_ms


class LayerTimes:
    """The times of a cell's dense layers and MoE layers."""

    def __init__(self, kernels: Kernels, overlapped: bool = True) -> None:
        self._kernels, s = kernels, kernels.shapes
        self._overlapped = overlapped and s.deepep and s.ep > 1 and not kernels.is_released
        # Keyed by whether the layer is MoE. `_backward` excludes recomputation.
        self._forward = {moe: self._compute(moe, False) for moe in (False, True)}
        self._backward = {moe: self._compute(moe, True) for moe in (False, True)}
        # The GPU waits while the host reads how many rows the rank received.
        host_ms = kernels.hardware.host_ms_per_routed_layer if s.ep > 1 else 0.0
        self._forward[True] = add(self._forward[True], {EP: self._sent_ms(False), HOST: host_ms})

    def _compute(self, moe: bool, backward: bool) -> Terms:
        k = self._kernels
        terms = add(
            k.multiply(operators.attention(k.shapes), backward),
            k.attend(backward),
            k.multiply(operators.feed_forward(k.shapes, moe), backward),
            k.pointwise(moe, backward),
            {TP: (_TP_BACKWARD if backward else _TP_FORWARD) * k.tensor_ms},
        )
        return add(terms, k.experts(backward)) if moe else terms

    def _sent_ms(self, backward: bool, hiding_ms: float = 0.0) -> float:
        k = self._kernels
        if not self._overlapped:
            return k.expert_exchanges_ms()
        experts_ms = sum(k.experts(backward).values())
        chunk_ms = k.deepep_ms(k.chunks)
        shared_ms = [
            sum(k.multiply([one], backward).values())
            for one in operators.feed_forward(k.shapes, moe=True)
            if one.module.startswith("moe.shared_experts")
        ]
        before_ms, after_ms, queued = sum(shared_ms[:2]), sum(shared_ms[2:]), 2
        if backward:
            before_ms, after_ms, queued = hiding_ms + after_ms, before_ms, k.chunks
        wait_ms = exchange_wait_ms(chunk_ms, experts_ms, k.chunks, before_ms, after_ms, queued)
        hidden_ms = 2 * k.chunks * chunk_ms - wait_ms
        return wait_ms + hidden_ms * (1 / k.hardware.compute_beside_deepep_share - 1)

    def _backward_of(self, layer: Layer) -> Terms:
        again = self.again(layer.moe, layer.recomputed)
        terms = add(self._backward[layer.moe], again)
        if not layer.moe:
            return terms
        # Recomputing a whole layer takes place while dispatches are in flight, which hides them.
        whole = layer.recomputed and self._kernels.cell.facts.budget is None
        return add(terms, {EP: self._sent_ms(True, _computed(again) if whole else 0.0)})

    def again(self, moe: bool, recomputed: bool) -> Terms:
        """Return the time that a layer's backward spends recomputing parts of the forward."""
        terms, k = self._forward[moe], self._kernels
        facts = k.cell.facts
        if facts.budget is not None:
            # The last of the experts' three GEMMs is not recomputed: no gradient needs its output.
            shares = {ATTENTION: 1, DENSE: 1, POINTWISE: 1, GROUPED: 2 / 3, QUANTIZING: 2 / 3}
            again = {kind: share * terms[kind] for kind, share in shares.items() if kind in terms}
            return scaled(again, 1 - facts.budget)
        if not recomputed:
            return {}
        saved, spared = facts.saves, set()
        if "attention" in saved and facts.uses_flash_attention:
            spared.add(ATTENTION)
        if "communication" in saved:
            spared |= {EP, HOST}
            terms = {**terms, TP: _TP_COMPILED * k.tensor_ms}
        dense = k.multiply(spared_products(k.cell, k.shapes, moe), False)
        terms = add(terms, scaled(dense, -1))
        if "grouped_mm" in saved:
            spared |= {GROUPED, QUANTIZING}
        again = {kind: time_ms for kind, time_ms in terms.items() if kind not in spared}
        if moe and k.shapes.scored_activations:
            # Two of the experts' three GEMMs are recomputed, and the dispatch, but not the combine.
            parts = {GROUPED: 2 / 3, ROWS: 1 / 2, EP: 1 / 2}
            again = {kind: parts.get(kind, 1) * time_ms for kind, time_ms in again.items()}
        return again

    def part(self, part: ModelPart) -> tuple[Terms, Terms]:
        """Return the forward and the backward time of one microbatch on a pipeline stage."""
        k = self._kernels
        forward = [self._forward[layer.moe] for layer in part.layers]
        backward = [self._backward_of(layer) for layer in part.layers]
        ends = [{TP: k.tensor_ms}] * (bool(part.embedding) + bool(part.head))
        if part.head:
            head = operators.head(k.shapes)
            forward += [k.multiply(head, False), k.loss()]
            backward.append(k.multiply(head, True))
        return add(*forward, *ends), add(*backward, *ends)

    def compute_ms(self, layer: Layer) -> tuple[float, float]:
        """Return a layer's forward and backward compute time, without communication."""
        return _computed(self._forward[layer.moe]), _computed(self._backward_of(layer))


def _computed(terms: Mapping[str, float]) -> float:
    return sum(time_ms for kind, time_ms in terms.items() if kind not in (EP, TP, HOST))
