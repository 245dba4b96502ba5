"""The self-check's merged errors and inputs, and the orders that a dry build reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.titan


def gathered(views: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were rank 0 of so many ranks, which have these views."""
    monkeypatch.setattr(dist, "get_world_size", lambda *_: len(views))
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    def all_gather_object(everywhere: list[Any], own: Any) -> None:
        everywhere[:] = views

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)


def proof(share: float, failure: str | None = None) -> Any:
    from cookbook.titan.selftest.cases import BF16, CaseResult, Error

    errors = (Error("output", share * BF16.whole, 0.0, BF16),)
    return CaseResult("a kernel", "a shape", errors, failure, "", 0.0)


def test_the_worst_of_all_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2.self_check import worst_of_ranks

    ranks = [
        [proof(0.2), proof(0.9), proof(0.9)],
        [proof(0.8), proof(0.1), proof(0.1, "it raised")],
    ]
    gathered(ranks, monkeypatch)
    found = worst_of_ranks(ranks[0])
    # A failure before any error, however small.
    assert [round(one.share, 1) for one in found] == [0.8, 0.9, 0.1]
    assert [one.fault is None for one in found] == [True, True, False]


def test_rows_of_a_column_weigh_the_same() -> None:
    """A few large rows do not hide what is wrong in the small ones."""
    from cookbook.titan.selftest.cases import BF16, error_of

    torch.manual_seed(0)
    expected = torch.randn(64, 4)
    expected[:4] *= 1e4
    wrong = expected.clone()
    wrong[4:, 2] *= 1.5
    error = error_of("output", wrong, expected, BF16, parts=[(1,)])
    assert error.part == pytest.approx(0.5, rel=0.05)
    assert error.whole < 1e-3


def test_some_experts_of_a_proof_have_no_row_one_or_more_than_a_tile() -> None:
    from cookbook.titan.selftest.cases import random_routing, uneven_counts

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
    from cookbook.titan.selftest.gemms import BOUNDS

    least = {kind: [bound.least > 0 for bound in bounds] for kind, bounds in BOUNDS.items()}
    assert least["bf16"] == [False] * 3
    assert least["mxfp8"] == least["fp8_rowwise"] == least["mx"] == [True] * 3
    assert least["mxfp8_wgrad_with_hp"] == [True, True, False]
    whole = {kind: [bound.whole for bound in bounds] for kind, bounds in BOUNDS.items()}
    # One rounding to E4M3 is a part of 0.026 on average, to BF16 of 0.0017.
    assert whole["mxfp8_wgrad_with_hp"][2] == whole["bf16"][0] < 0.01
    assert all(0.026 < one < 0.06 for one in whole["mxfp8"])


def actions(*words: str) -> list[Any]:
    """`F0` is a forward of stage 0; B a whole backward, I and W its halves."""
    kinds = {"F": "FORWARD", "B": "FULL_BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}
    return [
        SimpleNamespace(
            sub_actions=None,
            stage_index=int(word[1]),
            computation_type=SimpleNamespace(name=kinds[word[0]]),
            microbatch_index=place,
        )
        for place, word in enumerate(words)
    ]


def test_microbatches_in_flight_end_with_the_gradients_of_the_weights() -> None:
    from cookbook.titan.dry_build.schedules import in_flight, rank_actions

    def counts(stages: list[int], *words: str) -> list[list[int]]:
        return in_flight(rank_actions(actions(*words), is_single=True), stages)

    assert counts([0], "F0", "B0", "F0", "B0") == [[1]]
    assert counts([0], "F0", "F0", "B0", "F0", "B0", "B0") == [[2]]
    # What the weights need is kept until then.
    assert counts([0], "F0", "I0", "F0", "W0", "I0", "W0") == [[2]]
    # Two of one stage at a time, and two of the other at another.
    order = ("F0", "F0", "B0", "F1", "B0", "F1", "B1", "B1")
    assert counts([0, 1], *order) == [[0, 2], [1, 1], [2, 0]]


def test_a_ranks_actions_are_in_its_own_order() -> None:
    from cookbook.titan.dry_build.schedules import rank_actions

    order = actions("F0", "F0", "B0", "I0", "W0")
    kinds = [kind for _, kind, _ in rank_actions(order, is_single=False)]
    assert kinds == ["F", "F", "B", "I", "W"]
    assert [number for *_, number in rank_actions(order, is_single=False)] == [0, 1, 2, 3, 4]
    # Of a rank with one stage each kind is counted by itself.
    assert [number for *_, number in rank_actions(order, is_single=True)] == [0, 1, 0, 0, 0]
