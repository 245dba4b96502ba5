"""What each proof of the self-check would miss: kernels that are wrong in one respect alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.selftest import attention as attention_proof
from cookbook.titan.selftest import exchange, loss, rows
from cookbook.titan.selftest.attention import (
    Attend,
    AttentionShape,
    Told,
    attention_errors,
    flash_attention_4,
)
from cookbook.titan.selftest.cases import Error
from cookbook.titan.selftest.packings import document_ends_of
from tests.self_check_fault import (
    halves_swapped,
    put_in,
    with_argument,
    with_gradient,
    with_result,
)

pytestmark = pytest.mark.titan

Change = Callable[[torch.Tensor], torch.Tensor]
LOSS = "cookbook.titan.selftest.loss.chunked_cross_entropy"
ROWS = "cookbook.titan.selftest.rows"


def wrong(errors: Iterable[Error]) -> list[str]:
    """The tensors that are off, of those that were compared."""
    found = list(errors)
    # Rounding shows in each of them.
    assert all(error.part > 0 for error in found)
    return [error.tensor for error in found if error.fault]


# --- Attention: more heads than are compared at a time, documents of one token.

SHAPE = AttentionShape(batch=2, length=96, heads=6, head_dim=16, v_head_dim=8, scale=0.3)


def attention(changes: dict[int, Change], packing: str, like_trained: bool) -> list[str]:
    def attend_by(shape: AttentionShape, ends: torch.Tensor) -> Attend:
        attend = flash_attention_4(shape, ends)
        same: Change = lambda x: x  # noqa: E731
        return lambda *qkv: attend(*(changes.get(i, same)(x) for i, x in enumerate(qkv)))

    return wrong(attention_errors(SHAPE, packing, like_trained, attend_by, "cpu"))


@pytest.mark.parametrize("packing", ["edges", "short", "whole"])
@pytest.mark.parametrize("like_trained", [False, True])
def test_attention_that_only_rounds_is_right(packing: str, like_trained: bool) -> None:
    assert attention({}, packing, like_trained) == []


def test_every_head_is_compared() -> None:
    last = 1 + 0.2 * (torch.arange(6) == 5)[:, None]
    assert attention({2: lambda v: (v * last).bfloat16()}, "edges", False) == [
        "out",
        "dq",
        "dk",
        "dv",
    ]


def test_a_value_that_is_not_written_is_found() -> None:
    """NaN is not larger than any bound."""
    last = torch.arange(192)[:, None, None] == 191
    unwritten: Change = lambda v: v.masked_fill(last, torch.nan)  # noqa: E731
    assert attention({2: unwritten}, "edges", False) == ["out", "dq", "dk"]


def test_what_fails_for_trained_values_alone_is_found() -> None:
    """Random ones are nowhere near this bound."""
    bounded: dict[int, Change] = {1: lambda k: k.clamp(-6, 6)}
    assert attention(bounded, "whole", False) == []
    assert set(attention(bounded, "whole", True)) >= {"dq", "dk"}


def test_trained_values_may_be_twice_as_far_off_and_no_others() -> None:
    """Gradients of peaked scores are small differences."""
    off: dict[int, Change] = {2: lambda v: v * 1.015}
    assert "out" in attention(off, "whole", False)
    assert "out" not in attention(off, "whole", True)
    assert "out" in attention({2: lambda v: v * 1.03}, "whole", True)


def test_documents_begin_at_the_first_token_and_are_the_same_in_every_process() -> None:
    assert document_ends_of("edges", 1, 200)[0].nonzero().flatten().tolist() == [
        *(0, 1, 3, 66, 130),
        *(195, 199),
    ]
    drawn = document_ends_of("short", 2, 2000)
    assert drawn.equal(document_ends_of("short", 2, 2000)) and drawn.sum() > 4
    # No more than a sequence has room for: the last takes the rest.
    most = document_ends_of("edges", 2, 200, 3)
    assert most.nonzero().tolist() == [[0, 0], [0, 1], [0, 199], [1, 90], [1, 186], [1, 199]]


def test_attention_is_told_of_as_many_documents_as_in_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashAttention-4 takes another kernel beyond 256 of them."""
    calls = []

    def noted(*args: Any) -> torch.Tensor:
        calls.append(args[3:5])
        out: torch.Tensor = operator(*args)
        return out

    operator = varlen.varlen_attention
    monkeypatch.setattr(varlen, "varlen_attention", noted)
    # Three sequences of 4,096 tokens with room for 33 documents each, one more than two share.
    for room, packing, documents in ((99, "whole", 2), (99, "edges", 7), (9, "edges", 6)):
        shape = replace(SHAPE, told=Told(room, 4096))
        assert wrong(attention_errors(shape, packing, True, flash_attention_4, "cpu")) == []
        cu_seqlens, longest = calls.pop()
        assert (len(cu_seqlens), int(cu_seqlens[-1]), longest) == (room + 1, 192, 4096)
        assert int((cu_seqlens.diff() > 0).sum()) == documents
    assert list(attention_errors(SHAPE, "whole", True, flash_attention_4, "cpu"))
    cu_seqlens, longest = calls.pop()
    assert (len(cu_seqlens), longest) == (2 * 16 + 1, 96)


def test_long_documents_are_compared_in_fewer_heads_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A square of scores in float32 is 1 GiB for 16,384 tokens."""
    heads = []

    def noted(q: torch.Tensor, *args: Any) -> Any:
        if q.dtype == torch.float32:
            heads.append(q.shape[1])
        return forward(q, *args)

    forward = varlen.reference_forward
    monkeypatch.setattr(varlen, "reference_forward", noted)
    for scores, expected in ((96**2 - 1, [1] * 6), (2 * 96**2, [2] * 3), (1 << 28, [4, 2])):
        monkeypatch.setattr(attention_proof, "SCORES", scores)
        assert list(attention_errors(SHAPE, "whole", True, flash_attention_4, "cpu"))
        assert heads == expected
        heads.clear()


# --- The loss in chunks.


def loss_wrong() -> list[str]:
    return wrong(loss.loss_errors(95, 32, 64, 4, None, None, "cpu"))


def test_a_loss_in_chunks_is_right() -> None:
    assert loss_wrong() == []


# Of 64 words; as little of the whole gradient as rounding.
ONE_ROW = torch.tensor([1.07] + [1] * 63)[:, None]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (with_result(lambda value: value * 1.002), ["loss"]),
        (with_argument(2, lambda labels: labels.clamp_min(0)), None),
        (with_argument(2, lambda labels: labels.where(labels != 63, -100)), None),
        (with_gradient(0, lambda grad: grad * 1.03), ["gradient of the hidden states"]),
        (with_gradient(1, lambda grad: grad * ONE_ROW), ["gradient of the weight"]),
    ],
)
def test_a_wrong_loss_in_chunks_is_found(fault: Any, expected: list[str] | None) -> None:
    with put_in(LOSS, fault):
        found = loss_wrong()
    assert found == (
        expected or ["loss", "gradient of the weight", "gradient of the hidden states"]
    )


# --- Rows to expert groups and back.


def rows_wrong(scored: Any) -> list[str]:
    return wrong(rows.row_errors(rows.RowsShape(60, 32, 8, 3, 16), scored, "cpu"))


def absent_from_the_last_row(original: Any) -> Any:
    """A copy of another rank's has the slot -1."""

    def faulty(outputs: torch.Tensor, scores: Any, plan: Any, base: Any = None) -> torch.Tensor:
        total: torch.Tensor = original(outputs, scores, plan, base=base)
        times = (plan.slots < 0).sum(1, keepdim=True)
        return total + 1e-3 * times * outputs[-1].detach()

    return faulty


def fill_read(original: Any) -> Any:
    """As a kernel that sums whole blocks, with little weight."""

    def faulty(outputs: torch.Tensor, scores: Any, plan: Any, base: Any = None) -> torch.Tensor:
        total: torch.Tensor = original(outputs, scores, plan, base=base)
        return total + 1e-3 * outputs[plan.copies < 0].sum(0).detach()

    return faulty


def fill_written(original: Any) -> Any:
    """One number of one row."""

    def faulty(tokens: torch.Tensor, scores: Any, plan: Any, *dtype: Any) -> torch.Tensor:
        grouped: torch.Tensor = original(tokens, scores, plan, *dtype)
        last = (plan.copies < 0).nonzero()[-1]
        return grouped.index_fill(0, last, torch.nan)

    return faulty


def test_rows_that_fill_groups_up_are_zero() -> None:
    with put_in(f"{ROWS}.spread", fill_written), pytest.raises(ValueError, match="are not zero"):
        rows_wrong("before")


@pytest.mark.parametrize("scored", ["before", "between", "after"])
def test_rows_that_are_read_where_there_is_no_copy_are_found(scored: str) -> None:
    assert rows_wrong(scored) == []
    for fault in (fill_read, absent_from_the_last_row):
        with put_in(f"{ROWS}.collect", fault):
            assert "output" in rows_wrong(scored)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (with_result(lambda scores: scores.roll(1, 0)), "output"),
        (with_gradient(0, lambda grad: grad.roll(1, 0)), "gradient of the scores"),
    ],
)
def test_wrong_scores_of_rows_are_found(fault: Any, expected: str) -> None:
    with put_in(f"{ROWS}.row_scores", fault):
        assert expected in rows_wrong("between")


def test_its_factor_tells_an_expert_from_its_neighbours_and_those_of_other_ranks() -> None:
    factors = rows.expert_factors(256, "cpu")
    for distance in (1, 2, 4, 8, 16, 32, 64, 128):
        assert (factors[distance:] != factors[:-distance]).all()


# --- Dispatch and combine, here without any communication.


class Layer(nn.Module):
    """An MoE layer in plain PyTorch; `changed` are its parts that are wrong."""

    def __init__(self, given: exchange.Exchanged, experts: int, changed: dict[str, Change]) -> None:
        super().__init__()
        self.router = exchange.FixedRouter(given.scores, given.experts, experts)
        self.experts = exchange.FactorExperts(experts, "cpu")
        self.changed = changed

    def change(self, name: str, values: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = with_gradient(0, self.changed.get(f"grad of {name}", lambda x: x))(
            lambda x: x
        )(self.changed.get(name, lambda x: x)(values))
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


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def in_fp8(values: torch.Tensor) -> torch.Tensor:
    rounded = values.detach().to(torch.float8_e4m3fn).to(values.dtype)
    return values + (rounded - values).detach()


OUT, DX = "output", "gradient of the tokens"
DS, DF = "gradient of the scores", "gradient of the experts"


@pytest.mark.parametrize(
    ("changed", "quantized", "expected"),
    [
        ({}, (False, False), []),
        # What is to be quantized, and is not.
        ({}, (True, False), [OUT]),
        ({}, (False, True), [DX]),
        ({"x": in_fp8}, (True, False), []),
        ({"grad of out": in_fp8}, (False, True), []),
        # What is quantized, and is not to be.
        ({"out": in_fp8}, (False, False), [OUT]),
        ({"grad of x": in_fp8}, (False, False), [DX]),
        ({"grad of scores": halves_swapped}, (False, False), [DS]),
    ],
)
def test_an_exchange_is_held_to_what_it_says_of_itself(
    changed: dict[str, Change],
    quantized: tuple[bool, bool],
    expected: list[str],
    group: dist.ProcessGroup,
) -> None:
    shape = exchange.ExchangeShape(3, 32, 32, 8, 3, ep=1, tp=1)
    given = exchange.inputs_of(shape, 0, "cpu")
    layer = Layer(given, shape.experts, changed)
    assert wrong(exchange.exchange_errors(shape, given, layer, None, group, quantized)) == expected


def test_the_gradient_of_each_expert_is_compared(group: dist.ProcessGroup) -> None:
    shape = exchange.ExchangeShape(3, 32, 32, 8, 3, ep=1, tp=1)
    given = exchange.inputs_of(shape, 0, "cpu")
    layer = Layer(given, shape.experts, {})
    layer.experts.factor.register_hook(lambda grad: grad * (1 + 0.1 * (torch.arange(8) == 2)))
    found = exchange.exchange_errors(shape, given, layer, None, group, (False, False))
    assert wrong(found) == [DF]
