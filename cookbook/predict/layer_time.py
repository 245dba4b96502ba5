"""The time of one layer and microbatch, forward and backward, with its recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.predict.kernels import (
    ATTENTION,
    DENSE,
    GROUPED,
    POINTWISE,
    QUANTIZING,
    ROWS,
    Kernels,
    Terms,
    add,
    scaled,
)
from cookbook.predict.operators import (
    attention_operators,
    feed_forward_operators,
    head_operators,
)
from cookbook.predict.rank import Layer, Part
from cookbook.predict.shapes import spared_products
from cookbook.predict.traffic import Links

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

    Attributes:
        exchange_ms: one exchange of one chunk.
        experts_ms: the routed experts, all chunks.
        first_ms, second_ms: the shared experts before and behind them, in the forward.
        chunks: the number of parts into which the tokens are cut.
    """

    exchange_ms: float
    experts_ms: float
    first_ms: float
    second_ms: float
    chunks: int

    def forward_wait_ms(self) -> float:
        """Return how long a forward waits."""
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
        """Return how long a backward waits.

        Args:
            before_ms: computed while the first gradients are sent: the recomputed forward.
        """
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
        self._tensor_ms = links.tensor_exchange_ms()
        # One layer of each kind, dense and with routed experts; a backward without recomputation.
        self._forward = {moe: self._compute(moe, False) for moe in (False, True)}
        self._backward = {moe: self._compute(moe, True) for moe in (False, True)}
        self._forward[True] = add(
            self._forward[True], {EP: self._sent_ms(False), HOST: self._host_ms()}
        )

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
        """Return how long a layer waits for its exchanges, and how much its compute loses.

        Args:
            before_ms: recomputed while the first gradients are sent.
        """
        if not self._overlapped:
            return self._exchange_ms
        k = self._kernels
        experts_ms = sum(add(k.experts(backward), k.move_rows(backward)).values())
        chunk_ms = self._links.deepep_ms(k.chunks)
        layer = RoutedLayer(chunk_ms, experts_ms, *k.shared_halves_ms(backward), k.chunks)
        wait_ms = layer.backward_wait_ms(before_ms) if backward else layer.forward_wait_ms()
        hidden_ms = 2 * k.chunks * chunk_ms - wait_ms
        return wait_ms + hidden_ms * (1 / k.hardware.compute_beside_deepep_share - 1)

    def _host_ms(self) -> float:
        """Return how long the GPU waits while the host reads the number of received rows."""
        return self._kernels.hardware.host_ms_per_routed_layer if self._cell.layout.ep > 1 else 0.0

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
        if part.head:
            head = head_operators(k.shapes)
            forward += [k.dense(head, False), k.loss(), tensor]
            backward += [k.dense(head, True), tensor]
        if part.embedding:
            forward.append(tensor)
            backward.append(tensor)
        return add(*forward), add(*backward)

    def recompute_ms(self, part: Part) -> float:
        """Return how long a microbatch computes and sends again in a part."""
        return sum(sum(self.again(layer.moe, layer.recomputed).values()) for layer in part.layers)

    def compute_ms(self, layer: Layer) -> tuple[float, float]:
        """Return a layer's compute time, forward and backward, without exchanges."""
        return _computed(self._forward[layer.moe]), _computed(self._backward_of(layer))


def _computed(terms: Mapping[str, float]) -> float:
    return sum(time_ms for kind, time_ms in terms.items() if kind not in (EP, TP, HOST))
