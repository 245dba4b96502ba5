"""What each kernel's test case would miss: kernels that are wrong in one respect alone."""

import json
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.self_check import (
    BF16,
    FP8,
    Error,
    KernelCase,
    error_of,
    products,
    rows,
    run_case,
)
from cookbook.titan.self_check.products import (
    Attend,
    AttentionShape,
    attention_errors,
    attention_inputs,
    document_ends,
    flash_attention_4,
)
from cookbook.titan.tt_0_2_2.self_check_cases import _loss
from tests.self_check_fault import put_in, scaled, with_argument, with_gradient, with_result
from tests.titan_ranks import run_ranks
from tests.titan_run import refusal

pytestmark = [
    pytest.mark.titan,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

Change = Callable[[torch.Tensor], torch.Tensor]
LOSS = "cookbook.titan.self_check.products.chunked_cross_entropy"


def wrong(errors: Iterable[Error]) -> list[str]:
    """The tensors that are off, of those that were compared."""
    found = list(errors)
    # Rounding shows in each of them.
    assert found and all(error.part > 0 for error in found)
    return [error.tensor for error in found if error.fault]


class TestError:
    def test_it_is_taken_of_every_part_by_itself(self) -> None:
        torch.manual_seed(0)
        expected = torch.randn(1000, 64)
        right = error_of("output", expected.bfloat16(), expected, BF16)
        assert right.fault is None and 0.001 < right.whole < 0.003

        lost = scaled(0, at=-1)(expected)
        error = error_of("output", lost, expected, BF16)
        assert error.part == 1 and error.whole < 0.05
        # Each column has a part of the lost row.
        assert error_of("output", lost, expected, BF16, parts=[(1,)]).part < 0.2

        small = scaled(1e-3, at=3)(expected)
        off = scaled(1.1, at=3)(small)
        assert error_of("output", off, small, BF16).part == pytest.approx(0.1, abs=1e-4)

        expected[5] = 0
        written = expected.clone()
        written[5, 0] = 1e-3
        assert error_of("output", written, expected, BF16).part > 1
        written[5, 0] = math.nan
        found = error_of("output", written, expected, BF16)
        assert math.isinf(found.whole) and "off by inf" in (found.fault or "")
        with pytest.raises(ValueError, match=r"output has the shape \[999, 64\], not \[1000, 64\]"):
            error_of("output", expected[1:], expected, BF16)

    def test_a_kernel_that_raises_has_failed_and_stops_no_other(self) -> None:
        def raises() -> list[Error]:
            raise RuntimeError("expects the M-mode to be 64,\nbut got 96")

        result = run_case(KernelCase("grouped GEMM bf16", "2 experts", raises, "take bf16"), "cpu")
        assert result.fault == (
            "grouped GEMM bf16 at 2 experts: RuntimeError: expects the M-mode to be 64, but got 96"
        )
        content = result.as_json()
        assert content["ok"] is False and content["avoid"] == "take bf16"
        exact = Error("output", 0.001, 0.002, FP8)
        assert exact.fault and "nothing was quantized" in exact.fault
        infinite = [Error("out", math.inf, math.nan, FP8)]
        content = run_case(KernelCase("k", "s", lambda: infinite, ""), "cpu").as_json()
        assert json.loads(json.dumps(content, allow_nan=False))["errors"][0]["whole"] is None


def test_rows_of_a_column_weigh_the_same() -> None:
    """A few large rows do not hide what is wrong in the small ones."""
    torch.manual_seed(0)
    expected = torch.randn(64, 4)
    expected[:4] *= 1e4
    wrong = expected.clone()
    wrong[4:, 2] *= 1.5
    error = error_of("output", wrong, expected, BF16, parts=[(1,)])
    assert error.part == pytest.approx(0.5, rel=0.05)
    assert error.whole < 1e-3


# More heads than are compared at a time, documents of one token.
SHAPE = AttentionShape(batch=2, length=96, heads=6, head_dim=16, v_head_dim=8, scale=0.3)


class TestAttention:
    def wrong(self, changes: dict[int, Change], packing: str, like_trained: bool) -> list[str]:
        def attend_by(shape: AttentionShape, ends: torch.Tensor) -> Attend:
            attend = flash_attention_4(shape, ends)
            return lambda *qkv: attend(*(changes.get(i, lambda x: x)(x) for i, x in enumerate(qkv)))

        return wrong(attention_errors(SHAPE, packing, like_trained, attend_by, "cpu"))

    def test_nan_is_not_larger_than_any_bound(self) -> None:
        unwritten = {2: scaled(math.nan, at=191)}
        assert self.wrong(unwritten, "edges", False) == ["out", "dq", "dk", "dv"]

    def test_what_fails_for_trained_values_alone_is_found(self) -> None:
        """Random ones are nowhere near this bound."""
        bounded: dict[int, Change] = {1: lambda k: k.clamp(-6, 6)}
        assert self.wrong(bounded, "whole", False) == []
        assert set(self.wrong(bounded, "whole", True)) >= {"dq", "dk"}

    def test_as_many_documents_are_declared_as_in_training(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FlashAttention-4 takes another kernel beyond 256 of them."""
        calls: list[Any] = []
        operator = varlen.varlen_attention

        def noted(*args: Any) -> Any:
            calls.append(args[3:5])
            return operator(*args)

        monkeypatch.setattr(varlen, "varlen_attention", noted)
        # Three sequences of 4,096 tokens with room for 33 documents each, one more than two share.
        for room, packing, documents in ((99, "whole", 2), (99, "edges", 7), (9, "edges", 6)):
            shape = replace(SHAPE, max_documents=room, max_length=4096)
            assert wrong(attention_errors(shape, packing, True, flash_attention_4, "cpu")) == []
            cu_seqlens, longest = calls.pop()
            assert (len(cu_seqlens), int(cu_seqlens[-1]), longest) == (room + 1, 192, 4096)
            assert int((cu_seqlens.diff() > 0).sum()) == documents

    @pytest.mark.parametrize(("kind", "packing"), [("sdpa", "whole"), ("flex", "edges")])
    def test_torchtitans_own_has_the_scale_and_the_documents_of_the_shape(
        self, kind: str, packing: str
    ) -> None:
        """Not the usual scale: YaRN's is another beyond 4,096 tokens."""
        from cookbook.titan.tt_0_2_2 import self_check_cases

        shape = AttentionShape(batch=2, length=32, heads=2, head_dim=16, v_head_dim=16, scale=0.7)
        q, k, v, _ = attention_inputs(shape, False, "cpu")
        ends = document_ends(packing, 2, 32)
        attends = (getattr(self_check_cases, kind), flash_attention_4)
        found, expected = (attend(shape, ends)(q, k, v).float() for attend in attends)
        assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, []),
        (with_result(lambda value: value * 1.002), ["loss"]),
        (with_argument(2, lambda labels: labels.clamp_min(0)), None),
        (with_argument(2, lambda labels: labels.where(labels != 63, -100)), None),
        (with_gradient(0, lambda grad: grad * 1.03), ["gradient of the hidden states"]),
        # One row of 64 words; as little of the whole gradient as rounding.
        (with_gradient(1, scaled(1.07, at=0)), ["gradient of the weight"]),
    ],
)
def test_a_wrong_loss_in_chunks_is_found(fault: Any, expected: list[str] | None) -> None:
    with put_in(LOSS, fault or (lambda original: original)):
        found = wrong(products.loss_errors(95, 32, 64, 4, None, None, "cpu"))
    everything = ["loss", "gradient of the weight", "gradient of the hidden states"]
    assert found == (everything if expected is None else expected)


class Layer(nn.Module):
    """An MoE layer in plain PyTorch, of one rank alone."""

    def __init__(self, given: rows.Exchanged, experts: int) -> None:
        super().__init__()
        self.router = rows.FixedRouter(given.scores, given.experts, experts)
        self.experts = rows.FactorExperts(experts, "cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folded = x.flatten(0, 1)
        scores, experts, counts = self.router(folded)
        order = experts.flatten().argsort(stable=True)
        token = order // experts.shape[1]
        scored = self.experts(folded[token], counts).float() * scores.flatten()[order, None]
        out = torch.zeros(folded.shape).index_add(0, token, scored)
        return out.to(x.dtype).view_as(x)


def exchanged_alone(experts: int, dp_ranks: int) -> tuple[list[float], list[str]]:
    """The largest error of a right layer at each of many ranks, and the faults of a wrong one."""
    group = dist.group.WORLD
    assert group
    shares = []
    for dp_rank in range(dp_ranks):
        given = rows.exchange_inputs(3, 100, 64, experts, min(experts, 3), dp_rank, "cpu")
        layer = Layer(given, experts)
        errors = rows.exchange_errors(given, layer, slice(None), group, (False, False))
        shares.append(max(error.share for error in errors))
    if experts == 1:
        # The scores' gradient has one term, without any rounding.
        return shares, []
    layer = Layer(given, experts)
    layer.experts.factor.register_hook(scaled(1.1, at=-1))
    found = rows.exchange_errors(given, layer, slice(None), group, (False, False))
    return shares, wrong(found)


@pytest.mark.parametrize(
    ("experts", "ranks"),
    [(8, 8), *(pytest.param(few, 256, marks=pytest.mark.nightly) for few in (1, 2, 4))],
)
def test_experts_gradients_that_nearly_cancel_refuse_no_job(experts: int, ranks: int) -> None:
    # A rank of many GPUs has few experts, and a gradient sums products of either sign.
    ((shares, said),) = run_ranks(exchanged_alone, 1, experts, ranks)
    assert len(shares) == ranks and max(shares) < 0.5
    assert experts < 8 or said == ["gradient of the experts"]


@pytest.mark.parametrize(
    ("folder", "refused"), [("{wheel}/lib", False), ("/usr/lib/x86_64-linux-gnu", True)]
)
def test_an_nvshmem_other_than_deepeps_ends_the_job(
    folder: str, refused: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from cookbook.titan.tt_0_2_2 import self_check

    wheel = tmp_path / "nvidia/nvshmem"
    wheel.mkdir(parents=True)
    spec = type("Spec", (), {"submodule_search_locations": [str(wheel)]})
    monkeypatch.setattr(self_check, "find_spec", lambda name: spec)
    library = f"{folder.format(wheel=wheel)}/libnvshmem_host.so.3"
    maps = f"7f0 r-xp 0 08:01 7 {library}\n7f1 r-xp 0 08:01 7 {library}\n7f2 r-xp 0 /lib/libc.so\n"
    if refused:
        reason = refusal(lambda: self_check.check_nvshmem(maps), caplog)
        assert reason.endswith(f"took {library}; take {folder} out of LD_LIBRARY_PATH")
    else:
        self_check.check_nvshmem(maps)


def test_a_kernel_that_breaks_the_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Every later call of CUDA fails with the same error, and would be blamed for it."""
    from cookbook.titan.tt_0_2_2 import self_check

    def broken() -> list[Error]:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, broken)
    case = KernelCase("dispatch", "2 ranks", broken, "take another")
    monkeypatch.setattr(self_check, "kernel_cases", lambda cell: [case])
    cell: Any = SimpleNamespace(device="cuda")
    assert refusal(lambda: self_check.run_cases(cell), caplog) == (
        "self-check: dispatch at 2 ranks: AcceleratorError: an illegal memory access was "
        "encountered; take another"
    )


def test_the_cases_tensors_are_freed_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the allocator keeps their memory, in the middle of what training needs."""
    from cookbook.titan.tt_0_2_2 import self_check

    alive: list[object] = []

    def errors(weight: torch.Tensor) -> list[Error]:
        return [Error("output", float(weight.sum()), 0.0, BF16)]

    def cases(cell: object) -> list[KernelCase]:
        weight = torch.zeros(2)
        ref = weakref.ref(weight)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(ref()))
        return [KernelCase("linear layer", "2 rows", partial(errors, weight), "")]

    def gather(everywhere: list[Any], own: object) -> None:
        everywhere[0] = own

    monkeypatch.setattr(self_check, "kernel_cases", cases)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    (result,) = self_check.run_cases(SimpleNamespace(device="cuda"))  # type: ignore[arg-type]
    assert result.fault is None and alive == [None]


def test_the_loss_may_have_more_chunks_than_tokens() -> None:
    options = SimpleNamespace(enable=False, components=(), backend="")
    loss = SimpleNamespace(num_chunks=5000)
    cell = SimpleNamespace(
        job_config=SimpleNamespace(loss=loss, compile=options),
        model_args=SimpleNamespace(dim=8, vocab_size=16),
        dims=SimpleNamespace(get_optional_mesh=lambda name: None),
        limits=SimpleNamespace(tokens=64),
        device=torch.device("cpu"),
    )
    (case,) = _loss(cell)  # type: ignore[arg-type]
    assert not wrong(case.run())
