"""Faults put into kernels, and whether the self-check finds each, on the CPU or on GPUs.

    torchrun --nproc-per-node=2 -m tests.self_check_faults [-o FILE]

A fault changes what a kernel returns, or what its backward does, as a wrong kernel would. Those of
the exchange need two ranks; one rank leaves them out. Ends with status 1 where one is not found.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

JOB = (
    "--job.custom_config_module=cookbook.titan.stack_2026_02.job_config",
    "--experimental.custom_import=cookbook.titan.stack_2026_02",
    "--model.name=deepseek_v3",
    "--model.flavor=debugmodel",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
)
FLEX = ("--model.flavor=debugmodel_flex_attn",)
FLASH = ("--model.attention=flash_attention_4",)
EP2 = ("--parallelism.expert_parallel_degree=2",)
TP2 = ("--parallelism.tensor_parallel_degree=2",)
DEEPEP = (*EP2, "--parallelism.expert_parallel_comm_backend=deepep")
A2A = (
    *EP2,
    "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
    "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8",
)
CHUNKS = ("--loss.num_chunks=4",)
MXFP8 = (
    "--model.converters=quantize.grouped_mm.mx,quantize.linear.mx",
    "--quantize.grouped_mm.mx.fqns=experts",
    "--quantize.grouped_mm.mx.emulate",
    "--quantize.linear.mx.emulate",
    "--quantize.linear.mx.recipe_name=mxfp8_cublas_rceil",
)
FLOAT8 = (
    "--compile.enable",
    "--model.converters=quantize.linear.float8,quantize.grouped_mm.float8",
    "--quantize.linear.float8.recipe_name=rowwise",
    "--quantize.linear.float8.filter_fqns=output,router.gate",
    "--quantize.grouped_mm.float8.fqns=experts",
)
WGRAD_HP = (*MXFP8, "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp")

Wrapper = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A fault, the kernel that has it, and the options of a job that uses that kernel."""

    name: str
    kernel: str
    options: tuple[str, ...]
    target: str
    wrapper: Callable[[Any], Wrapper]
    gpu_only: bool = False

    @property
    def ranks(self) -> int:
        return 2 if set(EP2 + TP2) & set(self.options) else 1

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """The fault, while this lasts."""
        with put_in(self.target, self.wrapper):
            yield


@contextmanager
def put_in(target: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """What `wrapper` makes of `target`, a name of a module or class, in its place."""
    place, _, name = target.rpartition(".")
    owner = _resolve(place)
    original = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    with patch.object(owner, name, wrapper(original)):
        yield


def _resolve(path: str) -> Any:
    from importlib import import_module

    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


class _Spoil(torch.autograd.Function):
    """The same values; their gradient is changed."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(grad.clone()), None


def with_gradient(place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A kernel whose gradient of the argument at `place` is changed."""

    def wrap(original: Any) -> Wrapper:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            changed = list(args)
            changed[place] = _Spoil.apply(changed[place], change)
            return original(*changed, **kwargs)

        return faulty

    return wrap


def with_argument(place: int, change: Callable[[Any], Any]) -> Any:
    """A kernel that takes the argument at `place` for another."""

    def wrap(original: Any) -> Wrapper:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            changed = list(args)
            changed[place] = change(changed[place])
            return original(*changed, **kwargs)

        return faulty

    return wrap


def with_result(change: Callable[[Any], Any]) -> Any:
    """A kernel whose result is changed."""

    def wrap(original: Any) -> Wrapper:
        return lambda *args, **kwargs: change(original(*args, **kwargs))

    return wrap


def instead(function: Any) -> Any:
    """Another function in the kernel's place."""
    return lambda original: function


def without_rows(rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor whose `rows` are zero."""

    def change(values: torch.Tensor) -> torch.Tensor:
        kept = torch.ones(len(values), dtype=torch.bool, device=values.device)
        kept[rows] = False
        return values * kept.view(-1, *[1] * (values.dim() - 1))

    return change


def halves_swapped(values: torch.Tensor) -> torch.Tensor:
    return values.roll(len(values) // 2, 0)


def neighbours(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.roll(1, dim)


def without_one_document(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.cat([cu_seqlens[:1], cu_seqlens[2:], cu_seqlens[-1:]])


def first_scale_doubled(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Of `to_mx`: the scales (a power of two each) and the data; one block of each row."""
    scale, data = made
    values = scale.float()
    values[..., 0] *= 2
    return values.to(scale.dtype), data


def neighbours_scales(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    scale, data = made
    return scale.view(torch.uint8).roll(1, -1).view(scale.dtype), data


def neighbours_scales_of_cast(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    data, scale = made
    return neighbours_scales((scale, data))[::-1]


def one_slot_lost(plan: Any) -> Any:
    from cookbook.titan.any_stack.expert_groups import GroupPlan

    slots, rows = plan.slots.clone(), plan.rows.clone()
    token = int((slots >= 0).any(1).nonzero()[0])
    k = int((slots[token] >= 0).nonzero()[0])
    rows[slots[token, k]] = -1
    slots[token, k] = -1
    return GroupPlan(rows, slots, plan.sizes)


def plain_send(ctx: Any, tokens: torch.Tensor, *splits: Any) -> torch.Tensor:
    """The dispatch's forward in BF16."""
    from torch.distributed._functional_collectives import all_to_all_single

    ctx.input_splits, ctx.output_splits, ctx.group = splits[1], splits[0], splits[2]
    return torch.ops._c10d_functional.wait_tensor(all_to_all_single(tokens, *splits))


def folded_share(folded: torch.Tensor, share: Any) -> torch.Tensor:
    """The released cut: of the folded batch, so that a rank gets other sequences' positions."""
    ranks = share.length // (share.stop - share.start)
    return folded.chunk(ranks)[share.start // (share.stop - share.start)]


_OPERATOR = "cookbook.titan.any_stack.varlen_attention.varlen_attention"
_GROUPED = "torch._grouped_mm"
_GROUPS = "cookbook.titan.any_stack.expert_groups"
_LOSS = "cookbook.titan.any_stack.chunked_loss"
_AO = "torchao.prototype.moe_training.scaled_grouped_mm"
_STACK = "cookbook.titan.stack_2026_02"


def ignored_counted(passes: tuple[Any, Any]) -> tuple[Any, Any]:
    """Both passes over the logits, of which the second gives ignored tokens a gradient."""
    first, second = passes

    def faulty(logits: Any, columns: Any, lse: Any) -> None:
        second(logits, columns, lse.masked_fill(lse.isinf(), 5.0))

    return first, faulty


def _never_added(original: Any) -> Wrapper:
    return lambda out, left, right, add: original(out, left, right, add=False)


def _by_one_rank(original: Any) -> Wrapper:
    return lambda chunks, statistics: statistics


def _without_scores(original: Any) -> Wrapper:
    return lambda grouped, scores, rows, slots: original(grouped, None, rows, slots)


def _fill_unwritten(original: Any) -> Wrapper:
    def faulty(tokens: Any, scores: Any, rows: Any, slots: Any) -> Any:
        grouped = original(tokens, scores, rows, slots)
        grouped[rows < 0] = 0.5
        return grouped

    return faulty


class _Plain(torch.autograd.Function):
    """A grouped GEMM that takes quantized weights' own data and quantizes nothing."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b_t: Any, offs: torch.Tensor) -> torch.Tensor:
        data = getattr(b_t, "_data", b_t)
        ctx.save_for_backward(a, data, offs)
        return torch._grouped_mm(a, data, offs=offs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, data, offs = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in (a, data)]
            out = torch._grouped_mm(*leaves, offs=offs)
        return (*torch.autograd.grad(out, leaves, grad), None)


def _high_precision(a: Any, b_t: Any, offs: Any, *args: Any, **kwargs: Any) -> Any:
    return _Plain.apply(a, b_t, offs)


def _not_causal(original: Any) -> Wrapper:
    return lambda *args, **kwargs: original(*args, **kwargs, is_causal=False)


def _recipe_ignored(original: Any) -> Wrapper:
    return lambda *args, **kwargs: original(*args, **kwargs | {"wgrad_with_hp": False})


def _next_experts_rows(original: Any) -> Wrapper:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        *_, plan = args
        return original(*args, **kwargs).roll(int(plan.sizes[0]), 0)

    return faulty


FAULTS = (
    Fault(
        "scale of the scores off by 10%",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_argument(5, lambda scale: scale * 1.1),
    ),
    Fault(
        "two documents taken for one",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_argument(3, without_one_document),
    ),
    Fault(
        "one sequence's keys read for another's",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_argument(1, halves_swapped),
    ),
    Fault(
        "last rows of dq not written",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_gradient(0, without_rows(slice(-5, None))),
    ),
    Fault(
        "dk of one head scaled",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_gradient(
            1,
            lambda dk: (
                dk
                * (
                    1 + 0.2 * torch.eye(2, device=dk.device)[0, :, None]
                    if dk.shape[1] == 2
                    else 1.2
                )
            ),
        ),
    ),
    Fault(
        "dv of another head", "flash_attention_4", FLASH, _OPERATOR, with_gradient(2, neighbours(1))
    ),
    Fault(
        "output holds NaN",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_result(
            lambda out: torch.where(
                torch.arange(len(out), device=out.device)[:, None, None] == 3, torch.nan, out
            )
        ),
    ),
    Fault(
        "documents not masked",
        "flex",
        FLEX,
        f"{_STACK}.own_attention.get_document_mask_mod",
        instead(lambda *batch: lambda b, h, q, k: q >= k),
    ),
    Fault(
        "later tokens not masked",
        "sdpa",
        (),
        "torchtitan.models.attention.ScaledDotProductAttentionWrapper.forward",
        _not_causal,
    ),
    Fault(
        "a linear layer's output row lost",
        "linear layer bf16",
        (),
        "torch.nn.Linear.forward",
        with_result(without_rows(slice(-9, -8))),
    ),
    Fault(
        "an output row lost",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_result(without_rows(slice(-9, -8))),
    ),
    Fault(
        "an input gradient's row lost",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_gradient(0, without_rows(slice(-9, -8))),
    ),
    Fault(
        "the weight of the next expert",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_argument(1, neighbours(0)),
    ),
    Fault(
        "an expert's weight gradient halved",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_gradient(
            1,
            lambda dw: (
                dw
                * torch.where(torch.arange(len(dw), device=dw.device) == len(dw) - 1, 0.5, 1)[
                    :, None, None
                ].to(dw.dtype)
            ),
        ),
    ),
    Fault(
        "scale of one block doubled",
        "grouped GEMM mxfp8",
        MXFP8,
        f"{_AO}.to_mx",
        with_result(first_scale_doubled),
    ),
    Fault(
        "scale of the neighbouring block",
        "grouped GEMM mxfp8",
        MXFP8,
        f"{_AO}.to_mx",
        with_result(neighbours_scales),
    ),
    Fault(
        "weight gradients of the next expert",
        "grouped GEMM mxfp8",
        MXFP8,
        f"{_STACK}.mx.emulated_weight_gradient",
        with_result(neighbours(0)),
    ),
    Fault(
        "nothing quantized",
        "grouped GEMM mxfp8",
        MXFP8,
        "torchao.prototype.moe_training.tensor._quantize_then_scaled_grouped_mm",
        instead(_high_precision),
    ),
    Fault(
        "the weight gradient's recipe ignored",
        "grouped GEMM mxfp8_wgrad_with_hp",
        WGRAD_HP,
        f"{_AO}._to_mxfp8_then_scaled_grouped_mm",
        _recipe_ignored,
    ),
    Fault(
        "scale of one block doubled in linear layers",
        "linear layer mx",
        MXFP8,
        "torchao.prototype.mx_formats.mx_tensor.to_mx",
        with_result(first_scale_doubled),
    ),
    Fault(
        "chunks' weight gradients not summed",
        "loss in chunks",
        CHUNKS,
        f"{_LOSS}._multiply",
        _never_added,
    ),
    Fault(
        "ignored labels get a gradient",
        "loss in chunks",
        CHUNKS,
        f"{_LOSS}._passes",
        with_result(ignored_counted),
    ),
    Fault(
        "one TP rank's words alone",
        "loss in chunks",
        (*CHUNKS, *TP2, *EP2),
        f"{_LOSS}._Chunks._over_ranks",
        _by_one_rank,
    ),
    Fault(
        "a copy of a token lost",
        "rows to expert groups and back",
        DEEPEP,
        "cookbook.titan.self_check.rows.plan_groups",
        with_result(one_slot_lost),
    ),
    Fault(
        "scores left out",
        "rows to expert groups and back",
        DEEPEP,
        f"{_GROUPS}._collect",
        _without_scores,
    ),
    Fault(
        "rows that fill groups up not zero",
        "rows to expert groups and back",
        DEEPEP,
        f"{_GROUPS}._spread",
        _fill_unwritten,
    ),
    Fault(
        "scores' gradients of other copies",
        "rows to expert groups and back",
        DEEPEP,
        f"{_GROUPS}._dot",
        with_result(neighbours(1)),
    ),
    Fault(
        "rows of the next expert",
        "dispatch and combine deepep",
        DEEPEP,
        f"{_STACK}.deepep.spread",
        _next_experts_rows,
    ),
    Fault(
        "a token's sum halved",
        "dispatch and combine deepep",
        DEEPEP,
        f"{_STACK}.deepep.arrive",
        with_result(
            lambda out: (
                out
                * (
                    1
                    - 0.5 * (torch.arange(len(out), device=out.device) == 5)[:, None].to(out.dtype)
                )
            )
        ),
    ),
    Fault(
        "the last row not brought back",
        "dispatch and combine standard",
        EP2,
        "torchtitan.distributed.expert_parallel._unpermute",
        with_result(without_rows(slice(-1, None))),
    ),
    Fault(
        "received rows in another order",
        "dispatch and combine standard",
        EP2,
        "torchtitan.distributed.expert_parallel._permute",
        with_argument(0, lambda rows: rows.roll(1, 0)),
    ),
    Fault(
        "sequences cut as one",
        "dispatch and combine standard",
        (*EP2, *TP2),
        f"{_STACK}.expert_parallel.take_share",
        instead(folded_share),
    ),
    Fault(
        "the router's gradient not summed over TP",
        "dispatch and combine standard",
        (*EP2, *TP2),
        f"{_STACK}.expert_parallel.sum_gradient_over_tp",
        instead(lambda scores, mesh: scores),
    ),
    Fault(
        "one exchange of two not quantized",
        "dispatch and combine mxfp8_a2a",
        A2A,
        "torchao.prototype.moe_training.ep.a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.forward",
        instead(staticmethod(plain_send)),
    ),
    Fault(
        "scales of the neighbouring block sent",
        "dispatch and combine mxfp8_a2a",
        A2A,
        f"{_STACK}.quantized_a2a._cast_with_operations",
        with_result(neighbours_scales_of_cast),
    ),
    Fault(
        "scales of the next row in FP8",
        "grouped GEMM fp8_rowwise",
        FLOAT8,
        f"{_AO}.tensor_to_scale",
        with_result(neighbours(0)),
        gpu_only=True,
    ),
    Fault(
        "a weight gradient's scales of the next group in FP8",
        "grouped GEMM fp8_rowwise",
        FLOAT8,
        f"{_AO}.triton_fp8_per_group_colwise_scales",
        with_result(lambda made: (made[0], made[1].roll(1, 0))),
        gpu_only=True,
    ),
)


def proofs(options: Sequence[str], fault: Fault | None = None) -> list[Any]:
    """The proofs of a job with these options on this rank's world, with a fault or without."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    import cookbook.titan.stack_2026_02  # noqa: F401  (registers the spec)
    from cookbook.titan.stack_2026_02.self_check import prove_all
    from cookbook.titan.stack_2026_02.used_kernels import Cell

    config = ConfigManager().parse_args([*JOB, *options])
    degrees = config.parallelism
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=-1,
        cp=1,
        tp=degrees.tensor_parallel_degree,
        pp=1,
        ep=degrees.expert_parallel_degree,
        etp=1,
        world_size=dist.get_world_size(),
    )
    args = deepcopy(get_train_spec("deepseek_v3").model_args[config.model.flavor])
    args.update_from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as stack:
        if fault:
            stack.enter_context(fault.put_in())
        return prove_all(Cell(config, dims, args, device))


def try_faults(names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """For each fault that this world has ranks for, what the self-check says of it."""
    found = {}
    for fault in FAULTS:
        is_here = fault.ranks <= dist.get_world_size()
        is_here &= torch.cuda.is_available() or not fault.gpu_only
        if is_here and (names is None or fault.name in names):
            said = [proof for proof in proofs(fault.options, fault) if proof.fault]
            found[fault.name] = [f"{proof.kernel}: {proof.fault}" for proof in said]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend)
    found = try_faults()
    by_name = {fault.name: fault for fault in FAULTS}
    missed = [
        name
        for name, said in found.items()
        if not any(text.startswith(by_name[name].kernel) for text in said)
    ]
    if dist.get_rank() == 0:
        for name, said in found.items():
            print(f"{'NOT FOUND' if name in missed else 'found'}: {name}: {said[:1]}")
        if options.output:
            options.output.write_text(json.dumps({"found": found, "missed": missed}, indent=1))
        print(f"{len(found) - len(missed)} of {len(found)} faults found")
    dist.destroy_process_group()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
