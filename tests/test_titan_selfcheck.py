"""The self-check in a job: a wrong kernel refuses it on every rank; else it leaves no trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.self_check_faults import FAULTS
from tests.titan_ranks import run_ranks
from tests.titan_run import EP2, STANDARD, active, job, run, train, write_assets

pytestmark = pytest.mark.titan

FLASH = "--model.attention=flash_attention_4"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    yield folder


def train_with_fault(name: str, rank: int, argv: list[str], attempt: Path) -> dict[str, Any]:
    """Train with a kernel that is wrong on one rank alone."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    if dist.get_rank() != rank:
        return train(argv, attempt)
    with fault.put_in():
        return train(argv, attempt)


@pytest.mark.parametrize(
    ("fault", "kernel", "avoid"),
    [
        ("last rows of dq not written", "flash_attention_4", "set model.attention=flavor"),
        (
            "received rows in another order",
            "dispatch and combine standard",
            "EP backend deepep does without it",
        ),
    ],
)
def test_a_wrong_kernel_of_one_rank_refuses_the_job(
    fault: str, kernel: str, avoid: str, assets: Path, tmp_path: Path
) -> None:
    attempt = tmp_path / "attempt-0"
    argv = job(assets, tmp_path / "out", *EP2, *STANDARD, FLASH)
    results = run_ranks(train_with_fault, 2, fault, 1, argv, attempt, seconds=200)
    for result in results:
        assert result["ended"] and not result["losses"]
    reasons = {text for result in results for text in result["said"] if "refuses" in text}
    (reason,) = reasons
    # Kernel, shape, error, and the option that does without it, in one line.
    sequences = "2 x " if kernel == "flash_attention_4" else "3 x "
    assert reason.startswith(f"cookbook refuses: self-check: {kernel} at {sequences}")
    assert " off by " in reason and ", allowed 0.0" in reason and avoid in reason
    assert "\n" not in reason
    file = json.loads((attempt / "self_check.json").read_text())
    assert not file["ok"]
    assert {proof["kernel"] for proof in file["proofs"] if not proof["ok"]} == {kernel}
    assert not (attempt / "environment.json").exists()


def test_a_job_trains_the_same_with_and_without_it(assets: Path, tmp_path: Path) -> None:
    options = (*EP2, *STANDARD, FLASH)
    checked = run(assets, tmp_path / "a", 2, *options)
    unchecked = run(assets, tmp_path / "b", 2, *options, "--cookbook.no_self_check")
    # To the last bit: no random number was drawn, nothing was noted and nothing is set otherwise.
    assert checked["losses"] == unchecked["losses"]
    assert checked["grad_norms"] == unchecked["grad_norms"]
    one, other = active(checked), active(unchecked)
    assert one.pop("self_check")["kernels"] == 4
    assert other.pop("self_check") is None
    assert one == other


def test_an_error_is_taken_of_every_part_by_itself() -> None:
    from cookbook.titan.selftest.cases import BF16, error_of

    torch.manual_seed(0)
    expected = torch.randn(1000, 64)
    right = error_of("output", expected.bfloat16(), expected, BF16)
    assert right.fault is None and 0.001 < right.whole < 0.003

    lost = expected.clone()
    lost[-1] = 0
    error = error_of("output", lost, expected, BF16)
    assert error.part == 1 and error.whole < 0.05
    # Each column has a part of the lost row.
    assert error_of("output", lost, expected, BF16, parts=[(1,)]).part < 0.2

    small = expected.clone()
    small[3] *= 1e-3
    wrong = small.clone()
    wrong[3] *= 1.1
    assert error_of("output", wrong, small, BF16).part == pytest.approx(0.1, abs=1e-4)

    expected[5] = 0
    written = expected.clone()
    written[5, 0] = 1e-3
    assert error_of("output", written, expected, BF16).part > 1
    written[5, 0] = math.nan
    found = error_of("output", written, expected, BF16)
    assert math.isinf(found.whole) and "off by inf" in (found.fault or "")
    with pytest.raises(ValueError, match=r"output has the shape \[999, 64\], not \[1000, 64\]"):
        error_of("output", expected[1:], expected, BF16)


def exchanged_alone(experts: int, dp_ranks: int) -> list[float]:
    """How much of its bound the worst error takes, of a right layer at each of many ranks."""
    from cookbook.titan.selftest import exchange

    class Layer(torch.nn.Module):
        def __init__(self, given: exchange.Exchanged) -> None:
            super().__init__()
            self.given, self.experts = given, exchange.FactorExperts(experts, "cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = self.experts.factor[self.given.experts]
            rows = x.float().flatten(0, 1)[:, None, :]
            copies = (rows * factors[..., None]).bfloat16()
            return (copies * self.given.scores[..., None]).sum(1).bfloat16().view(x.shape)

    shape = exchange.ExchangeShape(3, 100, 64, experts, min(experts, 3), ep=1, tp=1)
    shares = []
    for dp_rank in range(dp_ranks):
        given = exchange.inputs_of(shape, dp_rank, "cpu")
        group, layer = dist.group.WORLD, Layer(given)
        assert group
        errors = exchange.exchange_errors(shape, given, layer, None, group, (False, False))
        shares.append(max(error.share for error in errors))
    return shares


@pytest.mark.parametrize("experts", [1, 2, 4])
def test_experts_gradients_that_nearly_cancel_refuse_no_job(experts: int) -> None:
    # A rank of many GPUs has few experts, and a gradient is the sum of products of either sign.
    (shares,) = run_ranks(exchanged_alone, 1, experts, 256)
    assert len(shares) == 256 and max(shares) < 0.5


def test_a_kernel_that_raises_has_failed_and_the_others_are_proved() -> None:
    from cookbook.titan.selftest.cases import FP8, Error, Use, prove

    def raises() -> list[Error]:
        raise RuntimeError("expects the M-mode to be 64,\nbut got 96")

    proof = prove(Use("grouped GEMM bf16", "2 experts", raises, "take bf16"), "cpu")
    assert proof.fault == (
        "grouped GEMM bf16 at 2 experts: RuntimeError: expects the M-mode to be 64, but got 96"
    )
    content = proof.as_json()
    assert content["ok"] is False and content["avoid"] == "take bf16"
    exact = Error("output", 0.001, 0.002, FP8)
    assert exact.fault and "nothing was quantized" in exact.fault
    infinite = prove(Use("k", "s", lambda: [Error("out", math.inf, math.nan, FP8)], ""), "cpu")
    assert json.loads(json.dumps(infinite.as_json(), allow_nan=False))["errors"][0]["whole"] is None


def test_a_proof_leaves_no_notes_of_what_ran() -> None:
    from cookbook.titan.tt_0_2_2 import activity
    from cookbook.titan.tt_0_2_2.self_check import _apart

    before = set(activity.losses)
    with _apart("cpu"):
        activity.losses.add("of the proof")
    assert activity.losses == before
