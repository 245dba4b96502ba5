"""The bytes that a layer saves, keeps under recomputation and needs, for one microbatch.

Counted from `torchtitan/models/deepseek_v3/model/model.py` and `torchtitan/models/moe/moe.py`: a
tensor counts where a backward formula holds it, or a local variable does while the layer runs.
Where the model is compiled, what backward computes again (norms, the activation function, rotary
embedding) is left out. What a matrix product of the backward reads is not computed again: the
partitioner keeps it, since it would have to be written out in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.config.cell import Cell
from cookbook.predict.operators import Product, saved_products
from cookbook.predict.shapes import Shapes

# Products whose outputs the backward reads themselves, not what follows them.
_READ_AS_THEY_ARE = frozenset(
    ("attention.wq_a", "attention.wkv_a", "moe.shared_experts.w1", "moe.shared_experts.w3")
)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch.

    `saved` is all that backward needs beyond the layer's input; `selected` is what selective
    recomputation of operations keeps instead, `selected_of_saved` how much of `saved` that spares;
    `between` is the part of `saved` that compiled pieces hand to one another, which a memory budget
    cannot spare; `temporary` is what is needed besides at the fullest moment. `freed` are the large
    blocks that forward takes and gives back, `freed_again` those that it gives back too where it is
    recomputed.
    """

    input: float
    saved: float
    selected: float
    selected_of_saved: float
    temporary: float
    freed: tuple[float, ...] = ()
    freed_again: tuple[float, ...] = ()
    between: float = 0.0


def layer_bytes(shapes: Shapes, moe: bool, products: Iterable[Product] = ()) -> LayerBytes:
    """A layer with routed experts, or a dense one.

    Args:
        products: that selective recomputation saves in compiled code.
    """
    attention = _attention(shapes)
    feed_forward = _moe(shapes) if moe else _dense(shapes)
    # What one gives back serves the other.
    fuller = max(attention, feed_forward, key=lambda part: sum(part.freed + part.freed_again))
    outputs = {one.module: shapes.act * one.rows * one.columns for one in products}
    spared = sum(size for module, size in outputs.items() if module in _READ_AS_THEY_ARE)
    return LayerBytes(
        input=shapes.sequence_tokens * shapes.dim * shapes.act,
        saved=attention.saved + feed_forward.saved,
        selected=attention.selected + feed_forward.selected + sum(outputs.values()),
        selected_of_saved=attention.selected_of_saved + feed_forward.selected_of_saved + spared,
        temporary=max(attention.temporary, feed_forward.temporary),
        freed=fuller.freed,
        freed_again=fuller.freed_again,
        between=feed_forward.between,
    )


def _attention(s: Shapes) -> LayerBytes:
    """Multi-head latent attention, the residual behind it, and both norms' outputs."""
    head = s.nope + s.rope
    # The latents and, for the product that follows, the normed ones.
    latent = 2 * (s.q_lora + s.kv_lora) + s.rope
    queries = s.heads * head
    # Keys are copied together from two parts; values are a view into what keys were cut from.
    keys, values = s.heads * head, s.heads * (s.nope + s.v_head)
    out = s.heads * s.v_head
    # Attention writes its output as the next product reads it: there is no second copy.
    elements = s.tokens * (2 * s.dim + latent + queries + keys + values + out)
    elements += s.sequence_tokens * s.dim
    softmax = 4.0 * s.tokens * s.heads
    # Selective recomputation sees only what is not compiled: every second matrix product and the
    # attention itself. FlashAttention-4 is an operator, which it sees in compiled code as well.
    matrix_products = s.q_lora + s.kv_lora + s.rope + queries + values + s.dim
    selected = 0.0
    if not s.compiled and "mm" in s.saves:
        selected += s.act * s.tokens * matrix_products / 2
    flash = s.padded_tokens is not None
    if (flash or not s.compiled) and "attention" in s.saves:
        selected += s.act * s.tokens * out + softmax
    # The queries' gradients are summed in FP32, beside a row of two more numbers for each query.
    summed = 4.0 * (s.padded_tokens or 0) * (queries + 2 * s.heads)
    return LayerBytes(
        input=0,
        saved=s.act * elements + softmax,
        selected=selected,
        selected_of_saved=selected,
        temporary=s.act * s.tokens * (2 * queries + values + out) + summed,
        freed_again=tuple(float(s.act * s.tokens * e) for e in (queries, keys, values, out)),
    )


def _activations(s: Shapes) -> int:
    """How many tensors of the hidden size SwiGLU saves: gate, up and their product, which the last
    matrix's gradient reads; eager also SiLU.
    """
    return 3 if s.compiled else 4


def _dense(s: Shapes) -> LayerBytes:
    hidden = float(s.act * s.tokens * s.dense_hidden)
    # Compiled with its recomputation, as one graph.
    selected = 0.0
    if "mm" in s.saves:
        selected = hidden if s.compiled else 1.5 * hidden
    return LayerBytes(
        input=0,
        saved=_activations(s) * hidden + s.act * s.sequence_tokens * s.dim,
        selected=selected,
        selected_of_saved=selected,
        temporary=3 * hidden,
        freed_again=(hidden,) * 3,
    )


def _moe(s: Shapes) -> LayerBytes:
    """Router, dispatch, grouped GEMMs, combine and the shared expert."""
    router = s.tokens * (2 * 4 * s.num_experts + 3 * 8 * s.top_k)
    # Its input is the norm's output, which attention's count has.
    shared = s.act * s.tokens * _activations(s) * s.shared_hidden
    experts = s.act * s.rows * (s.dim + _activations(s) * s.expert_hidden)
    if s.scored_activations and not s.compiled:
        # Before they are scored, for the gradient of the scores.
        experts += s.act * s.rows * s.expert_hidden
    # Pieces compiled one by one: the norm's output, the router's, and the rows that experts get.
    between = router + s.act * (s.tokens + s.rows) * s.dim
    if s.scored_activations:
        # The experts' two halves are compiled one by one as well.
        between += s.act * s.rows * s.expert_hidden
    # One row a (token, expert) pair; under TP the standard path fills rows for all tokens.
    sent = float(s.act * s.sent_rows * s.dim)
    all_rows = float(s.tokens * s.top_k * s.dim)
    # The outputs of gate and up are saved without recomputation too, as inputs of what follows.
    gate_up = saved_out = 0.0
    if "grouped_mm" in s.saves:
        gate_up = 2.0 * s.act * s.rows * s.expert_hidden
        saved_out = float(s.act * s.rows * s.dim)
    shared_mm = 0.0 if s.compiled or "mm" not in s.saves else shared / 4
    sends = "communication" in s.saves
    if s.deepep:
        received = s.act * s.sent_tokens * s.ranks_per_token * s.dim
        grouped = float(s.act * s.rows * s.dim)
        returned = float(s.act * s.sent_tokens * s.dim)
        scored = s.scored_activations
        if scored:
            # No gradient needs what follows the activations.
            saved_out = returned = 0.0
        # The experts' outputs are kept for the gradient of their scores.
        outputs = 0.0 if scored else grouped
        return LayerBytes(
            input=0,
            saved=router + shared + experts + outputs,
            selected=gate_up + saved_out + shared_mm + (received + returned) * sends,
            selected_of_saved=gate_up + saved_out + shared_mm,
            temporary=max(
                2 * received + s.act * s.tokens * s.dim,
                2 * grouped + 3 * s.act * s.rows * s.expert_hidden,
            ),
            freed=(float(s.act * s.tokens * s.dim),),
            freed_again=(grouped,) * 2 + (float(s.act * s.rows * s.expert_hidden),) * 3,
            between=between + outputs,
        )
    if s.row_kernels:
        return _moe_with_row_kernels(s, router + shared, gate_up + shared_mm, sent * sends)
    if s.score_first:
        weighted = 4.0 * s.sent_rows * s.dim
        freed: tuple[float, ...] = (sent, sent, s.act * all_rows)
        backward = weighted + s.act * all_rows
    else:
        # Outputs are put back in the tokens' order and weighted in FP32, by a batched product that
        # keeps its operand.
        weighted = 4.0 * all_rows
        # `routed_input`, `routed_output` and the unsorted rows live to the end of MoE.forward.
        freed = (sent, sent, s.act * all_rows, 4.0 * s.tokens * s.dim)
        # A rank alone moves them in FP32 before and behind as well: as measured.
        backward = (25 if s.autocast else 4 + s.act) * all_rows + 4 * s.tokens * s.dim
    exchanged = s.act * (s.rows + s.sent_rows) * s.dim if s.ep > 1 else 0.0
    return LayerBytes(
        input=0,
        saved=router + shared + experts + weighted,
        selected=exchanged * sends + shared_mm + gate_up + saved_out,
        selected_of_saved=shared_mm + gate_up,
        temporary=max(sum(freed), backward),
        freed=freed,
        freed_again=(weighted,),
        between=between + weighted,
    )


def _moe_with_row_kernels(s: Shapes, saved: float, selected: float, exchanged: float) -> LayerBytes:
    """What titan/tt_0_2_2/row_kernels.py keeps, in PyTorch operations and kernels of its own.

    Args:
        saved, selected: of the router and the shared experts; the latter with gate and up.
        exchanged: what selective recomputation saves of the rows that are sent.
    """
    # Gate and up are copied side by side, the third is cast where FSDP does not.
    copies = 3.0 if s.autocast else 2.0
    weights = copies * s.act * s.num_experts // s.ep * s.expert_hidden * s.dim
    rows, hidden = float(s.act * s.rows * s.dim), float(s.act * s.rows * s.expert_hidden)
    # The experts' input, gate and up, their scored product, and the weights as they are multiplied.
    saved += rows + 3 * hidden + weights
    return LayerBytes(
        input=0,
        saved=saved,
        selected=selected + exchanged * (s.ep > 1),
        selected_of_saved=selected,
        # Backward: the gradients of outputs, gate, up, input and weights.
        temporary=2 * rows + 3 * hidden + weights,
        freed=(rows,),
        freed_again=(rows, hidden),
        between=saved,
    )


class RankLayers:
    """The layers of a rank's parts: what each keeps, and what the largest needs while it works."""

    def __init__(self, cell: Cell, view: Mapping[str, Any], shapes: Shapes) -> None:
        self._cell, self._view, self._shapes = cell, view, shapes
        self._bytes = {
            moe: layer_bytes(shapes, moe, saved_products(cell, shapes, moe))
            for moe in (False, True)
        }

    def _cost(self, layer: Mapping[str, Any]) -> tuple[LayerBytes, float, float]:
        """The layer, what it keeps, and what comes back when it is recomputed."""
        cost = self._bytes[layer["moe"]]
        mode = self._cell.options["activation_checkpoint.mode"]
        everything = cost.input + cost.saved
        if mode == "memory_budget":
            budget = self._cell.options["activation_checkpoint.memory_budget"]
            spared = (1 - budget) * (cost.saved - cost.between)
            return cost, everything - spared, spared
        if mode == "none" or not layer["recomputed"]:
            return cost, everything, 0.0
        by_operation = self._cell.options["activation_checkpoint.selective_ac_option"] == "op"
        if mode == "selective" and by_operation:
            return cost, cost.input + cost.selected, cost.saved - cost.selected_of_saved
        return cost, cost.input, cost.saved

    def kept(self, part: int) -> float:
        """Bytes that a microbatch leaves in part `part`."""
        return sum(self._cost(layer)[1] for layer in self._view["parts"][part]["layers"])

    def freed_in_forward(self, smallest: float) -> float:
        """Blocks of the largest layer's forward that are free again, yet too small for `smallest`.

        The allocator does not join what it took from the driver at different times, so that a
        tensor that is larger than each of them leaves them aside.
        """
        unused = [0.0]
        for part in self._view["parts"]:
            for layer in part["layers"]:
                cost = self._bytes[layer["moe"]]
                blocks = cost.freed + (cost.freed_again if layer["recomputed"] else ())
                unused.append(sum(block for block in blocks if block < smallest))
        return max(unused)

    def backward(self) -> dict[str, float]:
        """The largest layer's backward: what is recomputed, its temporaries and its parameters."""
        largest: dict[str, float] = {}
        for part in self._view["parts"]:
            for layer in part["layers"]:
                cost, _, recomputed = self._cost(layer)
                terms = {"recomputed layer": recomputed, "layer's temporaries": cost.temporary}
                terms |= self._parameters(part, layer)
                if sum(terms.values()) > sum(largest.values()):
                    largest = terms
        return largest

    def backward_alone(self) -> dict[str, float]:
        """The fullest layer's backward on a rank without FSDP, with all that is kept for it.

        TorchTitan lets go of the gradients before a step: they fill up while activations go.
        """
        (part,) = self._view["parts"]
        sizes = {unit["name"]: float(unit["local"] * unit["bytes"]) for unit in part["units"]}
        gradients = sizes.get("output", 0.0)
        largest: dict[str, float] = {}
        for index, layer in reversed(list(enumerate(part["layers"]))):
            cost, _, recomputed = self._cost(layer)
            terms = {
                "activations": sum(self._cost(one)[1] for one in part["layers"][: index + 1]),
                "recomputed layer": recomputed,
                "layer's temporaries": cost.temporary,
                "gradients (not sharded)": gradients,
            }
            if sum(terms.values()) > sum(largest.values()):
                largest = terms
            prefix = f"layers.{layer['id']}."
            gradients += sum(size for name, size in sizes.items() if f"{name}.".startswith(prefix))
        return largest

    def _parameters(self, part: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, float]:
        if not self._view["mixed_precision"]:
            return {}
        prefix = f"layers.{layer['id']}"
        own = [u for u in part["units"] if f"{u['name']}.".startswith(f"{prefix}.")]
        gathered = sum(unit["gathered"] for unit in own)
        largest = max((unit["gathered"] for unit in own), default=0)
        if self._view["num_stages"] > 1:
            return {"new gradients": float(gathered * self._shapes.act)}
        return {
            # Its own parameters and the next layer's, prefetched.
            "gathered layers": 2.0 * gathered * self._shapes.act,
            "new gradients": float(gathered * self._shapes.act + largest * self._shapes.grad),
        }

    def dispatched(self) -> float:
        """DeepEP's own stream: what it received, combined, and the gradient of one of them."""
        if not self._shapes.deepep:
            return 0.0
        return (
            3.0
            * self._shapes.sent_tokens
            * self._shapes.ranks_per_token
            * self._shapes.dim
            * self._shapes.act
        )
