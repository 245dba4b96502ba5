"""Faults put into kernels, and whether the self-check finds each, on the CPU or on GPUs.

    torchrun --nproc-per-node=2 -m tests.self_check_faults [-o FILE]

A fault changes what a kernel returns, or what its backward does, as a wrong kernel would. Those of
the exchange need two ranks; one rank leaves them out. Ends with status 1 where one is not found.
"""

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.self_check_fault import (
    A2A,
    CHUNKS,
    DEEPEP,
    FLOAT8,
    JOB,
    MXFP8,
    ROW_KERNELS,
    WGRAD_HP,
    Fault,
    Wrapper,
    halves_swapped,
    instead,
    neighbours,
    neighbours_scales,
    scaled,
    with_argument,
    with_gradient,
    with_result,
)
from tests.titan_run import EP2, FLASH, FLEX, TP2

# Where kernels lie that several faults are put into.
GROUPS = "cookbook.titan.common.expert_groups"
LOSS = "cookbook.titan.common.chunked_loss"
AO = "torchao.prototype.moe_training.scaled_grouped_mm"
STACK = "cookbook.titan.tt_0_2_2"
ROWS = "cookbook.titan.self_check.rows"
_COPIES = "cookbook.titan.common.weight_copies"
_EP = "torchtitan.distributed.expert_parallel"
_OPERATOR = "cookbook.titan.common.varlen_attention.varlen_attention"
FP8, FLOAT8_LAYER = "cookbook.titan.common.fp8", f"{STACK}.float8"
_GROUPED, _LINEAR = "torch._grouped_mm", "torch.nn.Linear.forward"
_MASK = f"{STACK}.self_check_cases.get_document_mask_mod"
_SDPA = "torchtitan.models.attention.ScaledDotProductAttentionWrapper.forward"
_WGRAD, _CAST = f"{STACK}.mxfp8.emulated_weight_gradient", f"{STACK}.mxfp8._cast_with_operations"
_QUANTIZED = "torchao.prototype.moe_training.tensor._quantize_then_scaled_grouped_mm"
_RECIPE = f"{AO}._to_mxfp8_then_scaled_grouped_mm"
_TO_MX = "torchao.prototype.mx_formats.mx_tensor.to_mx"
_ROUTER = f"{STACK}.parallelize.sum_gradient_over_tp"
_BACK = f"{GROUPS}._ScoredSwiGLU.backward"
_DISPATCH = "torchao.prototype.moe_training.ep.a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.forward"
_COMBINE = "torchao.prototype.moe_training.ep.a2a_combine._A2ACombineHPFwdMXFP8Bwd.backward"

_row_lost = with_result(scaled(0, at=-9))
_reversed = with_result(lambda parts: parts[::-1])
_swapped = with_argument(slice(1, 3), lambda weights: weights[::-1])
_gate_for_up = with_argument(slice(0, 2), lambda weights: weights[::-1])
_next_scales = with_argument(3, neighbours(0))
_last_halved = with_result(scaled(0.5, at=-1))


_next_row = with_result(neighbours(0))


def _in_fp8(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).to(values.dtype)


def _next_rows_scales(made: Any) -> Any:
    return made._replace(scales=made.scales.roll(1, -1))


def _unscaled(rows: Any) -> Any:
    return rows._replace(scales=torch.ones_like(rows.scales))


def _scores_off(made: tuple[Any, torch.Tensor]) -> Any:
    return made[0], made[1] * 1.5


def _causal_mask(*batch: Any) -> Any:
    return lambda b, h, q, k: q >= k


def _own_statistics(chunks: Any, statistics: torch.Tensor) -> torch.Tensor:
    return statistics


def _neighbours_cast(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return neighbours_scales(made[::-1])[::-1]


def without_last_rows(count: int) -> Any:
    return lambda values: torch.cat([values[:-count], torch.zeros_like(values[-count:])])


def without_one_document(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.cat([cu_seqlens[:1], cu_seqlens[2:], cu_seqlens[-1:]])


def row_of_nan(out: torch.Tensor) -> torch.Tensor:
    return out.index_fill(0, torch.tensor([3], device=out.device), torch.nan)


def first_scale_doubled(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Of `to_mx`: the scales (a power of two each) and the data; one block of each row."""
    scale, data = made
    values = scale.float()
    values[..., 0] *= 2
    return values.to(scale.dtype), data


def ignored_counted(passes: tuple[Any, Any]) -> tuple[Any, Any]:
    """Both passes over the logits, of which the second gives ignored tokens a gradient."""
    first, second = passes
    return first, lambda logits, columns, lse: second(
        logits, columns, lse.masked_fill(lse.isinf(), 5.0)
    )


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


def _with(**changes: Any) -> Any:
    def wrap(original: Any) -> Wrapper:
        return lambda *args, **kwargs: original(*args, **kwargs | changes)

    return wrap


def _never_added(original: Any) -> Wrapper:
    return lambda out, left, right, add: original(out, left, right, add=False)


def _adding_nothing(original: Any) -> Wrapper:
    return lambda source, target, factor=None, base=None: original(source, target, factor)


def one_slot_lost(plan: Any) -> Any:
    slots, copies = plan.slots.clone(), plan.copies.clone()
    token = int((slots >= 0).any(1).nonzero()[0])
    k = int((slots[token] >= 0).nonzero()[0])
    copies[slots[token, k]] = -1
    slots[token, k] = -1
    return plan._replace(copies=copies, slots=slots)


def plain_send(ctx: Any, tokens: torch.Tensor, *splits: Any) -> torch.Tensor:
    """The dispatch's forward in BF16."""
    from torch.distributed._functional_collectives import all_to_all_single

    ctx.input_splits, ctx.output_splits, ctx.group = splits[1], splits[0], splits[2]
    return torch.ops._c10d_functional.wait_tensor(all_to_all_single(tokens, *splits))


def folded_share(folded: torch.Tensor, length: int, mesh: Any) -> torch.Tensor:
    """The released cut: of the folded batch, so that a rank gets other sequences' positions."""
    return folded.chunk(mesh.size())[mesh.get_local_rank()]


def _fill_unwritten(original: Any) -> Wrapper:
    def faulty(tokens: Any, scores: Any, plan: Any, *rest: Any) -> Any:
        grouped = original(tokens, scores, plan, *rest)
        grouped[plan.copies < 0] = 0.5
        return grouped

    return faulty


def _next_experts_rows(original: Any) -> Wrapper:
    return lambda *args: original(*args).roll(int(args[-1].sizes[0]), 0)


def _without_base(original: Any) -> Wrapper:
    return lambda *args: original(*args[:4])


def _one_copy_lost(found: tuple[torch.Tensor, torch.Tensor]) -> Any:
    copies, slots = found
    return copies.masked_fill(copies == 21, -1), slots


def _unquantized(backward: Any) -> Any:
    def faulty(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.mxfp8_bwd = False
        return backward.__func__(ctx, grad)

    return staticmethod(faulty)


Row = tuple[str, str, Any]


def _of(
    kernel: str, options: tuple[str, ...], *rows: Row, gpu_only: bool = False
) -> tuple[Fault, ...]:
    """Faults of one kernel in one job: name, the function that has it, and the change."""
    return tuple(Fault(row[0], kernel, options, row[1], row[2], gpu_only) for row in rows)


FAULTS = (
    *_of(
        *("flash_attention_4", FLASH),
        ("scale of the scores off by 10%", _OPERATOR, with_argument(5, lambda scale: scale * 1.1)),
        ("two documents taken for one", _OPERATOR, with_argument(3, without_one_document)),
        ("one sequence's keys read for another's", _OPERATOR, with_argument(1, halves_swapped)),
        ("last rows of dq not written", _OPERATOR, with_gradient(0, without_last_rows(5))),
        ("dk of one head scaled", _OPERATOR, with_gradient(1, scaled(1.2, at=0, dim=1))),
        ("dv of another head", _OPERATOR, with_gradient(2, neighbours(1))),
        ("output holds NaN", _OPERATOR, with_result(row_of_nan)),
    ),
    *_of("flex", FLEX, ("documents not masked", _MASK, instead(_causal_mask))),
    *_of("sdpa", (), ("later tokens not masked", _SDPA, _with(is_causal=False))),
    *_of("linear layer bf16", (), ("a linear layer's output row lost", _LINEAR, _row_lost)),
    *_of(
        *("grouped GEMM bf16", ()),
        ("an output row lost", _GROUPED, _row_lost),
        ("an input gradient's row lost", _GROUPED, with_gradient(0, scaled(0, at=-9))),
        ("the weight of the next expert", _GROUPED, with_argument(1, neighbours(0))),
        ("an expert's weight gradient halved", _GROUPED, with_gradient(1, scaled(0.5, at=-1))),
    ),
    *_of(
        *("grouped GEMM mxfp8", MXFP8),
        ("scale of one block doubled", f"{AO}.to_mx", with_result(first_scale_doubled)),
        ("scale of the neighbouring block", f"{AO}.to_mx", with_result(neighbours_scales)),
        ("weight gradients of the next expert", _WGRAD, with_result(neighbours(0))),
        ("nothing quantized", _QUANTIZED, instead(_high_precision)),
    ),
    *_of(
        *("grouped GEMM mxfp8_wgrad_with_hp", WGRAD_HP),
        ("the weight gradient's recipe ignored", _RECIPE, _with(wgrad_with_hp=False)),
    ),
    *_of(
        *("linear layer mx", MXFP8),
        ("scale of one block doubled in linear layers", _TO_MX, with_result(first_scale_doubled)),
    ),
    *_of(
        *("loss in chunks", CHUNKS),
        ("chunks' weight gradients not summed", f"{LOSS}._multiply", _never_added),
        ("ignored labels get a gradient", f"{LOSS}._passes", with_result(ignored_counted)),
    ),
    *_of(
        *("loss in chunks", (*CHUNKS, *TP2, *EP2)),
        ("one TP rank's words alone", f"{LOSS}._Chunks._over_ranks", instead(_own_statistics)),
    ),
    *_of(
        *("grouped GEMM fp8", FLOAT8),
        ("scales of the next row in FP8", f"{FP8}.quantize", with_result(_next_rows_scales)),
        ("a group's scale of the next group", f"{FP8}.group_maxima", with_result(neighbours(0))),
        (
            "FP8 weights' scales of the next expert",
            f"{FP8}.products",
            with_argument(2, neighbours(0)),
        ),
        ("rows transposed without their scales", f"{FP8}.transpose", with_argument(0, _unscaled)),
        ("the last expert's FP8 gradient halved", f"{FP8}.weight_gradients", _last_halved),
    ),
    *_of(
        *("experts fp8", FLOAT8),
        ("scores left out in FP8", f"{FP8}.activate", with_argument(1, torch.ones_like)),
        ("scores' gradients off in FP8", f"{FP8}.gradient", with_result(_scores_off)),
        ("gate and up swapped in FP8", f"{FP8}.quantize_weights", _gate_for_up),
        ("FP8 rows one slot too far", f"{FP8}.move_rows", _next_row),
        ("FP8 scales one slot too far", f"{FP8}.take_at", _next_row),
        ("the shared experts' output not added in FP8", f"{FP8}.sum_rows", _without_base),
        ("a token's FP8 rows in another order", f"{FP8}.transpose", with_result(neighbours(2))),
    ),
    *_of(
        *("linear layer fp8", FLOAT8),
        ("a weight's FP8 scales of the next row", f"{FLOAT8_LAYER}._product", _next_scales),
        ("FP8 rows transposed to other columns", f"{FLOAT8_LAYER}._transposed", _next_row),
    ),
    *_of(
        *("rows to expert groups and back", DEEPEP),
        ("a copy of a token lost", f"{ROWS}.plan_groups", with_result(one_slot_lost)),
        ("scores left out", f"{GROUPS}.sum_rows", with_argument(1, lambda scores: None)),
        ("rows that fill groups up not zero", f"{GROUPS}.move_rows", _fill_unwritten),
        ("scores' gradients of other copies", f"{GROUPS}._dot", with_result(neighbours(1))),
    ),
    *_of(
        *("rows to expert groups and back", ROW_KERNELS),
        ("the shared experts' output not added", f"{GROUPS}.sum_rows", _without_base),
        ("rows one slot too far", f"{GROUPS}.move_rows", _next_row),
        ("a row's last number lost", f"{GROUPS}.move_rows", with_result(scaled(0, at=-1, dim=1))),
        ("a copy in a plan of the device lost", f"{GROUPS}._place", with_result(_one_copy_lost)),
        ("scores of the next row", f"{GROUPS}.take_at", _next_row),
    ),
    *_of(
        *("scored SwiGLU", ROW_KERNELS),
        ("activations of the next row", f"{GROUPS}._ScoredSwiGLU.forward", _next_row),
        ("the gate's gradient off", _BACK, with_result(lambda found: (found[0] * 1.01, found[1]))),
        ("the scores' gradient off", _BACK, with_result(lambda found: (found[0], found[1] * 1.1))),
    ),
    *_of(
        *("experts' weights side by side", ROW_KERNELS),
        ("gate and up swapped", f"{ROWS}.join", _swapped),
        ("the last microbatch's gradient alone", f"{_COPIES}.cast", _adding_nothing),
    ),
    *_of(
        *("dispatch and combine deepep", DEEPEP),
        ("rows of the next expert", f"{STACK}.deepep.spread", _next_experts_rows),
        ("a token's sum halved", f"{STACK}.deepep.arrive", with_result(scaled(0.5, at=5))),
    ),
    *_of(
        *("dispatch and combine deepep", (*DEEPEP, "--deepep.num_chunks=2")),
        ("parts of the tokens in another order", f"{STACK}.deepep.cut", _reversed),
    ),
    *_of(
        *("dispatch and combine standard", EP2),
        ("the last row not brought back", f"{_EP}._unpermute", with_result(without_last_rows(1))),
        ("received rows in another order", f"{_EP}._permute", with_argument(0, neighbours(0))),
        ("rows that are quantized", f"{_EP}._unpermute", with_result(_in_fp8)),
        ("gradients that are quantized", f"{_EP}._permute", with_gradient(0, _in_fp8)),
    ),
    *_of(
        *("dispatch and combine standard", (*EP2, *TP2)),
        ("sequences cut as one", f"{STACK}.parallelize.shard_tokens", instead(folded_share)),
        ("the router's gradient not summed over TP", _ROUTER, instead(lambda scores, mesh: scores)),
    ),
    *_of(
        *("dispatch and combine mxfp8_a2a", A2A),
        ("one exchange of two not quantized", _DISPATCH, instead(staticmethod(plain_send))),
        ("the other exchange not quantized", _COMBINE, _unquantized),
        ("scales of the neighbouring block sent", _CAST, with_result(_neighbours_cast)),
    ),
)


def proofs(options: Sequence[str], fault: Fault | None = None) -> list[Any]:
    """The results of a job with these options on this rank's world.

    With a fault, those of the kernels that have functions in common with its kernel.
    """
    from cookbook.titan.tt_0_2_2.self_check import run_cases
    from cookbook.titan.tt_0_2_2.self_check_cases import kernel_cases
    from cookbook.titan.tt_0_2_2.self_check_main import cell_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cell = cell_of([*JOB, *options], device)
    skip = []
    if fault is not None and not {"mxfp8", "fp8"} & {*fault.kernel.split()}:
        skip = [(one.kernel, one.shape) for one in kernel_cases(cell) if one.kernel != fault.kernel]
    with fault.put_in() if fault else nullcontext():
        found: list[Any] = run_cases(cell, skip)
    return found


def try_faults(names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """For each fault that this world has ranks for, what the self-check says of it."""
    found = {}
    for fault in FAULTS:
        is_here = fault.ranks <= dist.get_world_size()
        is_here &= torch.cuda.is_available() or not fault.gpu_only
        if is_here and (names is None or fault.name in names):
            wrong = [result for result in proofs(fault.options, fault) if result.fault]
            found[fault.name] = [f"{result.kernel}: {result.fault}" for result in wrong]
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
        for name, wrong in found.items()
        if not any(text.startswith(by_name[name].kernel) for text in wrong)
    ]
    if dist.get_rank() == 0:
        for name, wrong in found.items():
            print(f"{'NOT FOUND' if name in missed else 'found'}: {name}: {wrong[:1]}")
        if options.output:
            options.output.write_text(json.dumps({"found": found, "missed": missed}, indent=1))
        print(f"{len(found) - len(missed)} of {len(found)} faults found")
    dist.destroy_process_group()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
