"""The GPU memory that a rank reserves at its peak, by cause.

This predicts the `memory` that TorchTitan logs: the bytes that PyTorch's allocator has reserved.
The allocator keeps a pool of blocks for every CUDA stream, and a block never leaves its pool. So
the total peak is the sum of the pools' peaks, even if they occur at different times. The pool of
FSDP's reduce-scatter stream holds reduced gradients, and the pool of its all-gather stream holds
gathered parameters. DeepEP's pool holds exchanged tokens, the compute stream's pool the rest.
docs/evidence/prediction.md compares predictions with measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cookbook.config.cell import Cell
from cookbook.config.facts import Facts, Layout
from cookbook.predict.layer_memory import RankLayers
from cookbook.predict.rank import Rank
from cookbook.predict.shapes import Shapes, shapes_of

GIB = 2**30

# Fragmentation: memory that the allocator reserves beyond the counted tensors, as a share of the
# compute stream's pool. The first measurements in memory.json had 2.9% on average. Later ones had
# 2 to 9%, the debug model 10 to 13%, and an interleaved pipeline 18%. Two runs with expandable
# segments, which are mapped page by page, had 0 and 5%.
FRAGMENTS = 0.03
FRAGMENTS_EXPANDABLE = 0.01
# The main thread and the autograd thread each get a cuBLAS workspace from PyTorch.
CUBLAS_THREADS = 2
CUBLAS_BYTES, CUBLAS_BYTES_SM90 = (2 * 4096 + 8 * 16) * 2**10, 32 * 2**20
# The CUDA context, cuBLAS and loaded kernels, which PyTorch's allocator does not manage.
CONTEXT_GIB = 0.7
# The buffers of one NCCL communicator, which PyTorch's allocator does not manage.
NCCL_GROUP_GIB = 0.25
FITS, TIGHT, TOO_LARGE = "fits", "tight", "will not fit"
# The largest predicted peaks that fit or are tight, as shares of the GPU's memory. A tight cell may
# fit, because predictions are off by several percent.
MOST_FITS, MOST_TIGHT = 0.92, 1.05
# MOST_FITS for a cell with a pipeline. It is lower, because one such cell needed 12% more memory
# than predicted.
MOST_FITS_PIPELINE = 0.88


@dataclass(frozen=True)
class StageMemory:
    """The peak memory of a rank in GiB; all ranks at its place in the pipeline need the same.

    `terms` maps each cause to its memory; the sum is `reserved`. `outside` is memory that PyTorch's
    allocator does not manage.
    """

    rank: int
    moment: str
    terms: Mapping[str, float]
    outside: float

    @property
    def reserved(self) -> float:
        """The peak of the memory that PyTorch reserves, which TorchTitan logs as `memory`."""
        return sum(self.terms.values())

    @property
    def total(self) -> float:
        return self.reserved + self.outside

    @property
    def largest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def verdict(total_gib: float, gpu_gib: float, facts: Facts) -> str:
    """Return whether the total fits into the GPU's memory: `fits`, `tight` or `will not fit`."""
    if total_gib <= (MOST_FITS_PIPELINE if facts.pp > 1 else MOST_FITS) * gpu_gib:
        return FITS
    return TIGHT if total_gib <= MOST_TIGHT * gpu_gib else TOO_LARGE


def predict_memory(cell: Cell, rank: Rank) -> StageMemory:
    shapes, variables = shapes_of(cell), cell.environment
    layers = RankLayers(cell, rank, shapes)
    state, kept = dict[str, float](), _kept(rank, layers, shapes)
    stored, offloads = float(rank.stored_bytes), cell.facts.cpu_offload
    if not offloads:
        state = {"parameters": stored, "optimizer state": 2 * stored}
        if not shapes.mixed_precision:
            state["gradients (not sharded)"] = stored
    # Expandable segments map pages, so that one tensor can reuse several freed blocks together.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    expandable = any("expandable_segments:True" in variables.get(name, "") for name in names)
    moments = {
        "the loss": {**_loss(rank, shapes, layers, expandable), **kept},
        "a layer's backward": {**layers.backward(), **kept},
        "the optimizer step": {},
    }
    if cell.facts.optimizer == "foreach":
        # The multi-tensor Adam allocates the square roots of all second moments at once.
        moments["the optimizer step"] = {"optimizer step": state.get("parameters", 0.0)}
    rounds = rank.num_microbatches * rank.gradient_accumulation_steps
    if rank.num_stages == 1 and rounds <= 2 and not shapes.mixed_precision and not offloads:
        # The second microbatch turns the first one's gradients into float32, layer by layer.
        gradients, first = state.pop("gradients (not sharded)"), layers.gradients_alone()
        if rounds == 1:
            moments["a layer's backward"] = layers.backward_alone()
        else:
            for name in ("the loss", "a layer's backward"):
                moments[name]["gradients (not sharded)"] = first
        moments["the optimizer step"]["gradients (not sharded)"] = (first, gradients)[rounds - 1]
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    compute = {**state, **moments[moment]}
    gpu = cell.cluster.gpu
    if gpu:
        workspace = CUBLAS_BYTES_SM90 if gpu.compute_capability >= 9 else CUBLAS_BYTES
        compute["cuBLAS workspaces"] = float(CUBLAS_THREADS * workspace)
    fragments = FRAGMENTS_EXPANDABLE if expandable else FRAGMENTS
    terms = {**compute, "fragments": sum(compute.values()) * fragments}
    if shapes.mixed_precision:
        # FSDP holds the gradients after the reduce-scatter, and two all-gathered modules: the one
        # in use and the next. A module with a single shard is not gathered.
        sizes = [unit.size for unit in rank.units]
        terms["gradients"] = float(max(sizes) if offloads else sum(sizes))
        gathered = sorted(unit.gathered for unit in rank.units if unit.shards > 1)
        terms["all-gather stream"] = float(sum(gathered[-2:]) * shapes.act)
    if shapes.deepep:
        # DeepEP's pool holds three tensors at once: received tokens, combined tokens, one gradient.
        received = shapes.sent_tokens * shapes.ranks_per_token * shapes.dim * shapes.act
        terms["dispatch stream"] = 3.0 * received
    return StageMemory(
        rank=rank.rank,
        moment=moment,
        terms={name: size / GIB for name, size in terms.items() if size >= 1},
        outside=_outside_gib(cell.layout, shapes) if gpu else 0.0,
    )


def state_gib(rank: Rank) -> float:
    """Return the GiB of parameters, gradients and Adam's moments, all in the parameters' dtype."""
    return 4 * rank.stored_bytes / GIB


def _kept(rank: Rank, layers: RankLayers, shapes: Shapes) -> dict[str, float]:
    gathered = [part.gathered for part in rank.parts]
    terms = dict[str, float]()
    if shapes.mixed_precision and shapes.keeps_gathered:
        # PyTorch's `_add_unshard_reshard` keeps at most three stages of a pipeline unsharded.
        terms["gathered parameters"] = float(sum(sorted(gathered)[-3:]) * shapes.act)
    if rank.num_stages == 1:
        return terms | {"activations": float(layers.kept(rank.parts[0]))}
    hidden = shapes.hidden_bytes
    output = shapes.tokens * shapes.vocab * shapes.act
    if shapes.loss_tokens is not None:
        # With chunked loss the last stage's output is hidden states. Each microbatch also keeps the
        # loss's gradients (`_loss_gradients`).
        output = shapes.tokens * shapes.dim * shapes.act + int(_loss_gradients(shapes))
    kept = [layers.kept(part) for part in rank.parts]

    def in_flight(counts: Sequence[int]) -> float:
        """Return the bytes of activations if stage i has `counts[i]` microbatches in flight."""
        return sum(
            count * size + (max(count - 1, 0) * output if part.head else count * hidden)
            for count, size, part in zip(counts, kept, rank.parts, strict=True)
        )

    terms |= {
        "activations": float(max(map(in_flight, rank.in_flight))),
        # PipelineStage allocates a receive buffer for every microbatch of a step.
        "pipeline receive buffers": rank.neighbours * rank.num_microbatches * hidden,
    }
    if shapes.mixed_precision:
        # Between a pipeline's microbatches FSDP does not reduce gradients
        # (`backward_maybe_with_nosync`); they accumulate in the reduction's precision.
        terms["unreduced gradients"] = float(sum(gathered) * shapes.grad)
    return terms


def _loss(rank: Rank, s: Shapes, layers: RankLayers, expandable: bool) -> dict[str, float]:
    if not any(part.head for part in rank.parts):
        return {}
    hidden = 3.0 * s.sequence_tokens
    if s.loss_tokens is None:
        elements = float(s.tokens * s.vocab)
        if s.loss_compiled and s.loss_parallel:
            # The loss's backward holds the logits and two FP32 tensors of the same shape: the
            # gradients of the log-softmax and of the logits. Inductor does not fuse these two.
            size = s.act + 8
        elif s.loss_compiled:
            # Fused loss: the logits and their gradient, both in the model's precision.
            size = 2 * s.act
        else:
            # An eager loss holds 3 FP32 tensors of the logits' size, or 4 with loss parallelism.
            size = 16 if s.loss_parallel else 12
            size += s.act if rank.num_stages > 1 else 0
        logits = elements * size
        # Count the gradient of the output layer's weight before FSDP reduces it. Count the gathered
        # weight too, unless FSDP keeps all weights gathered: then `_kept` has counted it already.
        output = sum(unit.gathered for unit in rank.units if unit.name == "output")
        weight = float(output * (1 if s.keeps_gathered else 2))
    else:
        elements = float(s.loss_tokens * s.vocab)
        gradients = _loss_gradients(s)
        # In its forward, the chunked loss holds the logits of one chunk and, in eager mode, three
        # FP32 tensors of the same shape. In its backward, it holds none of these tensors, but
        # scaled copies of the gradients of the hidden states and of the output layer's weight.
        # Count the larger of the two amounts.
        chunk = elements * (s.act if s.loss_compiled else s.act + 12)
        scaled = float(s.tokens * s.dim * s.act + s.vocab * s.dim * (4 if s.autocast else s.act))
        logits = gradients + max(chunk, scaled)
        weight = 0.0 if s.keeps_gathered else float(s.vocab * s.dim)
        if s.sequence_tokens < s.tokens:
            # TP ranks shard the vocabulary, so each of them gathers all hidden states.
            hidden += s.tokens
    terms = {"logits and loss": logits, "last hidden states": hidden * s.dim * s.act}
    if s.mixed_precision and rank.num_stages == 1:
        terms["output layer"] = weight * s.act
    if not expandable:
        terms["layers' freed blocks"] = layers.freed_in_forward(elements * s.act)
    return terms


def _loss_gradients(shapes: Shapes) -> float:
    return 4.0 * (shapes.tokens + shapes.vocab) * shapes.dim


def groups_of(layout: Layout) -> int:
    """Count the NCCL communicators that a rank uses, including that of the whole world."""
    fsdp = layout.dp_shard * layout.cp
    dense = layout.pp, layout.dp_replicate, fsdp, layout.cp, layout.tp, layout.dp_replicate * fsdp
    experts = layout.ep, layout.etp, fsdp * layout.tp // (layout.etp * layout.ep)
    return 1 + sum(size > 1 for size in (*dense, *experts))


def _outside_gib(layout: Layout, shapes: Shapes) -> float:
    outside = CONTEXT_GIB + NCCL_GROUP_GIB * groups_of(layout)
    if not shapes.deepep:
        return outside
    # DeepEP's buffers, sized as in `Config.get_nvl_buffer_size_hint` and its RDMA counterpart: ten
    # channels (20 SMs), each with receive queues of 256 tokens per NVLink peer and 128 per node.
    token = shapes.dim * 2 + shapes.top_k * 12
    peers, nodes = min(shapes.ep, 8), shapes.ep // 8
    return outside + 10.0 * token * (peers * 256 + (2 * nodes * 128 if nodes > 1 else 0)) / GIB
