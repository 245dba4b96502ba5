"""What each kernel's test case would miss: kernels that are wrong in one respect alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
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
    random_routing,
    rows,
    run_case,
    uneven_counts,
)
from cookbook.titan.self_check.products import (
    Attend,
    AttentionShape,
    attention_errors,
    attention_inputs,
    document_ends,
    flash_attention_4,
)
from tests.self_check_fault import (
    halves_swapped,
    put_in,
    scaled,
    with_argument,
    with_gradient,
    with_result,
)
from tests.titan_ranks import run_ranks

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


def test_some_experts_of_a_proof_have_no_row_one_or_more_than_a_tile() -> None:
    counts = uneven_counts(64, 4096)
    assert {0, 1, 31, 33, 129, 7} <= set(counts) and sum(counts) == 4096
    # One that stops early is seen.
    assert counts[0] == 0 and counts[-1] > 1
    experts, scores = random_routing(1000, 8, 2, "cpu", 1)
    found = torch.bincount(experts.flatten(), minlength=8)
    assert (found[[1, 6]] == 0).all() and found[0] > found[2:6].max()
    assert float(scores.min()) >= 0.25 and float(scores.max()) <= 1


def test_gemms_are_held_to_the_bound_of_their_format() -> None:
    """A format that quantizes must show it; a weight gradient in high precision must not."""
    least = {
        kind: [bound.least > 0 for bound in bounds] for kind, bounds in products.BOUNDS.items()
    }
    assert least["bf16"] == [False] * 3
    assert least["mxfp8"] == least["fp8_rowwise"] == least["mx"] == [True] * 3
    assert least["mxfp8_wgrad_with_hp"] == [True, True, False]
    whole = {kind: [bound.whole for bound in bounds] for kind, bounds in products.BOUNDS.items()}
    # One rounding to E4M3 is a part of 0.026 on average, to BF16 of 0.0017.
    assert whole["mxfp8_wgrad_with_hp"][2] == whole["bf16"][0] < 0.01
    assert all(0.026 < one < 0.06 for one in whole["mxfp8"])


# More heads than are compared at a time, documents of one token.
SHAPE = AttentionShape(batch=2, length=96, heads=6, head_dim=16, v_head_dim=8, scale=0.3)


class TestAttention:
    def wrong(self, changes: dict[int, Change], packing: str, like_trained: bool) -> list[str]:
        def attend_by(shape: AttentionShape, ends: torch.Tensor) -> Attend:
            attend = flash_attention_4(shape, ends)
            return lambda *qkv: attend(*(changes.get(i, lambda x: x)(x) for i, x in enumerate(qkv)))

        return wrong(attention_errors(SHAPE, packing, like_trained, attend_by, "cpu"))

    @pytest.mark.parametrize("packing", ["edges", "short", "whole"])
    @pytest.mark.parametrize("like_trained", [False, True])
    def test_one_that_only_rounds_is_right(self, packing: str, like_trained: bool) -> None:
        assert self.wrong({}, packing, like_trained) == []

    def test_every_head_and_every_value_is_compared(self) -> None:
        last_head = {2: scaled(1.2, at=5, dim=1)}
        assert self.wrong(last_head, "edges", False) == ["out", "dq", "dk", "dv"]
        # NaN is not larger than any bound.
        unwritten = {2: scaled(math.nan, at=191)}
        assert self.wrong(unwritten, "edges", False) == ["out", "dq", "dk", "dv"]

    def test_what_fails_for_trained_values_alone_is_found(self) -> None:
        """Random ones are nowhere near this bound."""
        bounded: dict[int, Change] = {1: lambda k: k.clamp(-6, 6)}
        assert self.wrong(bounded, "whole", False) == []
        assert set(self.wrong(bounded, "whole", True)) >= {"dq", "dk"}

    def test_trained_values_may_be_twice_as_far_off_and_no_others(self) -> None:
        """Gradients of peaked scores are small differences."""
        off: dict[int, Change] = {2: lambda v: v * 1.015}
        assert "out" in self.wrong(off, "whole", False)
        assert "out" not in self.wrong(off, "whole", True)
        assert "out" in self.wrong({2: lambda v: v * 1.03}, "whole", True)

    def test_documents_begin_at_the_first_token_and_are_the_same_in_every_process(self) -> None:
        edges = document_ends("edges", 1, 200)[0].nonzero().flatten().tolist()
        assert edges == [0, 1, 3, 66, 130, 195, 199]
        drawn = document_ends("short", 200, 2000)
        assert drawn.equal(document_ends("short", 200, 2000))
        assert 300 < drawn.numel() / int(drawn.sum()) < 430
        # No more than a sequence has room for: the last takes the rest.
        most = document_ends("edges", 2, 200, 3)
        assert most.nonzero().tolist() == [[0, 0], [0, 1], [0, 199], [1, 90], [1, 186], [1, 199]]

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
        assert list(attention_errors(SHAPE, "whole", True, flash_attention_4, "cpu"))
        cu_seqlens, longest = calls.pop()
        assert (len(cu_seqlens), longest) == (2 * 16 + 1, 96)

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
    """An MoE layer in plain PyTorch; `changed` are its parts that are wrong."""

    def __init__(self, given: rows.Exchanged, experts: int, changed: dict[str, Change]) -> None:
        super().__init__()
        self.router = rows.FixedRouter(given.scores, given.experts, experts)
        self.experts = rows.FactorExperts(experts, "cpu")
        self.changed = changed

    def change(self, name: str, values: torch.Tensor) -> torch.Tensor:
        spoil = with_gradient(0, self.changed.get(f"grad of {name}", lambda x: x))
        changed: torch.Tensor = spoil(self.changed.get(name, lambda x: x))(values)
        return changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folded = self.change("x", x.flatten(0, 1))
        scores, experts, counts = self.router(folded)
        order = experts.flatten().argsort(stable=True)
        token = order // experts.shape[1]
        out = self.experts(folded[token], counts)
        scored = out.float() * self.change("scores", scores).flatten()[order, None]
        total = torch.zeros(folded.shape).index_add(0, token, scored)
        return self.change("out", total.to(x.dtype)).view_as(x)


def in_fp8(values: torch.Tensor) -> torch.Tensor:
    rounded = values.detach().to(torch.float8_e4m3fn).to(values.dtype)
    return values + (rounded - values).detach()


def exchanged_alone(experts: int, dp_ranks: int) -> list[float]:
    """The largest error of a right layer in units of its bound, at each of many ranks."""
    shape = rows.ExchangeShape(3, 100, 64, experts, min(experts, 3), ep=1, tp=1)
    shares = []
    for dp_rank in range(dp_ranks):
        given, group = rows.inputs_of(shape, dp_rank, "cpu"), dist.group.WORLD
        assert group
        layer = Layer(given, experts, {})
        errors = rows.exchange_errors(shape, given, layer, None, group, (False, False))
        shares.append(max(error.share for error in errors))
    return shares


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class TestExchange:
    """Dispatch and combine, here without any communication."""

    @pytest.mark.parametrize(
        ("changed", "quantized", "expected"),
        [
            ({}, (False, False), []),
            # What is to be quantized, and is not.
            ({}, (True, False), ["output"]),
            ({}, (False, True), ["gradient of the tokens"]),
            ({"x": in_fp8}, (True, False), []),
            ({"grad of out": in_fp8}, (False, True), []),
            # What is quantized, and is not to be.
            ({"out": in_fp8}, (False, False), ["output"]),
            ({"grad of x": in_fp8}, (False, False), ["gradient of the tokens"]),
            ({"grad of scores": halves_swapped}, (False, False), ["gradient of the scores"]),
        ],
    )
    def test_it_is_held_to_what_it_says_of_itself(
        self,
        changed: dict[str, Change],
        quantized: tuple[bool, bool],
        expected: list[str],
        group: dist.ProcessGroup,
    ) -> None:
        shape = rows.ExchangeShape(3, 32, 32, 8, 3, ep=1, tp=1)
        given = rows.inputs_of(shape, 0, "cpu")
        layer = Layer(given, shape.experts, changed)
        assert wrong(rows.exchange_errors(shape, given, layer, None, group, quantized)) == expected

    def test_the_gradient_of_each_expert_is_compared(self, group: dist.ProcessGroup) -> None:
        shape = rows.ExchangeShape(3, 32, 32, 8, 3, ep=1, tp=1)
        given = rows.inputs_of(shape, 0, "cpu")
        layer = Layer(given, shape.experts, {})
        layer.experts.factor.register_hook(scaled(1.1, at=2))
        found = rows.exchange_errors(shape, given, layer, None, group, (False, False))
        assert wrong(found) == ["gradient of the experts"]

    @pytest.mark.nightly
    @pytest.mark.parametrize("experts", [1, 2, 4])
    def test_experts_gradients_that_nearly_cancel_refuse_no_job(self, experts: int) -> None:
        # A rank of many GPUs has few experts, and a gradient sums products of either sign.
        (shares,) = run_ranks(exchanged_alone, 1, experts, 256)
        assert len(shares) == 256 and max(shares) < 0.5


@pytest.mark.parametrize(
    ("folder", "refused"), [("{wheel}/lib", False), ("/usr/lib/x86_64-linux-gnu", True)]
)
def test_an_nvshmem_other_than_deepeps_ends_the_job(
    folder: str, refused: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from cookbook.titan.tt_0_2_2 import self_check
    from tests.titan_refusal import refusal

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


def test_a_check_leaves_no_notes_of_what_ran() -> None:
    from cookbook.titan.tt_0_2_2 import activity
    from cookbook.titan.tt_0_2_2.self_check import _without_traces

    before = set(activity.losses)
    with _without_traces("cpu"):
        activity.losses.add("of the check")
    assert activity.losses == before
