"""Grouping, padding and scored activations, and the Triton kernels that do the same.

A layer on several ranks against float64 is in `test_titan_moe.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from cookbook.titan.common import expert_groups
from cookbook.titan.common.expert_groups import (
    GroupPlan,
    collect,
    padded_sizes,
    plan_groups,
    plan_on_device,
    spread,
)
from cookbook.titan.tt_0_2_2.row_kernels import Groups
from tests.started import python
from tests.titan_run import A2A, EP2, MXFP8, SAVE, active, run

pytestmark = pytest.mark.titan

ELSEWHERE = -1


def routing(
    num_tokens: int, top_k: int, num_experts: int, seed: int, empty: tuple[int, ...] = ()
) -> tuple[torch.Tensor, list[int]]:
    """Experts of each token, some of them on other ranks, none of them `empty`."""
    generator = torch.Generator().manual_seed(seed)
    choices = [expert for expert in range(num_experts) if expert not in empty]
    # A token chooses an expert once; what lies behind the local ones counts as another rank's.
    pool = torch.tensor([*choices, *[ELSEWHERE] * top_k])
    order = torch.rand(num_tokens, len(pool), generator=generator).argsort(1)[:, :top_k]
    experts = pool[order]
    return experts, [int((experts == expert).sum()) for expert in range(num_experts)]


CASES = {
    "uneven": routing(37, 3, 5, seed=0),
    "empty experts": routing(29, 2, 6, seed=1, empty=(0, 3, 5)),
    "one token": routing(1, 2, 4, seed=2),
    "nothing arrives": (torch.empty(0, 3, dtype=torch.int64), [0, 0]),
    "all elsewhere": (torch.full((5, 2), ELSEWHERE), [0, 0, 0]),
    "exact blocks": (torch.arange(2).repeat_interleave(32).unsqueeze(1), [32, 32]),
}
ALIGNMENTS = (8, 32)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("case", CASES)
def test_groups_are_whole_blocks_in_the_order_of_the_tokens(case: str, alignment: int) -> None:
    experts, counts = CASES[case]
    plan = plan_groups(experts, counts, alignment)
    assert plan.sizes.tolist() == padded_sizes(counts, alignment)
    assert all(size % alignment == 0 and size > 0 for size in plan.sizes.tolist())
    assert plan.ends.tolist() == plan.sizes.cumsum(0).tolist()
    assert plan.copies.numel() == plan.ends[-1]
    start = 0
    for expert, (size, count) in enumerate(zip(plan.sizes.tolist(), counts, strict=True)):
        copies = plan.copies[start : start + size].tolist()
        wanted = (experts.reshape(-1) == expert).nonzero().squeeze(1).tolist()
        assert copies == wanted + [-1] * (size - count)
        start += size
    assert plan.slots.shape == experts.shape
    for copy, expert in enumerate(experts.reshape(-1).tolist()):
        slot = int(plan.slots.reshape(-1)[copy])
        assert (slot == -1) == (expert == ELSEWHERE)
        assert slot == -1 or int(plan.copies[slot]) == copy


def test_more_experts_than_a_byte_counts() -> None:
    """A rank has 256 experts of the 671B where EP is 1."""
    num_experts = 300
    experts = torch.arange(num_experts).flip(0).unsqueeze(1)
    counts = [1] * num_experts
    plan = plan_groups(experts, counts, 8)
    assert plan.copies.view(num_experts, 8)[:, 0].tolist() == list(range(num_experts))[::-1]
    assert bool((plan.copies.view(num_experts, 8)[:, 1:] == -1).all())


def eight_rows() -> tuple[GroupPlan, torch.Tensor]:
    """A token with eight experts: one large row, and seven that BF16 loses beside it."""
    experts = torch.arange(8).unsqueeze(0)
    plan = plan_groups(experts, [1] * 8, 8)
    grouped = torch.zeros(plan.copies.numel(), 4, dtype=torch.bfloat16)
    grouped[plan.slots[0].long()] = torch.tensor([256.0] + [0.5] * 7).bfloat16().unsqueeze(1)
    return plan, grouped


def test_a_tokens_rows_are_summed_in_float32() -> None:
    plan, grouped = eight_rows()
    # 256 + 3.5, which BF16 rounds to 260 once; one after the other nothing is added to 256.
    assert collect(grouped, None, plan).tolist() == [[260.0] * 4]


def test_padding_rows_are_zero_in_the_forward_and_in_the_backward() -> None:
    experts, counts = CASES["uneven"]
    plan = plan_groups(experts, counts, 32)
    tokens = torch.randn(experts.shape[0], 8, dtype=torch.float64, requires_grad=True)
    rows = spread(tokens, plan)
    assert not rows[plan.copies < 0].any()
    rows.retain_grad()
    collect(rows, None, plan).sum().backward()
    assert rows.grad is not None
    assert not rows.grad[plan.copies < 0].any()
    assert bool((rows.grad[plan.copies >= 0] == 1).all())


def test_nothing_but_the_plan_is_kept_without_scores() -> None:
    experts, counts = CASES["uneven"]
    plan = plan_groups(experts, counts, 32)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.randn(experts.shape[0], 8, requires_grad=True)
        collect(spread(tokens, plan), None, plan)
    assert kept and all(not tensor.is_floating_point() for tensor in kept)


@pytest.mark.parametrize("tokens", [0, 1, 37, 64])
def test_a_plan_on_the_device_is_that_of_the_host(tokens: int) -> None:
    torch.manual_seed(0)
    experts = torch.rand(tokens, 5).argsort(1)[:, :2]
    counts = torch.bincount(experts.flatten(), minlength=6).tolist()
    there, here = plan_on_device(experts, 6, 8), plan_groups(experts, counts, 8)
    used = int(here.ends[-1])
    assert torch.equal(there.copies[:used], here.copies) and (there.copies[used:] == -1).all()
    assert len(there.copies) % 8 == 0
    for name in ("slots", "sizes", "ends"):
        assert torch.equal(getattr(there, name), getattr(here, name))
    packed = plan_on_device(experts, 6, 1)
    assert packed.sizes.tolist() == counts and len(packed.copies) == experts.numel()
    assert torch.equal(packed.copies.sort().values, torch.arange(experts.numel()).int())


def activation_errors(hidden: int, dtype: torch.dtype) -> list[float]:
    """Of the kernels' activations and both gradients, relative, against float64."""
    from cookbook.titan.common import triton_kernels

    torch.manual_seed(hidden)
    values = [torch.randn(9, 2 * hidden), torch.rand(9, 1), torch.randn(9, hidden)]
    both, scores, grad = values[0].to(dtype), values[1], values[2].to(dtype)
    exact = [one.double().requires_grad_() for one in (both, scores)]
    gate, up = exact[0].chunk(2, 1)
    out = torch.nn.functional.silu(gate) * up * exact[1]
    wanted = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    found = [triton_kernels.activate(both, scores)]
    found += triton_kernels.gradient(grad, both, scores)
    pairs = zip(found, wanted, strict=True)
    return [float((one.double() - exact).norm() / exact.norm()) for one, exact in pairs]


def test_quantized_experts_train_with_own_rows_and_recomputation_changes_no_bit(
    assets: Path, tmp_path: Path
) -> None:
    def trained(name: str, *words: str) -> dict[str, Any]:
        return run(assets, tmp_path / name, 2, *EP2, *A2A, *MXFP8, *words)

    plain, kept = trained("plain"), trained("kept", "--cookbook.row_kernels")
    for what in ("losses", "grad_norms"):
        assert kept[what] == pytest.approx(plain[what], rel=1e-4)
    active_now = [active(kept)[name] for name in ("rows", "dispatch", "grouped_gemms")]
    assert active_now == ["kernels", "mxfp8", "mxfp8"]
    again = trained("again", "--cookbook.row_kernels", *SAVE)
    assert all(again[what] == kept[what] for what in ("losses", "grad_norms"))


# With the relative and absolute differences that are allowed.
TYPES = ((torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 1e-3))


def kernels_against_operations() -> None:
    """Runs in a process of its own, whose Triton interprets kernels on the CPU."""
    from cookbook.titan.common import triton_kernels

    # Several programs even for the cases here.
    triton_kernels._COPIES, triton_kernels._ROWS = 16, 16
    for case, (experts, counts) in CASES.items():
        plan = plan_groups(experts, counts, 32)
        sums = triton_kernels.count(experts, len(counts))
        assert sums[:, -1].tolist() == counts
        copies, slots = triton_kernels.place(experts, sums, plan.sizes, plan.ends, len(plan.copies))
        assert torch.equal(copies, plan.copies) and torch.equal(slots, plan.slots)
        assert (copies.dtype, slots.dtype) == (plan.copies.dtype, plan.slots.dtype)
        # The kernels take 2048 and 1024 features at a time: once more than both, ragged.
        for features in (40, 2100) if case == "empty experts" else (40,):
            for dtype, rtol, atol in TYPES if case == "uneven" else TYPES[:1]:
                torch.manual_seed(4)
                tokens = torch.randn(experts.shape[0], features).to(dtype)
                rows = torch.randn(plan.copies.numel(), features).to(dtype)
                scores = torch.rand(experts.shape)
                same = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
                dot, take = (tokens, rows, plan.slots), (rows[:, :1], plan.slots)
                same(triton_kernels.dot(*dot), expert_groups._dot(*dot))
                same(triton_kernels.take(*take), expert_groups.take_at(*take))
                same(
                    triton_kernels.take(scores, plan.copies),
                    expert_groups.take_at(scores, plan.copies),
                )
                variants = ((scores, tokens.float()), (None, tokens), (None, None))
                is_each = case == "uneven" and dtype == torch.float32
                for weights, base in variants if is_each else variants[:1]:
                    other = torch.float32 if base is None else dtype
                    same(
                        triton_kernels.spread(tokens, weights, plan.copies, plan.slots, other),
                        expert_groups.move_rows(tokens, weights, plan, other),
                    )
                    same(
                        triton_kernels.collect(rows, weights, plan.slots, other, base),
                        expert_groups.sum_rows(rows, weights, plan, other, base),
                    )
                if not is_each:
                    continue
                # Results of collectives have no address of their own.
                sent = [AsyncCollectiveTensor(one) for one in (tokens, rows, scores)]
                same(triton_kernels.dot(sent[0], sent[1], plan.slots), expert_groups._dot(*dot))
                same(
                    triton_kernels.take(sent[2], plan.copies),
                    expert_groups.take_at(scores, plan.copies),
                )
                same(
                    triton_kernels.spread(sent[0], sent[2], plan.copies, plan.slots, dtype),
                    expert_groups.move_rows(tokens, scores, plan, dtype),
                )
                same(
                    triton_kernels.collect(sent[1], sent[2], plan.slots, dtype, sent[0]),
                    expert_groups.sum_rows(rows, scores, plan, dtype, tokens),
                )

    # The kernels take 2048 at a time: once more, ragged.
    for hidden in (24, 2100):
        assert max(activation_errors(hidden, torch.float32)) < 1e-6
        assert max(activation_errors(hidden, torch.bfloat16)) < 6e-3
    weight, joined = torch.randn(3, 30, 200), torch.zeros(3, 60, 200, dtype=torch.float64)
    part = joined[:, 30:]
    for factor, base, times in ((None, None, 1), (torch.tensor(0.5), part, 1.5), (None, weight, 2)):
        triton_kernels.cast(weight, part, factor, base)
        assert torch.equal(joined[:, 30:], times * weight.double()) and not joined[:, :30].any()
    given, narrow = torch.full((1, 1, 40), 257.0), torch.full((1, 1, 40), 3.0).bfloat16()
    # 257 is no BF16: what is added to a narrow gradient is added in the target's dtype.
    triton_kernels.cast(given, total := torch.empty_like(given), None, narrow)
    assert torch.equal(total, given + 3)

    plan, grouped = eight_rows()
    for scores in (None, torch.ones(1, 8)):
        found = triton_kernels.collect(grouped, scores, plan.slots, grouped.dtype, None)
        # The interpreter cuts 259.5 off to 258, where a GPU rounds to 260; a sum in BF16 is 256.
        assert float(found.min()) >= 258, found


def test_triton_kernels_do_what_the_operations_do() -> None:
    code = "from tests.test_titan_expert_groups import *; kernels_against_operations()"
    done = python("-c", code, variables={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("capability", [90, 100])
def test_triton_kernels_compile_for_hopper_and_blackwell(capability: int) -> None:
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, compile  # type: ignore[import-untyped]

    from cookbook.titan.common import triton_kernels

    pointers = {"tokens": "*bf16", "grouped": "*bf16", "scores": "*fp32", "products": "*fp32"}
    pointers |= dict.fromkeys(("copies", "slots", "counts", "sums", "sizes", "ends"), "*i32")
    pointers |= dict.fromkeys(("gate_up", "activations", "grad", "grad_gate_up"), "*bf16")
    pointers |= dict.fromkeys(("base", "grad_scores", "source", "target"), "*fp32")
    pointers |= {"experts": "*i64", "places": "*i32", "values": "*fp32", "taken": "*fp32"}
    pointers |= dict.fromkeys(("num_copies", "num_places", "num_rows", "features"), "i32")
    strides = ("source_stride", "target_stride", "base_stride")
    pointers |= {"factor": "*fp32", **dict.fromkeys(("size", *strides), "i32")}
    constants: dict[str, Any] = {"top_k": 8, "block": 1024, "features": 7168, "rows": 64}
    constants |= {"hidden": 2048, "num_experts": 16}
    kernels = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
    assert len(kernels) == 10
    for name in kernels:
        kernel = getattr(triton_kernels, name)
        signature = {a: pointers.get(a, "constexpr") for a in kernel.arg_names}
        if name in ("_dot_kernel", "_fill_kernel"):
            signature["features"] = "constexpr"
        constexprs = [a for a in kernel.arg_names if signature[a] == "constexpr"]
        used = {a: constants[a] for a in constexprs}
        source = ASTSource(kernel, signature, used)
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


def test_fsdp_leaves_the_scores_in_float32() -> None:
    from torch.distributed.utils import _cast_forward_inputs

    plan = plan_groups(torch.zeros(2, 1, dtype=torch.int32), [2], 8)
    groups = Groups(scores=torch.ones(2, 1), plan=plan)
    assert _cast_forward_inputs(torch.bfloat16, groups)[0][0].scores.dtype == torch.float32
