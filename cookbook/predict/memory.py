"""The GPU memory that a rank reserves at its peak, by cause.

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

from cookbook.config.cell import Cell
from cookbook.config.options import Options
from cookbook.predict.layer_memory import RankLayers
from cookbook.predict.shapes import Shapes, shapes_of

GIB = 2**30

# What the allocator holds beyond what is counted, as a part of the compute stream's pool: blocks
# that are cut up. The mean of the first points of docs/memory.json was 2.9%. Those measured since
# then lie at 2 to 9%, on the debug model at 10 to 13% and with an interleaved pipeline at 18%; with
# expandable segments, which map pages instead, at 0 and 5%.
FRAGMENTS = 0.03
FRAGMENTS_EXPANDABLE = 0.01
# PyTorch gives cuBLAS a workspace for each thread that multiplies: forward's and autograd's.
CUBLAS_THREADS = 2
CUBLAS_BYTES, CUBLAS_BYTES_SM90 = (2 * 4096 + 8 * 16) * 2**10, 32 * 2**20
# CUDA's context, cuBLAS and the kernels that are loaded; outside PyTorch's allocator.
CONTEXT_GIB = 0.7
# Buffers of one NCCL communicator (channels times protocols), outside the allocator too.
NCCL_GROUP_GIB = 0.25
# The part of the GPU up to which a cell fits well, and beyond which it surely does not: the model
# errs by several percent, so in between the answer is `tight`.
FITS, WILL_NOT_FIT = 0.92, 1.05
# One was measured to take 12% more than predicted, other cells up to 8% (docs/memory.md).
FITS_PIPELINE = 0.88


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


def verdict(total_gib: float, gpu_gib: float, options: Options) -> str:
    """`fits`, `tight` or `will not fit`."""
    pipelined = options["parallelism.pipeline_parallel_degree"] > 1
    if total_gib <= (FITS_PIPELINE if pipelined else FITS) * gpu_gib:
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
    layers = RankLayers(cell, view, shapes)
    state = _state(cell, view)
    kept = _kept(view, layers, shapes)
    expandable = _is_expandable(environment or cell.environment)
    moments = {
        "the loss": {**_loss(view, shapes, layers, expandable), **kept},
        "a layer's backward": {**layers.backward(), **kept},
        "the optimizer step": _optimizer_step(cell, state),
    }
    if expandable and _fills_gradients(view):
        # Without it blocks of the last step's gradients are of no use to the next forward.
        gradients = state.pop("gradients (not sharded)")
        moments["a layer's backward"] = layers.backward_alone()
        moments["the optimizer step"]["gradients (not sharded)"] = gradients
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    compute = {**state, **moments[moment]}
    if cell.cluster.gpu:
        recent = cell.cluster.gpu.compute_capability >= 9
        workspace = CUBLAS_BYTES_SM90 if recent else CUBLAS_BYTES
        compute["cuBLAS workspaces"] = float(CUBLAS_THREADS * workspace)
    reduced, on_the_way = _fsdp_streams(cell, view, shapes)
    terms = {
        **compute,
        "fragments": sum(compute.values()) * (FRAGMENTS_EXPANDABLE if expandable else FRAGMENTS),
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


def _fills_gradients(view: Mapping[str, Any]) -> bool:
    """Whether a rank without FSDP makes its gradients in one backward."""
    rounds = view["num_microbatches"] * view["gradient_accumulation_steps"]
    return not view["mixed_precision"] and bool(rounds == 1)


def _units(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [unit for part in view["parts"] for unit in part["units"]]


def _state(cell: Cell, view: Mapping[str, Any]) -> dict[str, float]:
    """What is there all the time: parameters, Adam's moments and, without FSDP, gradients."""
    if cell.options["training.enable_cpu_offload"]:
        return {}
    stored = float(sum(unit["local"] * unit["bytes"] for unit in _units(view)))
    terms = {"parameters": stored, "optimizer state": 2 * stored}
    if not view["mixed_precision"]:
        terms["gradients (not sharded)"] = stored
    return terms


def _kept(view: Mapping[str, Any], layers: RankLayers, shapes: Shapes) -> dict[str, float]:
    """What forwards leave for their backwards, and what a pipeline keeps from step to step."""
    hidden = shapes.sequence_tokens * shapes.dim * shapes.act
    output = shapes.tokens * shapes.vocab * shapes.act
    if shapes.loss_tokens is not None:
        # Hidden states in the place of logits; the loss of each microbatch has its gradients.
        output = shapes.tokens * shapes.dim * shapes.act + int(_loss_gradients(shapes))
    if view["num_stages"] == 1:
        return {"activations": float(layers.kept(0))}
    in_flight: Sequence[Sequence[int]] = view["in_flight"]
    kept = max(
        sum(
            count * (layers.kept(index) + (0 if part["head"] else hidden))
            + (max(count - 1, 0) * output if part["head"] else 0)
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


def _loss(
    view: Mapping[str, Any], shapes: Shapes, layers: RankLayers, expandable: bool
) -> dict[str, float]:
    """From the output layer to the gradient of its input."""
    if not any(part["head"] for part in view["parts"]):
        return {}
    if shapes.loss_tokens is not None:
        return _chunked_loss(view, shapes, layers, expandable)
    elements = float(shapes.tokens * shapes.vocab)
    weight = sum(unit["gathered"] for unit in _units(view) if unit["name"] == "output")
    terms = {"logits and loss": elements * _loss_bytes(view, shapes)}
    if view["mixed_precision"] and view["num_stages"] == 1:
        # The gathered weight and its gradient, before it is reduced.
        terms["output layer"] = float(weight * 2 * shapes.act)
    terms["last hidden states"] = 3.0 * shapes.sequence_tokens * shapes.dim * shapes.act
    if not expandable:
        terms["layers' freed blocks"] = layers.freed_in_forward(elements * shapes.act)
    return terms


def _chunked_loss(
    view: Mapping[str, Any], shapes: Shapes, layers: RankLayers, expandable: bool
) -> dict[str, float]:
    """The same where the logits of a chunk exist at a time (titan/common/chunked_loss.py)."""
    assert shapes.loss_tokens is not None
    chunk = float(shapes.loss_tokens * shapes.vocab)
    # Eager, the passes over a chunk make three tensors in FP32.
    logits = chunk * (shapes.act if shapes.loss_compiled else shapes.act + 12)
    gradients = _loss_gradients(shapes)
    # Backward has no logits any more, and writes the scaled gradients in the model's precision.
    terms = {"logits and loss": gradients + max(logits, gradients / 4 * shapes.act)}
    if view["mixed_precision"] and view["num_stages"] == 1:
        terms["output layer"] = float(shapes.vocab * shapes.dim * shapes.act)
    hidden = 3.0 * shapes.sequence_tokens
    if shapes.sequence_tokens < shapes.tokens:
        # Gathered over the TP ranks, which share the vocabulary.
        hidden += shapes.tokens
    terms["last hidden states"] = hidden * shapes.dim * shapes.act
    if not expandable:
        terms["layers' freed blocks"] = layers.freed_in_forward(chunk * shapes.act)
    return terms


def _loss_gradients(shapes: Shapes) -> float:
    """Of hidden states and output layer, in FP32, which the loss in chunks takes in its forward."""
    return 4.0 * (shapes.tokens + shapes.vocab) * shapes.dim


def _loss_bytes(view: Mapping[str, Any], shapes: Shapes) -> int:
    """Bytes for each logit that this rank has, at the fullest moment."""
    if shapes.loss_compiled and shapes.loss_parallel:
        # Logits, and in FP32 what a scatter writes -1 into, at each label, and its sum with the
        # softmax: the formula of `loss_parallel` scatters, and Inductor does not fuse over that.
        return shapes.act + 8
    if shapes.loss_compiled:
        # Fused: the logits and their gradient, both in the model's precision.
        return 2 * shapes.act
    # Eager, in FP32. A pipeline's stage keeps its output, else the logits are gone by then.
    kept = shapes.act if view["num_stages"] > 1 else 0
    # Log-softmax, its gradient and the loss's gradient; with `loss_parallel` log-softmax, the
    # scattered labels, softmax and their sum.
    return (16 if shapes.loss_parallel else 12) + kept


def _optimizer_step(cell: Cell, state: Mapping[str, float]) -> dict[str, float]:
    implementation = cell.options["optimizer.implementation"]
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
    if cell.options["training.enable_cpu_offload"]:
        gradients = float(max(unit["local"] * unit["bytes"] for unit in units))
    # The one in use and the one that is prefetched; a group of one rank copies without a stream.
    layers = [u["gathered"] * shapes.act for u in units if u["shards"] > 1]
    return gradients, float(sum(sorted(layers)[-2:]))


def _is_expandable(environment: Mapping[str, str]) -> bool:
    """Whether the allocator maps pages behind one another, so that what is free is one block."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:True" in environment.get(name, "") for name in names)


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
