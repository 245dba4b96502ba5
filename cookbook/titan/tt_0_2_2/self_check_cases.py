"""Test cases for the kernels that a job uses on one rank.

On a GPU the cases have the job's widths, heads and experts, but fewer tokens, so that they take a
few seconds. On a CPU they are smaller and test only the code around the kernels.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torchtitan.distributed import ParallelDims
from torchtitan.models.attention import (
    FlexAttentionWrapper,
    ScaledDotProductAttentionWrapper,
    get_causal_mask_mod,
    get_document_mask_mod,
)
from torchtitan.models.moe.moe import GroupedExperts, MoE
from torchtitan.protocols.model_converter import build_model_converters

from cookbook.titan.common.varlen_attention import bounds_capacity
from cookbook.titan.self_check import (
    Error,
    KernelCase,
    low_precision,
    products,
    rows,
    with_gradients,
)
from cookbook.titan.tt_0_2_2.activity import observe_model
from cookbook.titan.tt_0_2_2.families import FAMILIES
from cookbook.titan.tt_0_2_2.families.parts import FLASH_ATTENTION_4
from cookbook.titan.tt_0_2_2.mxfp8 import Precisions
from cookbook.titan.tt_0_2_2.parallelize import apply_moe_ep_tp
from cookbook.titan.tt_0_2_2.token_shard import shard_of

_NO_OPTION = "no option avoids it; try another torch"
_AVOID = {
    "flex": "set model.attention=flash_attention_4",
    FLASH_ATTENTION_4: "leave out model.attention, or set model.attention=flavor",
    "sdpa": "use a flavor with FlexAttention",
    "grouped GEMM bf16": _NO_OPTION,
    "grouped GEMM mxfp8": "use precision mxfp8_wgrad_hp (for weight gradients) or bf16",
    "linear layer mx": "use precision mxfp8 or bf16",
    "linear layer fp8": "use precision bf16",
    "loss in chunks": "leave out loss.num_chunks",
}


class Limits(NamedTuple):
    """The largest sizes of the test cases on one kind of device."""

    tokens: int
    attention_scores: int
    sequence: int
    heads: int
    rows: int
    linear_rows: int
    packings: tuple[str, ...]


_LIMITS = {
    "cuda": Limits(8192, 1 << 31, 16384, 128, 32768, 4096, ("edges", "whole")),
    "cpu": Limits(96, 1 << 16, 160, 2, 384, 96, ("edges",)),
}


class CheckedCell:
    """The configuration that decides which kernels a rank uses; `device` is `cuda` or `cpu`."""

    def __init__(self, job_config: Any, dims: ParallelDims, model_args: Any, device: str) -> None:
        self.job_config, self.dims, self.model_args = job_config, dims, model_args
        self.device, self.limits = device, _LIMITS[device]
        self.parts = FAMILIES[job_config.model.name]
        self.comm_backend: str = job_config.parallelism.expert_parallel_comm_backend
        self.local_experts: int = model_args.moe_args.num_experts // dims.ep
        cut = dims.tp if dims.ep == 1 else dims.etp
        self.expert_hidden: int = model_args.moe_inter_dim // cut

    def convert(self, model: nn.Module) -> nn.Module:
        build_model_converters(self.job_config, self.dims).convert(model)
        return model


def kernel_cases(cell: CheckedCell) -> list[KernelCase]:
    """Return the cases of all the cell's kernels, in the same order on every rank."""
    makers = (_attention, _grouped_gemms, _linear_layers, _rows, _loss, _exchange)
    return [case for make in makers for case in make(cell)]


def _attention(cell: CheckedCell) -> Iterator[KernelCase]:
    with torch.device("meta"):
        layer: Any = cell.parts.attention(cell.model_args)
    is_flash = cell.job_config.model.attention == FLASH_ATTENTION_4
    kernel = FLASH_ATTENTION_4 if is_flash else cell.model_args.attn_type
    # With context parallelism, each rank runs the same kernel on its shard of each sequence.
    whole = cell.job_config.training.seq_len // cell.dims.cp
    limits = cell.limits
    groups = layer.n_heads // getattr(layer, "n_kv_heads", layer.n_heads)
    heads = max(groups, min(layer.n_heads // cell.dims.tp, limits.heads // groups * groups))
    length = min(whole, limits.sequence)
    while groups * length**2 > 4 * products.SCORES:
        # The reference computes all query heads of one key head at once; cap its scores at 4 GiB.
        length //= 2
    # Sequences per forward: one pipeline microbatch or, without PP, the whole local batch.
    sequences = cell.job_config.training.local_batch_size
    if cell.dims.pp_enabled:
        sequences = cell.job_config.parallelism.pipeline_parallel_microbatch_size
    # Use at least two sequences so that batch-indexing errors show.
    batch = min(sequences, max(2, limits.attention_scores // (heads * length * length)))
    most = sequences * bounds_capacity(0, whole) if is_flash else None
    head_dim, v_head_dim = cell.model_args.sizes().head_dims
    shape = products.AttentionShape(
        batch,
        length,
        heads,
        head_dim,
        v_head_dim,
        scale=getattr(layer, cell.parts.scale),
        groups=groups,
        max_documents=most,
        max_length=whole if is_flash else None,
    )
    attend_by = {"flex": flex, "sdpa": sdpa, FLASH_ATTENTION_4: products.flash_attention_4}[kernel]
    shared = f", {groups} to a key" if groups > 1 else ""
    room = f" in room for {most:,}" if most else ""
    packings = ("whole",) if kernel == "sdpa" else limits.packings
    for packing in packings:
        like_trained = packing == packings[0]
        values = "values as trained" if like_trained else "random values"
        run = partial(
            products.attention_errors, shape, packing, like_trained, attend_by, cell.device
        )
        name = (
            f"{batch} x {length:,} tokens, {heads} heads of {head_dim}/{v_head_dim}{shared}, "
            f"documents: {packing}{room}, {values}"
        )
        yield KernelCase(kernel, name, run, _AVOID[kernel])


def flex(shape: products.AttentionShape, ends: Tensor) -> products.Attend:
    """Return FlexAttention with TorchTitan's mask and options; on a CPU it is not compiled."""
    mask = and_masks(get_causal_mask_mod(), get_document_mask_mod(ends.int(), 1))
    device = ends.device.type
    blocks = create_block_mask(mask, shape.batch, None, shape.length, shape.length, device=device)
    attention: Any = FlexAttentionWrapper() if device == "cuda" else flex_attention
    return _unfolded(shape, partial(attention, block_mask=blocks, scale=shape.scale))


def sdpa(shape: products.AttentionShape, ends: Tensor) -> products.Attend:
    """Return TorchTitan's SDPA. It has no document mask: each document must be a full sequence."""
    return _unfolded(shape, partial(ScaledDotProductAttentionWrapper(), scale=shape.scale))


def _unfolded(shape: products.AttentionShape, attention: Callable[..., Tensor]) -> products.Attend:
    options = {"enable_gqa": True} if shape.groups > 1 else {}

    def attend(*folded: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (shape.batch, -1)).transpose(1, 2) for x in folded)
        return attention(q, k, v, **options).transpose(1, 2).flatten(0, 1)

    return attend


def _grouped_gemms(cell: CheckedCell) -> Iterator[KernelCase]:
    if not cell.model_args.moe_args.use_grouped_mm:
        return
    # Build the experts before reading TOKEN_GROUP_ALIGN_SIZE_M, which their converters set.
    quantization, _ = observe_model([_experts(cell, torch.empty(1, 32, 32, dtype=torch.bfloat16))])
    (kind,) = quantization["grouped_gemms"]
    alignment, experts = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M, cell.local_experts
    if cell.device == "cpu":
        experts = min(experts, 8)
    num_rows, n, k = min(cell.limits.rows, 512 * experts), cell.expert_hidden, cell.model_args.dim
    shapes = [(experts, num_rows, n, k), (experts, num_rows, k, n)]
    if cell.device == "cuda":
        # In a small GEMM, one wrong block scale causes a large relative error.
        shapes.append((9, 700, 384, 256))
    kernel = f"grouped GEMM {kind}"
    avoid = _AVOID.get(kernel, "use precision bf16")

    def multiply(x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor) -> products.Products:
        if kind == "fp8":
            return low_precision.grouped_products(x, weight, offsets, grad)
        leaves: Any = [x.clone(), _experts(cell, weight.clone()).w1]
        out, dx, dw = with_gradients(
            lambda x, w: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets), leaves, grad
        )
        return out, dx, getattr(dw, "_data", dw)

    for experts, num_rows, n, k in shapes:
        sizes = (experts, num_rows, n, k, alignment)
        run = partial(products.grouped_errors, *sizes, kind, multiply, cell.device)
        shape = f"{experts} experts of {n} x {k}, about {num_rows:,} rows"
        yield KernelCase(kernel, shape, run, avoid)
    if kind == "fp8":
        few, top_k = min(experts, 8), min(3, cell.local_experts)
        sizes = (cell.limits.linear_rows // 2, cell.model_args.dim, cell.expert_hidden, few, top_k)
        run = partial(low_precision.layer_errors, *sizes, alignment, cell.device)
        shape = "{:,} tokens of {}, {} experts of {}, top {}".format(*sizes[:2], few, *sizes[2::2])
        yield KernelCase("experts fp8", shape, run, "use precision bf16")


def _experts(cell: CheckedCell, weight: Tensor) -> nn.Module:
    experts, n, k = weight.shape
    with torch.device("meta"):
        module = GroupedExperts(k, n, experts, use_grouped_mm=True)
    module.w1 = nn.Parameter(weight)
    module.w2 = module.w3 = None
    layer = nn.ModuleDict({"moe": nn.ModuleDict({"experts": module})})
    cell.convert(nn.ModuleDict({"layers": nn.ModuleDict({"1": layer})}))
    return module


def _linear_layers(cell: CheckedCell) -> Iterator[KernelCase]:
    # One dense layer and one MoE layer together contain every kind of linear layer.
    # Use deepcopy: `dataclasses.replace` would drop attributes that are not dataclass fields.
    args = deepcopy(cell.model_args)
    args.n_layers, args.n_dense_layers = 2, 1
    with torch.device("meta"):
        model = cell.convert(cell.parts.model(args))
    found: dict[tuple[str, int, int], nn.Linear] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "output":
            quantization, _ = observe_model([layer])
            (kind,) = quantization["linear_layers"]
            found.setdefault((kind, layer.out_features, layer.in_features), layer)
    by_size = sorted(found, key=lambda one: one[1] * one[2])
    if cell.device == "cpu":
        by_size = list({one[0]: one for one in reversed(by_size)}.values())
    num_rows = cell.limits.linear_rows
    for kind, n, k in by_size:
        run = partial(products.linear_errors, found[kind, n, k], num_rows, kind, cell.device)
        kernel = f"linear layer {kind}"
        avoid = _AVOID.get(kernel, _NO_OPTION)
        yield KernelCase(kernel, f"{num_rows:,} rows, {n} x {k}", run, avoid)


def _rows(cell: CheckedCell) -> Iterator[KernelCase]:
    backend = cell.comm_backend
    deepep = backend == "deepep" and cell.dims.ep > 1
    if not deepep and (backend == "deepep" or not cell.job_config.cookbook.row_kernels):
        return
    args, tokens, top_k = cell.model_args, cell.limits.tokens, cell.model_args.moe_args.top_k
    experts = cell.local_experts if deepep else args.moe_args.num_experts
    on_activations = not deepep or cell.job_config.deepep.score_activations
    place = "on the activations" if on_activations else "after the experts"
    avoid = "use EP backend standard" if deepep else "leave out cookbook.row_kernels"
    sizes = (tokens, args.dim, experts, top_k, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
    run = partial(rows.row_errors, *sizes, on_activations, deepep, cell.device)
    shape = f"{tokens:,} tokens of {args.dim}, {experts} experts, top {top_k}, scores {place}"
    yield KernelCase("rows to expert groups and back", shape, run, avoid)
    if not deepep:
        num_rows, hidden = cell.limits.linear_rows, cell.expert_hidden
        run = partial(rows.swiglu_errors, num_rows, hidden, cell.device)
        shape = f"{num_rows:,} rows, hidden size {hidden}"
        yield KernelCase("scored SwiGLU", shape, run, avoid)
        few = min(cell.local_experts, 8)
        run = partial(rows.join_errors, few, hidden, args.dim, cell.device)
        shape = f"{few} experts of {hidden} x {args.dim}"
        yield KernelCase("experts' weights side by side", shape, run, avoid)


def _loss(cell: CheckedCell) -> Iterator[KernelCase]:
    if not (num_chunks := cell.job_config.loss.num_chunks):
        return
    options, args = cell.job_config.compile, cell.model_args
    backend = options.backend if options.enable and "loss" in options.components else None
    mesh = cell.dims.get_optional_mesh("tp")
    group = None if mesh is None else mesh.get_group()
    # Leave the last chunk one token short, to test uneven chunks.
    tokens = max(min(2048, cell.limits.tokens) // num_chunks, 1) * num_chunks - 1
    kernel = "loss in chunks"
    shape = f"{tokens:,} tokens of {args.dim}, {args.vocab_size:,} words, {num_chunks} chunks"
    sizes = (tokens, args.dim, args.vocab_size, num_chunks)
    run = partial(products.loss_errors, *sizes, group, backend, cell.device)
    yield KernelCase(kernel, shape, run, _AVOID[kernel], collective=group is not None)


def _exchange(cell: CheckedCell) -> Iterator[KernelCase]:
    dims, args = cell.dims, cell.model_args
    if dims.ep == 1 or dims.etp > 1:
        return
    batch, length = 3, max(cell.limits.tokens // 3 // dims.tp, 1) * dims.tp
    backend = "mxfp8_a2a" if Precisions.of(cell.job_config).any else cell.comm_backend
    avoid = f"use EP backend {'deepep' if backend == 'standard' else 'standard'}"
    shape = (
        f"{batch} x {length:,} tokens of {args.dim} a rank, {args.moe_args.num_experts} experts "
        f"over {dims.ep} ranks, top {args.moe_args.top_k}, TP {dims.tp}"
    )
    run = partial(_exchange_errors, cell, batch, length)
    yield KernelCase(f"dispatch and combine {backend}", shape, run, avoid, collective=True)


def _exchange_errors(cell: CheckedCell, batch: int, length: int) -> Iterator[Error]:
    dims, args, moe_args = cell.dims, cell.model_args, cell.model_args.moe_args
    tp_mesh, ep_mesh = dims.get_optional_mesh("tp"), dims.get_optional_mesh("ep")
    assert ep_mesh is not None
    dp_rank = torch.distributed.get_rank() // dims.tp
    experts, top_k = moe_args.num_experts, moe_args.top_k
    given = rows.exchange_inputs(batch, length, args.dim, experts, top_k, dp_rank, cell.device)
    with torch.device("meta"):
        own_args = replace(moe_args, num_shared_experts=0, load_balance_coeff=None)
        layer: Any = MoE(own_args, args.dim, args.moe_inter_dim)
    layer.router = rows.FixedRouter(given.scores, given.experts, experts)
    layer.experts = rows.FactorExperts(experts, cell.device)
    layer.tokens_per_expert = torch.zeros(experts, device=cell.device)
    block = nn.Module()
    block.moe, block.moe_enabled = layer, True
    # Apply the scores to the outputs: the test experts have no activations to apply them to.
    apply_moe_ep_tp(
        replace(cell.job_config, deepep=replace(cell.job_config.deepep, score_activations=False)),
        SimpleNamespace(layers={"0": block}),
        tp_mesh=tp_mesh,
        ep_mesh=ep_mesh,
        etp_mesh=None,
        ep_etp_mesh=None,
    )
    part = slice(None) if tp_mesh is None else shard_of(length, tp_mesh)
    precisions = Precisions.of(cell.job_config)
    quantized = (precisions.dispatch_forward, precisions.combine_backward)
    return rows.exchange_errors(given, layer, part, ep_mesh.get_group(), quantized)
