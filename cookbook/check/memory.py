"""In: a rank as TorchTitan built it, and its cell. Out: the GPU memory it reserves at its peak, by
cause.

What is predicted is what TorchTitan logs as `memory`: the bytes that PyTorch's allocator has
reserved. The allocator keeps a pool of blocks for every CUDA stream, and a block never leaves the
pool it was taken for. So the peak is the sum of each pool's own peak, even where they are reached
at different times: FSDP's reduced gradients live in the pool of its reduce-scatter stream, gathered
parameters on their way in that of its all-gather stream, and all else in the compute stream's.
docs/memory.md shows the figures beside measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.cell import Cell
from cookbook.check.layers import LayerBytes, layer_bytes
from cookbook.check.shapes import Shapes, shapes_of

GIB = 2**30

# What the allocator holds beyond what is in use, as a part of the compute stream's pool: freed
# blocks that are cut up and fit nothing large. Expandable segments map pages instead, and keep
# less.
FRAGMENTS = 0.03
FRAGMENTS_EXPANDABLE = 0.01
# CUDA's context, cuBLAS and the kernels that are loaded; outside PyTorch's allocator.
CONTEXT_GIB = 0.7
# Buffers of one NCCL communicator (channels times protocols), outside the allocator too.
NCCL_GROUP_GIB = 0.25
# The part of the GPU up to which a cell fits well, and beyond which it surely does not: the model
# errs by several percent, so in between the answer is `tight`.
FITS, WILL_NOT_FIT = 0.92, 1.05


@dataclass(frozen=True)
class StageMemory:
    """The peak of the first rank of one pipeline stage (of one rank of it, all being alike); GiB.

    `terms` are the causes at the peak and add up to `reserved`; `outside` is not PyTorch's.
    """

    rank: int
    moment: str
    terms: Mapping[str, float]
    outside: float

    @property
    def reserved(self) -> float:
        """What TorchTitan will log as `memory`."""
        return sum(self.terms.values())

    @property
    def total(self) -> float:
        """What the GPU must have."""
        return self.reserved + self.outside

    @property
    def largest(self) -> str:
        """The cause that takes most."""
        return max(self.terms, key=lambda name: self.terms[name])


def verdict(total_gib: float, gpu_gib: float) -> str:
    """`fits`, `tight` or `will not fit`."""
    if total_gib <= FITS * gpu_gib:
        return "fits"
    return "tight" if total_gib <= WILL_NOT_FIT * gpu_gib else "will not fit"


def predict_memory(
    cell: Cell, view: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> StageMemory:
    """The peak of the rank that `view` (`rank_view.view_rank`'s answer) describes.

    Args:
        environment: what the job exports, where that is not the cell's own.
    """
    shapes = shapes_of(cell, view)
    layers = _Layers(cell, view, shapes)
    state = _state(cell, view)
    kept = _kept(view, layers, shapes)
    moments = {
        "the loss": _loss(cell, view, shapes),
        "a layer's backward": layers.backward(),
        "the optimizer step": _optimizer_step(cell, state),
    }
    moment = max(moments, key=lambda name: _needed(name, moments[name], kept))
    compute = {**state, **moments[moment]}
    if moment != "the optimizer step":
        compute |= kept
    reduced, on_the_way = _fsdp_streams(cell, view, shapes)
    terms = {
        **compute,
        "fragments": sum(compute.values()) * _fragments(environment or cell.environment),
        "gradients": reduced,
        "all-gather stream": on_the_way,
        "dispatch stream": layers.dispatched(),
    }
    return StageMemory(
        rank=view["rank"],
        moment=moment,
        terms={name: size / GIB for name, size in terms.items() if size >= 1},
        outside=_outside_gib(view, shapes) if cell.cluster.gpu else 0.0,
    )


def state_gib(view: Mapping[str, Any]) -> float:
    """Parameters, gradients and Adam's two moments, in the parameters' own precision."""
    return float(sum(4 * unit["local"] * unit["bytes"] for unit in _units(view)) / GIB)


def _needed(moment: str, terms: Mapping[str, float], kept: Mapping[str, float]) -> float:
    return sum(terms.values()) + (0 if moment == "the optimizer step" else sum(kept.values()))


def _units(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [unit for part in view["parts"] for unit in part["units"]]


def _option(cell: Cell, name: str) -> Any:
    return cell.stack.value(cell.options, name)


def _state(cell: Cell, view: Mapping[str, Any]) -> dict[str, float]:
    """What is there all the time: parameters, Adam's moments and, without FSDP, gradients."""
    if _option(cell, "training.enable_cpu_offload"):
        return {}
    stored = float(sum(unit["local"] * unit["bytes"] for unit in _units(view)))
    terms = {"parameters": stored, "optimizer state": 2 * stored}
    if not view["mixed_precision"]:
        terms["gradients (not sharded)"] = stored
    return terms


def _kept(view: Mapping[str, Any], layers: _Layers, shapes: Shapes) -> dict[str, float]:
    """What forwards leave for their backwards, and what a pipeline keeps from step to step."""
    hidden = shapes.sequence_tokens * shapes.dim * shapes.act
    logits = shapes.tokens * shapes.vocab * shapes.act
    if view["num_stages"] == 1:
        return {"activations": float(layers.kept(0))}
    in_flight: Sequence[Sequence[int]] = view["in_flight"]
    kept = max(
        sum(
            count * (layers.kept(index) + (0 if part["head"] else hidden))
            + (max(count - 1, 0) * logits if part["head"] else 0)
            for index, (count, part) in enumerate(zip(counts, view["parts"], strict=True))
        )
        for counts in in_flight
    )
    last = view["num_stages"] - 1
    receiving = sum((stage > 0) + (stage < last) for stage in view["stages"])
    terms = {
        "activations": float(kept),
        # PipelineStage allocates what it will receive once for every microbatch of a step.
        "pipeline receive buffers": float(receiving * view["num_microbatches"] * hidden),
    }
    if view["mixed_precision"]:
        # Between a pipeline's microbatches FSDP neither reshards parameters nor reduces gradients
        # (`backward_maybe_with_nosync`), which grow in the reduction's precision.
        gathered = [sum(unit["gathered"] for unit in part["units"]) for part in view["parts"]]
        # _add_unshard_reshard keeps at most three stages unsharded.
        terms["gathered parameters"] = float(sum(sorted(gathered)[-3:]) * shapes.act)
        terms["unreduced gradients"] = float(sum(gathered) * shapes.grad)
    return terms


def _loss(cell: Cell, view: Mapping[str, Any], shapes: Shapes) -> dict[str, float]:
    """From the output layer to the gradient of its input."""
    if not any(part["head"] for part in view["parts"]):
        return {}
    elements = float(shapes.tokens * shapes.vocab)
    weight = sum(unit["gathered"] for unit in _units(view) if unit["name"] == "output")
    if shapes.loss_compiled:
        # Fused: the logits and their gradient, both in the model's precision.
        terms = {"logits and loss": 2 * elements * shapes.act}
    else:
        # Eager cross-entropy: log-softmax, its gradient and the loss's gradient in FP32; a
        # pipeline's stage keeps its output, else the logits themselves are gone by then.
        kept = shapes.act if view["num_stages"] > 1 else 0
        terms = {"logits and loss": elements * (12 + kept)}
    if view["mixed_precision"] and view["num_stages"] == 1:
        # The gathered weight and its gradient, before it is reduced.
        terms["output layer"] = float(weight * 2 * shapes.act)
    terms["last hidden states"] = 3.0 * shapes.sequence_tokens * shapes.dim * shapes.act
    return terms


def _optimizer_step(cell: Cell, state: Mapping[str, float]) -> dict[str, float]:
    implementation = _option(cell, "optimizer.implementation")
    if implementation == "foreach":
        # The multi-tensor Adam makes the square roots of all second moments at once.
        return {"optimizer step": state.get("parameters", 0.0)}
    return {}


def _fsdp_streams(cell: Cell, view: Mapping[str, Any], shapes: Shapes) -> tuple[float, float]:
    """Bytes in the pools of FSDP's reduce-scatter and all-gather streams."""
    if not view["mixed_precision"]:
        return 0.0, 0.0
    units = _units(view)
    gradients = float(sum(unit["local"] * unit["bytes"] for unit in units))
    if _option(cell, "training.enable_cpu_offload"):
        gradients = float(max(unit["local"] * unit["bytes"] for unit in units))
    # The one in use and the one that is prefetched; a group of one rank copies without a stream.
    layers = [u["gathered"] * shapes.act for u in units if u["shards"] > 1]
    return gradients, float(sum(sorted(layers)[-2:]))


def _fragments(environment: Mapping[str, str]) -> float:
    settings = [
        environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ]
    expandable = any("expandable_segments:True" in setting for setting in settings)
    return FRAGMENTS_EXPANDABLE if expandable else FRAGMENTS


def _outside_gib(view: Mapping[str, Any], shapes: Shapes) -> float:
    # `batch` has no traffic of its own, and the world group is one more.
    groups = [name for name in view["groups"] if name != "batch"]
    buffers = _deepep_buffers(shapes) / GIB if shapes.deepep else 0.0
    return CONTEXT_GIB + NCCL_GROUP_GIB * (len(groups) + 1) + buffers


def _deepep_buffers(shapes: Shapes) -> float:
    """`Config.get_nvl_buffer_size_hint` and its RDMA twin at DeepEP's default configuration.

    Ten channels (20 SMs), 256 tokens of receive queue a channel and NVLink peer, 128 a node.
    """
    token = shapes.dim * 2 + shapes.top_k * 12
    peers, nodes = min(shapes.ep, 8), shapes.ep // 8
    return 10.0 * token * (peers * 256 + (2 * nodes * 128 if nodes > 1 else 0))


class _Layers:
    """The layers of a rank's parts: what each keeps, and what the largest needs while it works."""

    def __init__(self, cell: Cell, view: Mapping[str, Any], shapes: Shapes) -> None:
        self._cell, self._view, self._shapes = cell, view, shapes
        self._bytes = {moe: layer_bytes(shapes, moe) for moe in (False, True)}

    def _cost(self, layer: Mapping[str, Any]) -> tuple[LayerBytes, float, float]:
        """The layer, what it keeps, and what comes back when it is recomputed."""
        cost = self._bytes[layer["moe"]]
        mode = _option(self._cell, "activation_checkpoint.mode")
        everything = cost.input + cost.saved
        if mode == "memory_budget":
            budget = _option(self._cell, "activation_checkpoint.memory_budget")
            return cost, cost.input + budget * cost.saved, (1 - budget) * cost.saved
        if mode == "none" or not layer["recomputed"]:
            return cost, everything, 0.0
        by_operation = _option(self._cell, "activation_checkpoint.selective_ac_option") == "op"
        if mode == "selective" and by_operation:
            return cost, cost.input + cost.selected, cost.saved - cost.selected_of_saved
        return cost, cost.input, cost.saved

    def kept(self, part: int) -> float:
        """Bytes that a microbatch leaves in part `part`."""
        return sum(self._cost(layer)[1] for layer in self._view["parts"][part]["layers"])

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
