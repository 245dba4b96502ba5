"""Predict the GPU memory that a transformer layer needs for one microbatch.

The tensors were counted by reading the model code of TorchTitan 0.2.2. In a compiled model, the
backward recomputes the outputs of cheap operators (norms, the activation function, rotary
embedding). Such an output counts only if a matrix product reads it, because torch.compile saves the
inputs of matrix products.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.predict.operators import Operator
from cookbook.predict.rank import Layer, ModelPart, Rank
from cookbook.predict.shapes import Shapes, spared_products

# GEMMs whose outputs the backward reads: always (_READ), or only if there is a QK norm (_NORMED).
_READ = {"attention.wq_a", "attention.wkv_a", "moe.shared_experts.w1", "moe.shared_experts.w3"}
_NORMED = {"attention.wq", "attention.wk"}


@dataclass(frozen=True)
class LayerBytes:
    """The GPU memory that a layer needs for one microbatch, in bytes."""

    saved: float  # tensors that autograd saves for the backward, except the layer's input
    selected: float  # tensors in `saved` that selective recomputation keeps in memory
    temporary: float  # tensors at the layer's memory peak that are not in `saved`
    beside: float = 0.0  # tensors not in `saved` that selective recomputation keeps all the same
    freed: tuple[float, ...] = ()  # large tensors that every forward frees
    freed_again: tuple[float, ...] = ()  # those that it frees only if the layer is recomputed
    between: float = 0.0  # tensors in `saved` that torch.compile keeps under any memory budget


def layer_bytes(shapes: Shapes, moe: bool, products: Iterable[Operator] = ()) -> LayerBytes:
    """Return the memory that a layer needs for one microbatch.

    `products`: GEMMs whose outputs a compiled model keeps instead of recomputing them.
    """
    attention = _attention(shapes)
    feed_forward = _moe(shapes) if moe else _dense(shapes)
    # Attention and feed-forward reuse each other's freed memory, so count only the larger amount.
    fuller = max(attention, feed_forward, key=lambda part: sum(part.freed + part.freed_again))
    outputs = {one.module: shapes.act * shapes.tokens * one.shape[0] for one in products}
    read = _READ | _NORMED if shapes.qk_norm else _READ
    spared = sum(size for module, size in outputs.items() if module in read)
    return LayerBytes(
        saved=attention.saved + feed_forward.saved,
        selected=attention.selected + feed_forward.selected + spared,
        beside=feed_forward.beside + sum(outputs.values()) - spared,
        temporary=max(attention.temporary, feed_forward.temporary),
        freed=fuller.freed,
        freed_again=fuller.freed_again,
        between=feed_forward.between,
    )


def _attention(s: Shapes) -> LayerBytes:
    queries, keys = s.heads * (s.nope + s.rope), s.kv_heads * (s.nope + s.rope)
    out = s.heads * s.v_head
    if s.kv_lora:
        latent, normed = s.q_lora + s.kv_lora + s.rope, s.q_lora + s.kv_lora
        norm_inputs, readers = normed, 2
        # V is a view of the output of `wkv_b`. This keeps the whole output in memory.
        values = s.heads * (s.nope + s.v_head)
        matrix_products = latent + queries + values + s.dim
    else:
        # If the model has QK norm, count its inputs too: the queries and keys before the norm.
        latent, normed = (queries + keys) * s.qk_norm, 0
        norm_inputs, readers = latent, 3
        values = s.kv_heads * s.v_head
        matrix_products = queries + keys + values + s.dim
    # Count attention's output once: the next matrix product reads it without a copy.
    elements = s.tokens * (2 * s.dim + latent + normed + queries + keys + values + out)
    elements += s.sequence_tokens * s.dim
    if s.casts_at_each_use:
        # Autocast copies the input for each projection that reads it. The residual is FP32, and so
        # is what the norms inside attention save.
        elements += s.tokens * (readers * s.dim + 3 * norm_inputs)
    softmax = 4.0 * s.tokens * s.heads
    selected = 0.0
    if not s.compiled and "mm" in s.saves:
        selected += s.act * s.tokens * matrix_products / 2
    if (s.padded_tokens is not None or not s.compiled) and "attention" in s.saves:
        selected += s.act * s.tokens * out + softmax
    # FlashAttention-4 accumulates the gradient of Q in FP32, and with GQA also those of K and V. It
    # keeps two more FP32 values per token and head.
    shared = keys + values if s.kv_heads < s.heads else 0
    summed = 4.0 * (s.padded_tokens or 0) * (queries + 2 * s.heads + shared)
    return LayerBytes(
        saved=s.act * elements + softmax,
        selected=selected,
        temporary=s.act * s.tokens * (queries + keys + values + out) + summed,
        freed_again=tuple(float(s.act * s.tokens * e) for e in (queries, keys, values, out)),
    )


def _activations(s: Shapes) -> int:
    """Return how many tensors SwiGLU saves: gate, up, its output and, in eager mode, SiLU(gate)."""
    return 3 if s.compiled else 4


def _dense(s: Shapes) -> LayerBytes:
    hidden = float(s.act * s.tokens * s.dense_hidden)
    return LayerBytes(
        saved=_activations(s) * hidden + s.hidden_bytes,
        selected=(hidden if s.compiled else 1.5 * hidden) if "mm" in s.saves else 0.0,
        temporary=3 * hidden,
        freed_again=(hidden,) * 3,
    )


def _moe(s: Shapes) -> LayerBytes:
    router = s.tokens * (2 * 4 * s.num_experts + 3 * 8 * s.top_k)
    shared = s.act * s.tokens * _activations(s) * s.shared_hidden
    rows, hidden = float(s.act * s.rows * s.dim), float(s.act * s.rows * s.expert_hidden)
    shared_mm = 0.0 if s.compiled or "mm" not in s.saves else shared / 4
    gate_up, saved_out = (2 * hidden, rows) if "grouped_mm" in s.saves else (0.0, 0.0)
    base, selected = router + shared, gate_up + shared_mm
    if s.row_kernels:
        # row_kernels.py copies the gate and up weights into one buffer, side by side. Under
        # autocast it also copies the weights of the down projection, to cast them to BF16.
        copies = 3.0 if s.autocast else 2.0
        weights = copies * s.act * s.num_experts // s.ep * s.expert_hidden * s.dim
        saved = base + rows + 3 * hidden + (0.0 if s.quantized else weights)
        return LayerBytes(
            saved=saved,
            selected=selected,
            beside=s.act * s.sent_rows * s.dim * (s.ep > 1 and "communication" in s.saves),
            temporary=2 * rows + 3 * hidden + (2 if s.quantized else 1) * weights,
            freed=(rows,),
            freed_again=(rows, hidden),
            between=saved,
        )
    experts = rows + _activations(s) * hidden
    if s.casts_at_each_use:
        experts += 3.0 * s.act * s.num_experts * s.expert_hidden * s.dim
    # Count the tensors that one compiled graph passes to another, such as the outputs of the norm
    # and the router. torch.compile keeps them under every activation memory budget.
    between = router + s.act * s.tokens * s.dim + rows
    if s.scored_activations:
        between += hidden
        experts += 0.0 if s.compiled else hidden
    if s.deepep:
        received = s.act * s.sent_tokens * s.ranks_per_token * s.dim
        out, returned = float(s.act * s.tokens * s.dim), float(s.act * s.sent_tokens * s.dim)
        # If the scores multiply the experts' outputs, the gradient of the scores needs the outputs.
        outputs = rows
        if s.scored_activations:
            outputs = saved_out = returned = 0.0
        return LayerBytes(
            saved=base + experts + outputs,
            selected=selected + saved_out,
            beside=received + returned if "communication" in s.saves else 0.0,
            temporary=max(2 * received + out, 2 * rows + 3 * hidden),
            freed=(out,),
            freed_again=(rows,) * 2 + (hidden,) * 3,
            between=between + outputs,
        )
    sent, all_rows = float(s.act * s.sent_rows * s.dim), float(s.tokens * s.top_k * s.dim)
    tokens = 4.0 * s.tokens * s.dim
    # Autograd saves an FP32 copy of the experts' outputs, which is multiplied by the scores.
    weighted = 4.0 * all_rows
    # MoE.forward holds `routed_input`, `routed_output` and the unsorted rows until it returns.
    freed = (sent, sent, s.act * all_rows, tokens)
    # These factors come from measurements.
    backward = (25 if s.autocast else 4 + s.act) * all_rows + tokens
    exchanged = rows + sent if s.ep > 1 and "communication" in s.saves else 0.0
    return LayerBytes(
        saved=base + experts + weighted,
        selected=selected,
        beside=saved_out + exchanged,
        temporary=max(sum(freed), backward),
        freed=freed,
        freed_again=(weighted,),
        between=between + weighted,
    )


class RankLayers:
    """A rank's layers: the bytes they keep for the backward, and the largest working memory."""

    def __init__(self, cell: Cell, rank: Rank, shapes: Shapes) -> None:
        self._cell, self._rank, self._shapes = cell, rank, shapes
        # The DeepEP layer does not save the shared experts' output, since no gradient needs it.
        needless = "moe.shared_experts.w2" if shapes.deepep else None
        self._bytes = {}
        for moe in (False, True):
            needed = [one for one in spared_products(cell, shapes, moe) if one.module != needless]
            self._bytes[moe] = layer_bytes(shapes, moe, needed)

    def _cost(self, layer: Layer) -> tuple[LayerBytes, float, float]:
        cost, facts, s = self._bytes[layer.moe], self._cell.facts, self._shapes
        layer_input = s.hidden_bytes * (2 if s.casts_at_each_use else 1)
        if facts.budget is not None:
            spared = (1 - facts.budget) * (cost.saved - cost.between)
            return cost, layer_input + cost.saved - spared, spared
        if not layer.recomputed:
            return cost, layer_input + cost.saved, 0.0
        if facts.saves:
            return cost, layer_input + cost.selected + cost.beside, cost.saved - cost.selected
        return cost, layer_input, cost.saved

    def kept(self, part: ModelPart) -> float:
        """Return the bytes that this part of the model keeps for the backward of one microbatch."""
        return sum(self._cost(layer)[1] for layer in part.layers)

    def freed_in_forward(self, smallest: float) -> float:
        """Return the bytes that a layer's forward frees in blocks too small to be used again.

        These are blocks smaller than `smallest` bytes, the smallest later tensor. Of all layers,
        the one with the most such bytes counts.
        """
        unused = [0.0]
        for layer in self._rank.layers:
            cost = self._bytes[layer.moe]
            blocks = cost.freed + (cost.freed_again if layer.recomputed else ())
            unused.append(sum(block for block in blocks if block < smallest))
        return max(unused)

    def backward(self) -> dict[str, float]:
        """Return the working memory, split by cause, of the layer whose backward needs the most."""
        s, pipelined, found = self._shapes, self._rank.num_stages > 1, []
        for layer in self._rank.layers:
            terms = self._working(layer)
            if s.mixed_precision:
                sizes = [unit.gathered for unit in layer.units]
                if not s.keeps_gathered:
                    # This layer's parameters and the next layer's, which are prefetched.
                    terms["gathered layers"] = 2.0 * sum(sizes) * s.act
                reduced = 0 if pipelined else max(sizes, default=0) * s.grad
                terms["new gradients"] = float(sum(sizes) * s.act + reduced)
            found.append(terms)
        return max(found, key=lambda terms: sum(terms.values()), default={})

    def backward_alone(self) -> dict[str, float]:
        """Return the bytes in use at the backward's peak, by cause, without FSDP and PP."""
        (part,) = self._rank.parts
        gradients = float(sum(unit.size for unit in part.head if unit.name == "output"))
        found = []
        kept = self.kept(part)
        for layer in reversed(part.layers):
            terms = {"activations": kept, **self._working(layer)}
            found.append(terms | {"gradients (not sharded)": gradients})
            kept -= self._cost(layer)[1]
            gradients += self._gradients(layer)
        return max(found, key=lambda terms: sum(terms.values()), default={})

    def gradients_alone(self) -> float:
        """Return the bytes of all gradients of one microbatch, without FSDP and PP."""
        (part,) = self._rank.parts
        beside = sum(unit.size for unit in (*part.embedding, *part.head))
        return beside + sum(map(self._gradients, part.layers))

    def _gradients(self, layer: Layer) -> float:
        s, size = self._shapes, sum(unit.size for unit in layer.units)
        # The experts' stay in BF16.
        narrow = 2.0 * 3 * s.num_experts * s.dim * s.expert_hidden
        return size - narrow * (layer.moe and s.keeps_narrow_gradients)

    def _working(self, layer: Layer) -> dict[str, float]:
        cost, _, recomputed = self._cost(layer)
        return {"recomputed layer": recomputed, "layer's temporaries": cost.temporary}
