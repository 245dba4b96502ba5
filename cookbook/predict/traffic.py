"""What a step of a cell computes and sends: FLOPs, tokens, and bytes over each network.

Bytes are what one GPU sends in one optimizer step, of the rank that sends most. Collectives are
counted as rings that enter a node once and share its network cards (NCCL's); an all-to-all as every
rank with every other. Context parallelism's exchange of keys and values is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.config.cell import Cell
from cookbook.predict.shapes import Shapes, destinations, groups, shapes_of

# MXFP8: a byte an element and a byte of scale for 32 of them.
MXFP8_BYTES = 1 + 1 / 32
EP_BACKENDS = ("standard", "deepep", "mxfp8_a2a")


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends in a step, within its node and out of it."""

    nvlink: float = 0.0
    infiniband: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.nvlink + other.nvlink, self.infiniband + other.infiniband)

    def times(self, count: float) -> Traffic:
        """This, `count` times over."""
        return Traffic(self.nvlink * count, self.infiniband * count)


@dataclass(frozen=True)
class Work:
    """What a step computes and sends. `traffic` is by kind: fsdp, tp, pp, ep/<backend>."""

    parameters: int
    active_parameters: int
    flops_per_token: int
    tokens_per_step: int
    flops_per_gpu_step: float
    traffic: Mapping[str, Traffic]

    def as_mapping(self) -> dict[str, Any]:
        """For JSON; bytes a GPU a step."""
        return {
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "flops_per_token": self.flops_per_token,
            "tokens_per_step": self.tokens_per_step,
            "flops_per_gpu_step": self.flops_per_gpu_step,
            "bytes_per_gpu_step": {
                kind: {"nvlink": round(sent.nvlink), "infiniband": round(sent.infiniband)}
                for kind, sent in self.traffic.items()
            },
        }


@dataclass(frozen=True)
class Group:
    """A communicator: its size, and how many of its members share a node."""

    size: int
    in_node: int

    @classmethod
    def of(cls, size: int, stride: int, ranks_per_node: int) -> Group:
        """Members are `stride` ranks apart."""
        return cls(size, max(1, min(size, ranks_per_node // stride)))

    def gather(self, size: float) -> Traffic:
        """An all-gather to, or a reduce-scatter from, `size` bytes."""
        if self.size == 1:
            return Traffic()
        everything = size * (self.size - 1) / self.size
        outside = size * (self.size - self.in_node) / self.size / self.in_node
        return Traffic(everything - outside if self.in_node > 1 else 0.0, outside)

    def all_to_all(self, size: float) -> Traffic:
        """`size` bytes of rows, spread equally over the members."""
        return Traffic(
            size * (self.in_node - 1) / self.size, size * (self.size - self.in_node) / self.size
        )


def count_work(cell: Cell, views: Sequence[Mapping[str, Any]]) -> Work:
    """The work of one optimizer step."""
    first = views[0]
    layout = cell.layout
    steps = first["gradient_accumulation_steps"]
    sequences = (
        cell.options["training.local_batch_size"] * layout.dp_replicate * layout.dp_shard * steps
    )
    tokens = sequences * cell.options["training.seq_len"]
    sent = [_traffic(cell, view) for view in views]
    busiest = max(
        sent, key=lambda kinds: sum(one.nvlink + one.infiniband for one in kinds.values())
    )
    return Work(
        parameters=first["parameters"]["total"],
        active_parameters=first["parameters"]["active"],
        flops_per_token=first["flops_per_token"],
        tokens_per_step=tokens,
        flops_per_gpu_step=first["flops_per_token"] * tokens / cell.world,
        traffic=busiest,
    )


def _traffic(cell: Cell, view: Mapping[str, Any]) -> dict[str, Traffic]:
    shapes = shapes_of(cell, view)
    layers = [layer for part in view["parts"] for layer in part["layers"]]
    microbatches = view["num_microbatches"] * view["gradient_accumulation_steps"]
    # Each layer runs forward once more where it is recomputed; saved by operator, what came over
    # the network is not sent again.
    is_saved = "communication" in cell.saves
    again = [layer["recomputed"] and not is_saved for layer in layers]
    moe = [repeated for layer, repeated in zip(layers, again, strict=True) if layer["moe"]]
    traffic = {
        "fsdp": _fsdp(cell, view, shapes),
        "tp": _tp(cell, shapes, view, again).times(microbatches),
        "pp": _pp(cell, view, shapes).times(microbatches),
    }
    for backend in EP_BACKENDS:
        once, repeated = _exchange(cell, view, shapes, backend)
        per_microbatch = once.times(len(moe)) + repeated.times(sum(moe))
        traffic[f"ep/{backend}"] = per_microbatch.times(microbatches)
    return traffic


def _fsdp(cell: Cell, view: Mapping[str, Any], shapes: Shapes) -> Traffic:
    layout, per_node = cell.layout, cell.cluster.ranks_per_node
    dense = Group.of(layout.dp_shard * layout.cp, layout.tp, per_node)
    experts = Group.of(
        max(layout.dp_shard * layout.cp * layout.tp // (layout.ep * layout.etp), 1),
        layout.ep * layout.etp,
        per_node,
    )
    stage = layout.dp_shard * layout.cp * layout.tp
    replicas = Group.of(layout.dp_replicate, stage, per_node)
    pipelined = layout.pp > 1
    policy = cell.options["parallelism.fsdp_reshard_after_forward"]
    resharded = policy == "always" or (policy == "default" and not pipelined)
    # A pipeline gathers and reduces once a step, whatever the number of its microbatches.
    rounds = 1 if pipelined else view["gradient_accumulation_steps"]
    total = Traffic()
    for part in view["parts"]:
        for unit in part["units"]:
            group = experts if unit["name"].endswith("moe.experts") and layout.ep > 1 else dense
            gathers = 2 if resharded and not pipelined else 1
            total += group.gather(unit["gathered"] * shapes.act).times(gathers * rounds)
            total += group.gather(unit["gathered"] * shapes.grad).times(rounds)
            # A ring all-reduce is a reduce-scatter and an all-gather.
            total += replicas.gather(unit["local"] * shapes.grad).times(2 * rounds)
    return total


def _tp(cell: Cell, shapes: Shapes, view: Mapping[str, Any], again: Sequence[bool]) -> Traffic:
    """Four exchanges of the hidden states a layer and direction; one each around embedding and
    head.
    """
    layout = cell.layout
    group = Group.of(layout.tp, 1, cell.cluster.ranks_per_node)
    one = group.gather(shapes.tokens * shapes.dim * shapes.act)
    ends = sum(2 * part["embedding"] + 2 * part["head"] for part in view["parts"])
    return one.times(8 * len(again) + 4 * sum(again) + ends)


def _pp(cell: Cell, view: Mapping[str, Any], shapes: Shapes) -> Traffic:
    last = view["num_stages"] - 1
    sends = sum((stage < last) + (stage > 0) for stage in view["stages"])
    size = float(sends * shapes.sequence_tokens * shapes.dim * shapes.act)
    if cell.layout.stage_ranks >= cell.cluster.ranks_per_node:
        return Traffic(infiniband=size)
    return Traffic(nvlink=size)


def _exchange(
    cell: Cell, view: Mapping[str, Any], shapes: Shapes, backend: str
) -> tuple[Traffic, Traffic]:
    """One MoE layer's dispatches and combines in a step, and what recomputation adds."""
    layout = cell.layout
    group = Group.of(layout.ep, layout.etp, cell.cluster.ranks_per_node)
    if layout.ep == 1:
        return Traffic(), Traffic()
    high, low = float(shapes.act), MXFP8_BYTES
    if backend == "deepep":
        one = deepep_traffic(cell, view, shapes, group)
        # Rows whose activations were scored are sent to their experts again, and not back.
        return one.times(4), one.times(1 if shapes.scored_activations else 2)
    elements = float(shapes.sent_rows * shapes.dim)
    widths = [high] * 4
    if backend == "mxfp8_a2a":
        # Dispatch in the forward and combine's gradient in the backward are quantized.
        widths = [low, high, low, high]
    return group.all_to_all(elements * sum(widths)), group.all_to_all(elements * sum(widths[:2]))


def deepep_traffic(cell: Cell, view: Mapping[str, Any], shapes: Shapes, group: Group) -> Traffic:
    """A token crosses the network once for each other node, and NVLink once for each other rank."""
    nodes = max(shapes.ep // group.in_node, 1)
    forced = cell.options["debug.moe_force_load_balance"]
    limited = groups(view["model"])
    visited = destinations(shapes.num_experts, shapes.top_k, nodes, forced, limited)
    size = float(shapes.sent_tokens * shapes.dim * shapes.act)
    remote = visited * (nodes - 1) / nodes
    # On arrival a token goes on over NVLink unless its rank is the one that took it in.
    within = shapes.ranks_per_token * (group.in_node - 1) / group.in_node
    return Traffic(size * within, size * remote)
