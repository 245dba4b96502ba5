"""The bytes that a GPU sends over NVLink and InfiniBand, and the time to send them.

NCCL is assumed to use rings for gathers and reductions. Each ring enters a node once, and the rings
share the node's network cards equally. In an all-to-all, every rank sends directly to every other
rank. The traffic of context parallelism is not counted.
"""

from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.predict.hardware import Hardware
from cookbook.predict.operators import Unit
from cookbook.predict.shapes import Shapes

# MXFP8: one byte per element, and one byte of scale per 32 elements.
MXFP8_BYTES = 1 + 1 / 32


Sent = tuple[float, float]  # bytes within the node (NVLink), and to other nodes (InfiniBand)


@dataclass(frozen=True)
class Links:
    """The time of communication, for one microbatch, in ms, as if nothing overlapped."""

    cell: Cell
    shapes: Shapes
    hardware: Hardware

    def _in_node(self, ranks: int, stride: int) -> int:
        return max(1, min(ranks, self.cell.cluster.ranks_per_node // stride))

    def _gather(self, size: float, ranks: int, stride: int) -> Sent:
        if ranks == 1:
            return 0.0, 0.0
        in_node = self._in_node(ranks, stride)
        outside = size * (ranks - in_node) / ranks / in_node
        return (size * (ranks - 1) / ranks - outside if in_node > 1 else 0.0), outside

    @property
    def gathers(self) -> int:
        """All-gathers per module and accumulation round: 2 if FSDP reshards after the forward."""
        return 1 if self.shapes.keeps_gathered else 2

    def unit_ms(self, unit: Unit, beside_compute: bool = False) -> tuple[float, float]:
        """Return the time of an FSDP module's all-gather, and that of its gradient reduction."""
        layout, s = self.cell.layout, self.shapes
        is_expert = unit.name.endswith("moe.experts")
        group = unit.shards, layout.ep * layout.etp if is_expert else layout.tp
        gather, reduce = (self._gather(unit.gathered * size, *group) for size in (s.act, s.grad))
        # The all-reduce over the replicas is a reduce-scatter and an all-gather of as many bytes.
        replicas = layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp
        half = self._gather(unit.local * s.grad, *replicas)
        times = [self._nccl_ms(sent, beside_compute) for sent in (gather, reduce, half)]
        return times[0], times[1] + 2 * times[2]

    @property
    def tensor_ms(self) -> float:
        """The time of one gather or one reduction of the hidden states over TP."""
        s = self.shapes
        return self._nccl_ms(self._gather(float(s.tokens * s.dim * s.act), self.cell.layout.tp, 1))

    @property
    def stage_ms(self) -> float:
        """The time to send the hidden states to the next pipeline stage."""
        size = self.shapes.hidden_bytes
        is_outside = self.cell.layout.stage_ranks >= self.cell.cluster.ranks_per_node
        return self._nccl_ms((0.0, size) if is_outside else (size, 0.0))

    def expert_exchanges_ms(self) -> float:
        """Return the time of a layer's dispatch and combine; their gradients take as long."""
        s, layout, hw = self.shapes, self.cell.layout, self.hardware
        if s.ep == 1:
            return 0.0
        if s.deepep:
            return 2 * self.deepep_ms()
        in_node, total_ms = self._in_node(layout.ep, layout.etp), 2 * hw.all_to_all_latency_ms
        speeds = hw.nvlink_gb_per_s * hw.all_to_all_nvlink_share, hw.all_to_all_infiniband_share
        for width in (MXFP8_BYTES if self.cell.facts.exchange.is_quantized else s.act, s.act):
            size = s.sent_rows * s.dim * width
            sent = size * (in_node - 1) / layout.ep, size * (layout.ep - in_node) / layout.ep
            total_ms += self._ms(sent, *speeds)
        return total_ms

    def deepep_ms(self, chunks: int = 1) -> float:
        """Return the time that DeepEP takes to dispatch (or combine) one of `chunks` chunks."""
        layout, s, hw = self.cell.layout, self.shapes, self.hardware
        in_node = self._in_node(layout.ep, layout.etp)
        nodes = max(layout.ep // in_node, 1)
        size = float(s.sent_tokens * s.dim * s.act)
        within = s.ranks_per_token * (in_node - 1) / in_node
        sent = size * within, size * s.nodes_per_token * (nodes - 1) / nodes
        sent_ms = self._ms(sent, hw.deepep_nvlink_gb_per_s, hw.deepep_infiniband_share)
        return hw.deepep_latency_ms + sent_ms / chunks

    def _nccl_ms(self, sent: Sent, beside_compute: bool = False) -> float:
        hw = self.hardware
        share = hw.nccl_beside_compute_share if beside_compute else hw.nccl_nvlink_share
        return self._ms(sent, hw.nvlink_gb_per_s * share, hw.nccl_infiniband_share)

    def _ms(self, sent: Sent, nvlink_gb_per_s: float, infiniband_share: float | None) -> float:
        within, outside = sent
        if not outside:
            return within / (nvlink_gb_per_s * 1e6)
        bandwidth = self.hardware.infiniband_gb_per_s
        # `hardware_of` has already refused multi-node jobs on hardware without network speeds.
        assert bandwidth
        assert infiniband_share
        sent_ms = outside / (bandwidth * infiniband_share * 1e6)
        return max(within / (nvlink_gb_per_s * 1e6), sent_ms)
