"""The time of one layer and microbatch, forward and backward, with what is computed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cookbook.config.cell import Cell
from cookbook.predict.exchange import Links
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
    attention_products,
    feed_forward_products,
    head_products,
    spared_products,
)
from cookbook.predict.overlap import RoutedLayer

EP, TP, HOST = "EP, exposed", "TP, exposed", "host"
_SENT = (EP, TP)
# Hidden states are gathered or reduced over TP this often in a layer's forward. A backward gathers
# twice, sums over all of them once, a reduction and a gather, and with DeepEP reduces once.
# (As profiled it summed three times: eight, of which three were hidden.)
_TP_FORWARD, _TP_BACKWARD = 4, 5
# Compiled attention gathers its input once more where a layer is recomputed, whatever is saved.
_TP_COMPILED = 1


class LayerTimes:
    """The times of a cell's layers; all layers of a kind take the same."""

    def __init__(
        self,
        cell: Cell,
        kernels: Kernels,
        links: Links,
        view: Mapping[str, Any],
        overlapped: bool = True,
    ) -> None:
        self._cell, self._kernels, self._links = cell, kernels, links
        self._view = view
        shapes = kernels.shapes
        self._overlapped = (
            overlapped and shapes.deepep and shapes.ep > 1 and not kernels.is_released
        )
        self._exchange_ms = links.expert_exchanges_ms(view)
        self._tensor_ms = links.tensor_exchange_ms()
        # One layer of each kind, dense and with routed experts.
        self._forward = {moe: self._count_forward(moe) for moe in (False, True)}
        self._backward = {moe: self._count_backward(moe) for moe in (False, True)}

    def _count_forward(self, moe: bool) -> Terms:
        k = self._kernels
        terms = [
            k.dense(attention_products(k.shapes), False),
            k.attend(False),
            k.dense(feed_forward_products(k.shapes, moe), False),
            k.pointwise(moe, False),
            {TP: _TP_FORWARD * self._tensor_ms},
        ]
        if moe:
            terms += [k.experts(False), k.move_rows(False), {EP: self._sent_ms(False)}]
            terms.append({HOST: self._host_ms()})
        return add(*terms)

    def _sent_ms(self, backward: bool, before_ms: float = 0.0) -> float:
        """What a layer waits for its exchanges, and what its compute loses beside them.

        Args:
            before_ms: what a backward computes again while the first gradients are sent.
        """
        if not self._overlapped:
            return self._exchange_ms[backward]
        k = self._kernels
        experts_ms = sum(add(k.experts(backward), k.move_rows(backward)).values())
        chunk_ms = self._links.deepep_chunk_ms(self._view, k.chunks)
        first_ms, second_ms = k.shared_halves_ms(backward)
        layer = RoutedLayer(chunk_ms, experts_ms, first_ms, second_ms, k.chunks)
        wait_ms = layer.backward_wait_ms(before_ms) if backward else layer.forward_wait_ms()
        hidden_ms = 2 * k.chunks * chunk_ms - wait_ms
        return wait_ms + hidden_ms * (1 / k.hardware.compute_beside_deepep_share - 1)

    def _host_ms(self) -> float:
        """The GPU waits for the host to learn how many rows came."""
        return self._kernels.hardware.host_ms_per_routed_layer if self._cell.layout.ep > 1 else 0.0

    def _count_backward(self, moe: bool) -> Terms:
        """Without what is computed again."""
        k = self._kernels
        terms = [
            k.dense(attention_products(k.shapes), True),
            k.attend(True),
            k.dense(feed_forward_products(k.shapes, moe), True),
            k.pointwise(moe, True),
            {TP: _TP_BACKWARD * self._tensor_ms},
        ]
        if moe:
            terms += [k.experts(True), k.move_rows(True)]
        return add(*terms)

    def _backward_of(self, moe: bool, recomputed: bool) -> Terms:
        """With all that is computed and sent again."""
        again = self.again(moe, recomputed)
        if not moe:
            return add(self._backward[moe], again)
        # The first gradients are sent before the forward is computed again, which is all at once.
        whole = recomputed and self._cell.options["activation_checkpoint.mode"] != "memory_budget"
        before_ms = _computed(again) if whole else 0.0
        return add(self._backward[moe], again, {EP: self._sent_ms(True, before_ms)})

    def again(self, moe: bool, recomputed: bool) -> Terms:
        """What the backward computes and sends again of the forward."""
        options = self._cell.options
        terms = self._forward[moe]
        mode = options["activation_checkpoint.mode"]
        if mode == "memory_budget":
            # The compiler's partition keeps what fits the budget, in compiled code alone.
            part = 1 - options["activation_checkpoint.memory_budget"]
            # No gradient needs the last of the experts' three products.
            shares = {ATTENTION: 1, DENSE: 1, POINTWISE: 1, GROUPED: 2 / 3, QUANTIZING: 2 / 3}
            again = {kind: share * terms[kind] for kind, share in shares.items() if kind in terms}
            return scaled(again, part)
        if not recomputed:
            return {}
        saved = self._cell.saves
        left_out = set()
        # In compiled code the list sees FlashAttention-4, exchanges, grouped and dense GEMMs.
        if "attention" in saved and self._cell.uses_flash_attention:
            left_out.add(ATTENTION)
        if "communication" in saved:
            left_out |= {EP, HOST}
            terms = {**terms, TP: _TP_COMPILED * self._tensor_ms}
        k = self._kernels
        spared = k.dense(spared_products(self._cell, k.shapes, moe), False)
        terms = add(terms, scaled(spared, -1))
        if "grouped_mm" in saved:
            left_out.add(GROUPED)
            if QUANTIZING in terms:
                left_out.add(QUANTIZING)
        again = {kind: time_ms for kind, time_ms in terms.items() if kind not in left_out}
        if moe and k.shapes.scored_activations:
            # Two of three products, and rows on their way to the experts alone.
            parts = {GROUPED: 2 / 3, ROWS: 1 / 2, EP: 1 / 2}
            again = {kind: parts.get(kind, 1) * time_ms for kind, time_ms in again.items()}
        return again

    def part(self, part: Mapping[str, Any]) -> tuple[Terms, Terms]:
        """A microbatch through all of a part: forward, and backward with what is done again."""
        forward, backward = [], []
        for layer in part["layers"]:
            forward.append(self._forward[layer["moe"]])
            backward.append(self._backward_of(layer["moe"], layer["recomputed"]))
        if part["head"]:
            k = self._kernels
            forward += [k.dense(head_products(k.shapes), False), k.loss(), {TP: self._tensor_ms}]
            backward += [k.dense(head_products(k.shapes), True), {TP: self._tensor_ms}]
        if part["embedding"]:
            forward.append({TP: self._tensor_ms})
            backward.append({TP: self._tensor_ms})
        return add(*forward), add(*backward)

    def recompute_ms(self, part: Mapping[str, Any]) -> float:
        """What a microbatch computes and sends again in a part."""
        return sum(
            sum(self.again(layer["moe"], layer["recomputed"]).values()) for layer in part["layers"]
        )

    def compute_ms(self, layer: Mapping[str, Any]) -> tuple[float, float]:
        """What a layer computes, forward and backward, without what it sends."""
        moe = layer["moe"]
        backward = _computed(self._backward_of(moe, layer["recomputed"]))
        return _computed(self._forward[moe]), backward

    def kept_gradients_ms(self, view: Mapping[str, Any]) -> float:
        """A pipeline's microbatch adds its gradients, in BF16, to the sum, which is not sharded."""
        if not view["mixed_precision"]:
            return 0.0
        gathered = sum(unit["gathered"] for part in view["parts"] for unit in part["units"])
        return self._kernels.bytes_ms(10.0 * gathered)


def _computed(terms: Mapping[str, float]) -> float:
    return sum(time_ms for kind, time_ms in terms.items() if kind not in (*_SENT, HOST))
