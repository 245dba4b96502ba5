"""The GPU memory that a rank reserves at its peak, by cause.

The prediction is of the `memory` that TorchTitan logs: the bytes that PyTorch's allocator has
reserved. The allocator keeps a pool of blocks for every CUDA stream, and a block never leaves the
pool it was taken for. So the peak is the sum of each pool's own peak, even where they are reached
at different times: FSDP's reduced gradients live in the pool of its reduce-scatter stream, gathered
parameters on their way in that of its all-gather stream, and all else in the compute stream's.
docs/evidence/prediction.md shows the figures beside measured ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.config.options import Options
from cookbook.predict.layer_memory import RankLayers
from cookbook.predict.rank import Rank
from cookbook.predict.shapes import Shapes, shapes_of

GIB = 2**30

# Memory that the allocator holds beyond the counted tensors, in blocks that are cut up: a share of
# the compute stream's pool. The mean of the first points of memory.json was 2.9%. Later ones
# lie at 2 to 9%, on the debug model at 10 to 13% and with an interleaved pipeline at 18%; with
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
# One was measured to take 12% more than predicted, other cells up to 8%.
FITS_PIPELINE = 0.88


@dataclass(frozen=True)
class StageMemory:
    """The peak of the first rank of one pipeline stage (all its ranks being alike), in GiB.

    `terms` are the causes at the peak and add up to `reserved`; `outside` is not PyTorch's.
    """

    rank: int
    moment: str
    terms: Mapping[str, float]
    outside: float

    @property
    def reserved(self) -> float:
        """The `memory` that TorchTitan will log."""
        return sum(self.terms.values())

    @property
    def total(self) -> float:
        return self.reserved + self.outside

    @property
    def largest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def verdict(total_gib: float, gpu_gib: float, options: Options) -> str:
    """Return `fits`, `tight` or `will not fit`."""
    pipelined = options["parallelism.pipeline_parallel_degree"] > 1
    if total_gib <= (FITS_PIPELINE if pipelined else FITS) * gpu_gib:
        return "fits"
    return "tight" if total_gib <= WILL_NOT_FIT * gpu_gib else "will not fit"


def predict_memory(cell: Cell, rank: Rank) -> StageMemory:
    """Predict the peak of `rank`."""
    shapes, variables = shapes_of(cell, rank), cell.environment
    layers = RankLayers(cell, rank, shapes)
    state, kept = _state(cell, rank), _kept(rank, layers, shapes)
    # Expandable segments map pages, so that all free memory is one block.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    expandable = any("expandable_segments:True" in variables.get(name, "") for name in names)
    moments = {
        "the loss": {**_loss(rank, shapes, layers, expandable), **kept},
        "a layer's backward": {**layers.backward(), **kept},
        "the optimizer step": {},
    }
    if cell.options["optimizer.implementation"] == "foreach":
        # The multi-tensor Adam makes the square roots of all second moments at once.
        moments["the optimizer step"] = {"optimizer step": state.get("parameters", 0.0)}
    rounds = rank.num_microbatches * rank.gradient_accumulation_steps
    if rounds == 1 and not rank.mixed_precision:
        gradients = state.pop("gradients (not sharded)")
        moments["a layer's backward"] = layers.backward_alone()
        moments["the optimizer step"]["gradients (not sharded)"] = gradients
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    compute = {**state, **moments[moment]}
    gpu = cell.cluster.gpu
    if gpu:
        workspace = CUBLAS_BYTES_SM90 if gpu.compute_capability >= 9 else CUBLAS_BYTES
        compute["cuBLAS workspaces"] = float(CUBLAS_THREADS * workspace)
    fragments = FRAGMENTS_EXPANDABLE if expandable else FRAGMENTS
    terms = {**compute, "fragments": sum(compute.values()) * fragments}
    if rank.mixed_precision:
        # The pools of FSDP's streams: gradients, and the gathered module in use and the prefetched
        # one. A group of one rank copies without a stream.
        offloads = cell.options["training.enable_cpu_offload"]
        terms["gradients"] = float((max if offloads else sum)(unit.size for unit in rank.units))
        gathered = sorted(unit.gathered for unit in rank.units if unit.shards > 1)
        terms["all-gather stream"] = float(sum(gathered[-2:]) * shapes.act)
    if shapes.deepep:
        # DeepEP's own stream: received, combined, and the gradient of one of them.
        received = shapes.sent_tokens * shapes.ranks_per_token * shapes.dim * shapes.act
        terms["dispatch stream"] = 3.0 * received
    return StageMemory(
        rank=rank.rank,
        moment=moment,
        terms={name: size / GIB for name, size in terms.items() if size >= 1},
        outside=_outside_gib(rank, shapes) if gpu else 0.0,
    )


def state_gib(rank: Rank) -> float:
    """Return parameters, gradients and Adam's two moments, in the parameters' own precision."""
    return 4 * rank.stored_bytes / GIB


def _state(cell: Cell, rank: Rank) -> dict[str, float]:
    """Return the permanent state: parameters, Adam's moments and, without FSDP, gradients."""
    if cell.options["training.enable_cpu_offload"]:
        return {}
    stored = float(rank.stored_bytes)
    terms = {"parameters": stored, "optimizer state": 2 * stored}
    if not rank.mixed_precision:
        terms["gradients (not sharded)"] = stored
    return terms


def _kept(rank: Rank, layers: RankLayers, shapes: Shapes) -> dict[str, float]:
    """Return memory that forwards keep for their backwards, and a pipeline from step to step."""
    if rank.num_stages == 1:
        return {"activations": float(layers.kept(rank.parts[0]))}
    hidden = shapes.hidden_bytes
    output = shapes.tokens * shapes.vocab * shapes.act
    if shapes.loss_tokens is not None:
        # Hidden states in the place of logits; the loss of each microbatch has its gradients.
        output = shapes.tokens * shapes.dim * shapes.act + int(_loss_gradients(shapes))
    kept = [layers.kept(part) for part in rank.parts]

    def in_flight(counts: Sequence[int]) -> float:
        """Return the bytes that `counts` microbatches of each stage keep."""
        return sum(
            count * size + (max(count - 1, 0) * output if part.head else count * hidden)
            for count, size, part in zip(counts, kept, rank.parts, strict=True)
        )

    terms = {
        "activations": float(max(map(in_flight, rank.in_flight))),
        # PipelineStage allocates its receive buffers once for every microbatch of a step.
        "pipeline receive buffers": rank.neighbours * rank.num_microbatches * hidden,
    }
    if rank.mixed_precision:
        # Between a pipeline's microbatches FSDP neither reshards parameters nor reduces gradients
        # (`backward_maybe_with_nosync`), which grow in the reduction's precision.
        gathered = [part.gathered for part in rank.parts]
        # _add_unshard_reshard keeps at most three stages unsharded.
        terms["gathered parameters"] = float(sum(sorted(gathered)[-3:]) * shapes.act)
        terms["unreduced gradients"] = float(sum(gathered) * shapes.grad)
    return terms


def _loss(rank: Rank, s: Shapes, layers: RankLayers, expandable: bool) -> dict[str, float]:
    """Return the terms from the output layer to the gradient of its input.

    With `loss.num_chunks` the logits of a chunk exist at a time (titan/common/chunked_loss.py).
    """
    if not any(part.head for part in rank.parts):
        return {}
    hidden = 3.0 * s.sequence_tokens
    if s.loss_tokens is None:
        elements = float(s.tokens * s.vocab)
        if s.loss_compiled and s.loss_parallel:
            # Logits, and in FP32 what a scatter writes -1 into, at each label, and its sum with the
            # softmax: `loss_parallel`'s formula scatters, and Inductor does not fuse over that.
            size = s.act + 8
        elif s.loss_compiled:
            # Fused: the logits and their gradient, both in the model's precision.
            size = 2 * s.act
        else:
            # Eager, in FP32: log-softmax, its gradient and the loss's gradient; in parallel
            # log-softmax, the scattered labels, softmax and their sum.
            size = 16 if s.loss_parallel else 12
            # A pipeline's stage keeps its output, else the logits are gone by then.
            size += s.act if rank.num_stages > 1 else 0
        logits = elements * size
        # The gathered weight and its gradient, before it is reduced.
        weight = 2.0 * sum(unit.gathered for unit in rank.units if unit.name == "output")
    else:
        elements = float(s.loss_tokens * s.vocab)
        gradients = _loss_gradients(s)
        # Eager, the passes over a chunk make three tensors in FP32. Backward has no logits any
        # more, and writes the scaled gradients in the model's precision.
        chunk = elements * (s.act if s.loss_compiled else s.act + 12)
        logits = gradients + max(chunk, gradients / 4 * s.act)
        weight = float(s.vocab * s.dim)
        if s.sequence_tokens < s.tokens:
            # Gathered over the TP ranks, which share the vocabulary.
            hidden += s.tokens
    terms = {"logits and loss": logits, "last hidden states": hidden * s.dim * s.act}
    if rank.mixed_precision and rank.num_stages == 1:
        terms["output layer"] = weight * s.act
    if not expandable:
        terms["layers' freed blocks"] = layers.freed_in_forward(elements * s.act)
    return terms


def _loss_gradients(shapes: Shapes) -> float:
    """Return the gradients of hidden states and output layer that the loss in chunks keeps."""
    return 4.0 * (shapes.tokens + shapes.vocab) * shapes.dim


def _outside_gib(rank: Rank, shapes: Shapes) -> float:
    # `batch` has no traffic of its own, and the world group is one more.
    groups = len(rank.groups.keys() - {"batch"}) + 1
    outside = CONTEXT_GIB + NCCL_GROUP_GIB * groups
    if not shapes.deepep:
        return outside
    # `Config.get_nvl_buffer_size_hint` and its RDMA twin at DeepEP's default configuration: ten
    # channels (20 SMs), 256 tokens of receive queue a channel and NVLink peer, 128 a node.
    token = shapes.dim * 2 + shapes.top_k * 12
    peers, nodes = min(shapes.ep, 8), shapes.ep // 8
    return outside + 10.0 * token * (peers * 256 + (2 * nodes * 128 if nodes > 1 else 0)) / GIB
