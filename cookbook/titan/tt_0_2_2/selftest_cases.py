"""Which kernels a cell uses on a rank, at which shapes, and how each is proved.

A GPU proves them at the cell's own widths, heads and experts. Of tokens it takes as many as keep
all proofs within some seconds: kernels cut tokens into tiles, and every kind of tile is there. A
CPU takes fewer, since there the proofs are for the code around the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.model.model import Attention, DeepSeekV3Model
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.model_converter import build_model_converters

from cookbook.titan.common.documents import bounds_capacity
from cookbook.titan.selftest.attention import (
    AttentionShape,
    Told,
    attention_errors,
    flash_attention_4,
)
from cookbook.titan.selftest.cases import Error, Use
from cookbook.titan.selftest.gemms import GroupedShape, Products, grouped_errors, linear_errors
from cookbook.titan.selftest.loss import loss_errors
from cookbook.titan.selftest.rows import RowsShape, join_errors, row_errors, swiglu_errors
from cookbook.titan.tt_0_2_2.activity import observe_model
from cookbook.titan.tt_0_2_2.attention import FLASH_ATTENTION_4
from cookbook.titan.tt_0_2_2.reference_attention import flex, sdpa
from cookbook.titan.tt_0_2_2.used_exchange import exchange_of

_ROW_KERNELS = "leave out cookbook.row_kernels"
_ATTENTION = {"flex": flex, "sdpa": sdpa, FLASH_ATTENTION_4: flash_attention_4}


@dataclass(frozen=True)
class Limits:
    """How much of a cell's shapes the proofs take."""

    tokens: int
    attention_scores: int
    sequence: int
    heads: int
    rows: int
    linear_rows: int
    packings: tuple[str, ...]

    @classmethod
    def on(cls, device: str) -> Limits:
        """For a GPU, or for a CPU."""
        if device == "cuda":
            return cls(8192, 1 << 31, 16384, 128, 32768, 4096, ("edges", "whole"))
        return cls(96, 1 << 16, 160, 2, 384, 96, ("edges",))


@dataclass(frozen=True)
class Cell:
    """What decides which kernels a rank uses; `device` is `cuda` or `cpu`."""

    job_config: Any
    dims: ParallelDims
    model_args: Any
    device: str

    @property
    def limits(self) -> Limits:
        return Limits.on(self.device)

    @property
    def local_experts(self) -> int:
        return int(self.model_args.moe_args.num_experts) // self.dims.ep

    @property
    def sequences(self) -> int:
        """Of one forward: a microbatch of a pipeline, or the whole local batch."""
        if self.dims.pp_enabled:
            return int(self.job_config.parallelism.pipeline_parallel_microbatch_size)
        return int(self.job_config.training.local_batch_size)


def kernels_of(cell: Cell) -> list[Use]:
    """All that a rank of the cell uses, in the order of proof; the same on every rank."""
    return [
        *_attention(cell),
        *_grouped_gemms(cell),
        *_linear_layers(cell),
        *_rows(cell),
        *_loss(cell),
        *exchange_of(cell.job_config, cell.dims, cell.model_args, cell.device, cell.limits.tokens),
    ]


def _attention(cell: Cell) -> Iterator[Use]:
    with torch.device("meta"):
        layer = Attention(cell.model_args)
    chosen = cell.job_config.model.attention == FLASH_ATTENTION_4
    kind = FLASH_ATTENTION_4 if chosen else cell.model_args.attn_type
    # Context parallelism gives a rank a part of each sequence; the kernel is the same.
    whole = cell.job_config.training.seq_len // cell.dims.cp
    limits = cell.limits
    heads = min(max(1, layer.n_heads // cell.dims.tp), limits.heads)
    length = min(whole, limits.sequence)
    fits = limits.attention_scores // (heads * length * length)
    shape = AttentionShape(
        # Of several sequences at least two: one must not be read for another.
        batch=min(cell.sequences, max(2, fits)),
        length=length,
        heads=heads,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        scale=layer.softmax_scale,
        told=Told(cell.sequences * bounds_capacity(0, whole), whole) if chosen else None,
    )
    avoid = {
        "flex": "model.attention=flash_attention_4 does without it",
        FLASH_ATTENTION_4: "leave out model.attention, or set model.attention=flavor",
        "sdpa": "a flavor with FlexAttention does without it",
    }[kind]
    # It knows no documents.
    packings = ("whole",) if kind == "sdpa" else limits.packings
    for packing in packings:
        # Once with each kind of inputs; several sequences of many documents as trained ones.
        like_trained = packing == packings[0]
        words = "values as trained" if like_trained else "random values"
        room = f" in room for {shape.told.room:,}" if shape.told else ""
        yield Use(
            kind,
            f"{shape}, documents: {packing}{room}, {words}",
            partial(attention_errors, shape, packing, like_trained, _ATTENTION[kind], cell.device),
            avoid,
        )


def _grouped_gemms(cell: Cell) -> Iterator[Use]:
    args = cell.model_args
    if not args.moe_args.use_grouped_mm:
        return
    hidden = args.moe_inter_dim // (cell.dims.tp if cell.dims.ep == 1 else cell.dims.etp)
    # First: it builds the converters, which set the alignment.
    kind = _grouped_kind(cell)
    alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    rows = min(cell.limits.rows, 512 * cell.local_experts)
    own = GroupedShape(cell.local_experts, rows, hidden, args.dim, alignment)
    shapes = [own, replace(own, n=args.dim, k=hidden)]
    if cell.device == "cuda":
        # Short sums, where one wrong scale of a block is a large part.
        shapes.append(GroupedShape(9, 700, 384, 256, alignment))
    else:
        shapes = [replace(one, experts=min(one.experts, 8)) for one in shapes]
    avoid = {
        "bf16": "no option does without it; another torch may",
        "mxfp8": "precision mxfp8_wgrad_hp (weight gradients) or bf16 does without it",
    }.get(kind, "precision bf16 does without it")
    for shape in shapes:
        yield Use(
            f"grouped GEMM {kind}",
            str(shape),
            partial(grouped_errors, shape, kind, partial(_multiply, cell), cell.device),
            avoid,
        )


def _converted(cell: Cell, model: nn.Module) -> nn.Module:
    build_model_converters(cell.job_config, cell.dims).convert(model)
    return model


def _experts(cell: Cell, weight: torch.Tensor) -> nn.Module:
    """The cell's routed experts, quantized as its converters do, with one weight alone."""
    experts, n, k = weight.shape
    with torch.device("meta"):
        module = GroupedExperts(k, n, experts, use_grouped_mm=True)
    module.w1 = nn.Parameter(weight)
    module.w2 = module.w3 = None
    layer = nn.ModuleDict({"moe": nn.ModuleDict({"experts": module})})
    _converted(cell, nn.ModuleDict({"layers": nn.ModuleDict({"1": layer})}))
    return module


def _grouped_kind(cell: Cell) -> str:
    found = observe_model([_experts(cell, torch.empty(1, 32, 32, dtype=torch.bfloat16))])
    (kind,) = found.grouped_gemms
    return kind


def _multiply(
    cell: Cell,
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
) -> Products:
    """The three products by the path that the cell's experts take."""
    leaf: Any = _experts(cell, weight.clone()).w1
    x = x.clone().requires_grad_()
    out = torch._grouped_mm(x, leaf.transpose(-2, -1), offs=offsets)
    out.backward(grad)
    assert x.grad is not None and leaf.grad is not None
    return out.detach(), x.grad, getattr(leaf.grad, "_data", leaf.grad)


def _linear_layers(cell: Cell) -> Iterator[Use]:
    # One layer without experts and one with: every kind of linear layer is among theirs.
    # A copy, since TorchTitan's arguments have more attributes than fields.
    args = deepcopy(cell.model_args)
    args.n_layers, args.n_dense_layers = 2, 1
    with torch.device("meta"):
        model = _converted(cell, DeepSeekV3Model(args))
    found: dict[tuple[str, int, int], nn.Linear] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "output":
            kind = next(iter(observe_model([layer]).linear_layers))
            recipe = cell.job_config.quantize.linear.float8.recipe_name or ""
            if kind == "float8" and not recipe.startswith("rowwise"):
                kind = "float8 tensorwise"
            found.setdefault((kind, layer.out_features, layer.in_features), layer)
    by_size = sorted(found.items(), key=lambda item: item[0][1] * item[0][2])
    if cell.device == "cpu":
        # The smallest of each kind.
        by_size = list({key[0]: (key, layer) for key, layer in reversed(by_size)}.values())
    for (kind, n, k), layer in by_size:
        avoid = {
            "mx": "precision mxfp8 or bf16 does without it",
            "float8": "precision bf16 does without it",
        }.get(kind, "no option does without it; another torch may")
        rows = cell.limits.linear_rows
        yield Use(
            f"linear layer {kind}",
            f"{rows:,} rows, {n} x {k}",
            partial(_linear_errors, layer, rows, kind, cell.device),
            avoid,
        )


def _linear_errors(layer: nn.Linear, rows: int, kind: str, device: str) -> Iterator[Error]:
    return linear_errors(layer.to_empty(device=device).bfloat16(), rows, kind, device)


def _rows(cell: Cell) -> Iterator[Use]:
    backend = cell.job_config.parallelism.expert_parallel_comm_backend
    deepep = backend == "deepep" and cell.dims.ep > 1
    if not deepep and (backend == "deepep" or not cell.job_config.cookbook.row_kernels):
        return
    args = cell.model_args
    shape = RowsShape(
        cell.limits.tokens,
        args.dim,
        cell.local_experts if deepep else args.moe_args.num_experts,
        args.moe_args.top_k,
        moe_utils.TOKEN_GROUP_ALIGN_SIZE_M,
    )
    places: dict[Literal["before", "between", "after"], str] = {
        "before": "scores before the experts",
        "after": "scores after the experts",
    }
    if not deepep or cell.job_config.deepep.score_activations:
        places["between"] = "scores on the activations"
    avoid = "EP backend standard does without it" if deepep else _ROW_KERNELS
    for scored, words in places.items():
        if deepep or scored == "between":
            yield Use(
                "rows to expert groups and back",
                f"{shape}, {words}",
                partial(row_errors, shape, scored, cell.device, counted=deepep),
                avoid,
            )
    if not deepep:
        hidden = args.moe_inter_dim // (cell.dims.tp if cell.dims.ep == 1 else cell.dims.etp)
        yield Use(
            "scored SwiGLU",
            f"{cell.limits.linear_rows:,} rows, hidden size {hidden}",
            partial(swiglu_errors, cell.limits.linear_rows, hidden, cell.device),
            avoid,
        )
        yield Use(
            "experts' weights side by side",
            f"{min(cell.local_experts, 8)} experts of {hidden} x {args.dim}",
            partial(join_errors, min(cell.local_experts, 8), hidden, args.dim, cell.device),
            avoid,
        )


def _loss(cell: Cell) -> Iterator[Use]:
    if not (num_chunks := cell.job_config.loss.num_chunks):
        return
    options, args = cell.job_config.compile, cell.model_args
    backend = options.backend if options.enable and "loss" in options.components else None
    mesh: DeviceMesh | None = cell.dims.get_optional_mesh("tp")
    group = None if mesh is None else mesh.get_group()
    # One less than a whole chunk.
    tokens = min(2048, cell.limits.tokens) // num_chunks * num_chunks - 1
    yield Use(
        "loss in chunks",
        f"{tokens:,} tokens of {args.dim}, {args.vocab_size:,} words, {num_chunks} chunks",
        partial(
            loss_errors, tokens, args.dim, args.vocab_size, num_chunks, group, backend, cell.device
        ),
        "leave out loss.num_chunks",
        collective=group is not None,
    )
