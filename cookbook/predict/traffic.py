"""The bytes that a GPU sends over NVLink and InfiniBand, and the time to send them.

NCCL is assumed to use rings for gathers and reductions. Each ring enters a node once, and the rings
share the node's network cards equally. In an all-to-all, every rank sends directly to every other
rank. The traffic of context parallelism is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.predict.hardware import Hardware
from cookbook.predict.operators import Unit
from cookbook.predict.rank import Rank, count_parameters, model_of
from cookbook.predict.shapes import Shapes

# MXFP8: one byte per element, and one byte of scale per 32 elements.
MXFP8_BYTES = 1 + 1 / 32


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends within its node (NVLink) and to other nodes (InfiniBand)."""

    nvlink: float = 0.0
    infiniband: float = 0.0


@dataclass(frozen=True)
class Links:
    """The traffic of each kind of communication operation, for one microbatch, and its time.

    Times are in ms, as if nothing overlapped.
    """

    cell: Cell
    shapes: Shapes
    hardware: Hardware

    def _in_node(self, ranks: int, stride: int) -> int:
        return max(1, min(ranks, self.cell.cluster.ranks_per_node // stride))

    def _gather(self, size: float, ranks: int, stride: int) -> Traffic:
        if ranks == 1:
            return Traffic()
        in_node = self._in_node(ranks, stride)
        outside = size * (ranks - in_node) / ranks / in_node
        return Traffic(size * (ranks - 1) / ranks - outside if in_node > 1 else 0.0, outside)

    def unit(self, unit: Unit) -> tuple[Traffic, Traffic, Traffic]:
        """Return the traffic of an FSDP module: all-gather, reduce-scatter, and half an all-reduce.

        The all-reduce over the replicas consists of a reduce-scatter and an all-gather. Both send
        equally many bytes, so only one is returned, and callers double it.
        """
        layout, s = self.cell.layout, self.shapes
        is_expert = unit.name.endswith("moe.experts")
        group = unit.shards, layout.ep * layout.etp if is_expert else layout.tp
        replicas = layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp
        gather, reduce = (self._gather(unit.gathered * size, *group) for size in (s.act, s.grad))
        return gather, reduce, self._gather(unit.local * s.grad, *replicas)

    @property
    def gathers(self) -> int:
        """All-gathers per module and accumulation round: 2 if FSDP reshards after the forward."""
        return 1 if self.shapes.keeps_gathered else 2

    def tensor(self) -> Traffic:
        """Return the traffic of one gather or one reduction of the hidden states over TP."""
        s = self.shapes
        return self._gather(float(s.tokens * s.dim * s.act), self.cell.layout.tp, 1)

    def stage(self) -> Traffic:
        """Return the traffic of sending the hidden states to the next pipeline stage."""
        if self.cell.layout.stage_ranks >= self.cell.cluster.ranks_per_node:
            return Traffic(infiniband=self.shapes.hidden_bytes)
        return Traffic(nvlink=self.shapes.hidden_bytes)

    def all_to_all(self, width: float) -> Traffic:
        """Return the traffic of a balanced dispatch or combine; `width`: bytes per element."""
        s, ep = self.shapes, self.cell.layout.ep
        in_node, size = self._in_node(ep, self.cell.layout.etp), s.sent_rows * s.dim * width
        return Traffic(size * (in_node - 1) / ep, size * (ep - in_node) / ep)

    def deepep(self) -> Traffic:
        """Return the traffic of one DeepEP dispatch or combine."""
        layout, s = self.cell.layout, self.shapes
        in_node = self._in_node(layout.ep, layout.etp)
        nodes = max(layout.ep // in_node, 1)
        size = float(s.sent_tokens * s.dim * s.act)
        within = s.ranks_per_token * (in_node - 1) / in_node
        return Traffic(size * within, size * s.nodes_per_token * (nodes - 1) / nodes)

    def expert_exchanges_ms(self) -> float:
        """Return the time of a layer's dispatch and combine; their gradients take as long."""
        if self.shapes.ep == 1:
            return 0.0
        if self.shapes.deepep:
            return 2 * self.deepep_ms()
        is_quantized = self.cell.facts.exchange.is_quantized
        widths = (MXFP8_BYTES if is_quantized else self.shapes.act, self.shapes.act)
        hw = self.hardware
        speeds = hw.nvlink_gb_per_s * hw.all_to_all_nvlink_share, hw.all_to_all_infiniband_share
        sent_ms = (self._ms(self.all_to_all(width), *speeds) for width in widths)
        return sum(hw.all_to_all_latency_ms + one_ms for one_ms in sent_ms)

    def deepep_ms(self, chunks: int = 1) -> float:
        """Return the time that DeepEP takes to dispatch (or combine) one of `chunks` chunks."""
        hw = self.hardware
        sent_ms = self._ms(self.deepep(), hw.deepep_nvlink_gb_per_s, hw.deepep_infiniband_share)
        return hw.deepep_latency_ms + sent_ms / chunks

    def unit_ms(self, unit: Unit, beside_compute: bool = False) -> tuple[float, float]:
        """Return the time of an FSDP module's all-gather, and that of its gradient reduction."""
        gather, reduce, replicas = (self.nccl_ms(sent, beside_compute) for sent in self.unit(unit))
        return gather, reduce + 2 * replicas

    def nccl_ms(self, sent: Traffic, beside_compute: bool = False) -> float:
        """Return the time that NCCL needs for the traffic `sent`."""
        hw = self.hardware
        share = hw.nccl_beside_compute_share if beside_compute else hw.nccl_nvlink_share
        return self._ms(sent, hw.nvlink_gb_per_s * share, hw.nccl_infiniband_share)

    def _ms(self, sent: Traffic, nvlink_gb_per_s: float, infiniband_share: float | None) -> float:
        within = sent.nvlink / (nvlink_gb_per_s * 1e6)
        if not sent.infiniband:
            return within
        bandwidth = self.hardware.infiniband_gb_per_s
        # `hardware_of` has already refused multi-node jobs on hardware without network speeds.
        assert bandwidth
        assert infiniband_share
        return max(within, sent.infiniband / (bandwidth * infiniband_share * 1e6))


@dataclass(frozen=True)
class Work:
    """The parameters of the model, and the work of an optimizer step."""

    parameters: int
    active_parameters: int
    flops_per_token: int
    tokens_per_step: int
    flops_per_gpu_step: float


def count_work(cell: Cell, ranks: Sequence[Rank]) -> Work:
    """Return the parameters, and the FLOPs of a token and of a step."""
    model, seq_len = model_of(cell), cell.facts.seq_len
    batch = cell.facts.local_batch * ranks[0].gradient_accumulation_steps
    tokens = batch * cell.layout.replicas * seq_len
    parameters, active = count_parameters(model)
    # Count FLOPs as TorchTitan does: no embedding, and attention over the whole sequence.
    scores = model.n_layers * model.heads * (model.nope + model.rope + model.v_head) * seq_len
    flops = 6 * (active - model.vocab * model.dim + scores)
    return Work(
        parameters=parameters,
        active_parameters=active,
        flops_per_token=flops,
        tokens_per_step=tokens,
        flops_per_gpu_step=flops * tokens / cell.world,
    )
