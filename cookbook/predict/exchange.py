"""How long what a microbatch sends takes on its links, in milliseconds, before any overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.config.cell import Cell
from cookbook.predict.hardware import Hardware
from cookbook.predict.shapes import Shapes
from cookbook.predict.traffic import MXFP8_BYTES, Group, Traffic, deepep_traffic


@dataclass(frozen=True)
class Links:
    """The links of a cell's GPUs."""

    cell: Cell
    hardware: Hardware
    shapes: Shapes

    def expert_exchanges_ms(self, view: Mapping[str, Any]) -> tuple[float, float]:
        """Dispatch and combine of one layer and microbatch, forward; and of their gradients."""
        layout, s = self.cell.layout, self.shapes
        if layout.ep == 1:
            return 0.0, 0.0
        group = Group.of(layout.ep, layout.etp, self.cell.cluster.ranks_per_node)
        if s.deepep:
            one = self._deepep_ms(deepep_traffic(self.cell, view, s, group))
            return 2 * one, 2 * one
        elements = float(s.sent_rows * s.dim)
        plain = self._all_to_all_ms(group.all_to_all(elements * s.act))
        first = plain
        if self.cell.ep_backend.expects("dispatch") == "mxfp8":
            first = self._all_to_all_ms(group.all_to_all(elements * MXFP8_BYTES))
        return first + plain, first + plain

    def deepep_chunk_ms(self, view: Mapping[str, Any], chunks: int) -> float:
        """One exchange of one of a layer's `chunks`, where DeepEP sends."""
        layout, latency_ms = self.cell.layout, self.hardware.deepep_latency_ms
        group = Group.of(layout.ep, layout.etp, self.cell.cluster.ranks_per_node)
        whole_ms = self._deepep_ms(deepep_traffic(self.cell, view, self.shapes, group))
        return latency_ms + (whole_ms - latency_ms) / chunks

    def tensor_exchange_ms(self) -> float:
        """One all-gather or reduce-scatter of the hidden states over TP."""
        s, layout = self.shapes, self.cell.layout
        group = Group.of(layout.tp, 1, self.cell.cluster.ranks_per_node)
        return self._nccl_ms(group.gather(float(s.tokens * s.dim * s.act)))

    def stage_ms(self) -> float:
        """Hidden states of a microbatch on their way to the next pipeline stage."""
        s = self.shapes
        size = float(s.sequence_tokens * s.dim * s.act)
        if self.cell.layout.stage_ranks >= self.cell.cluster.ranks_per_node:
            return self._nccl_ms(Traffic(infiniband=size))
        return self._nccl_ms(Traffic(nvlink=size))

    def unit_ms(self, unit: Mapping[str, Any], beside_compute: bool = False) -> tuple[float, float]:
        """One FSDP module: its parameters gathered, its gradients reduced (over replicas too).

        Args:
            beside_compute: NCCL shares the GPU with compute, and takes longer.
        """
        layout, per_node = self.cell.layout, self.cell.cluster.ranks_per_node
        if unit["name"].endswith("moe.experts") and layout.ep > 1:
            group = Group.of(unit["shards"], layout.ep * layout.etp, per_node)
        else:
            group = Group.of(unit["shards"], layout.tp, per_node)
        stage = layout.dp_shard * layout.cp * layout.tp
        replicas = Group.of(layout.dp_replicate, stage, per_node)
        sent = (
            group.gather(unit["gathered"] * self.shapes.act),
            group.gather(unit["gathered"] * self.shapes.grad),
            replicas.gather(unit["local"] * self.shapes.grad),
        )
        gather, reduce, again = (self._nccl_ms(traffic, beside_compute) for traffic in sent)
        # A ring all-reduce is a reduce-scatter and an all-gather.
        return gather, reduce + 2 * again

    def _deepep_ms(self, sent: Traffic) -> float:
        hw = self.hardware
        within = sent.nvlink / (hw.deepep_nvlink_gb_per_s * 1e6)
        return hw.deepep_latency_ms + max(within, self._outside(sent, hw.deepep_infiniband_share))

    def _all_to_all_ms(self, sent: Traffic) -> float:
        hw = self.hardware
        within = sent.nvlink / (hw.nvlink_gb_per_s * hw.all_to_all_nvlink_share * 1e6)
        outside = self._outside(sent, hw.all_to_all_infiniband_share)
        return hw.all_to_all_latency_ms + max(within, outside)

    def _nccl_ms(self, sent: Traffic, beside_compute: bool = False) -> float:
        hw = self.hardware
        share = hw.nccl_beside_compute_share if beside_compute else hw.nccl_nvlink_share
        within = sent.nvlink / (hw.nvlink_gb_per_s * share * 1e6)
        return max(within, self._outside(sent, hw.nccl_infiniband_share))

    def _outside(self, sent: Traffic, share: float | None) -> float:
        if not sent.infiniband:
            return 0.0
        bandwidth = self.hardware.infiniband_gb_per_s
        # `hardware_of` has refused a job of several nodes without these.
        assert bandwidth
        assert share
        return sent.infiniband / (bandwidth * share * 1e6)
