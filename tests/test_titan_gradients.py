"""The comparison of gradients: a corrected cell agrees, a fault is seen, the reference is plain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gradient_cases import Case, cell_of, corrected_cases, fault_cases
from bench.gradient_table import GRADIENTS, is_seen, worst
from bench.gradients import thinned
from cookbook.config.cell import train_argv
from tests.titan_config import parse
from tests.titan_ranks import run_ranks
from tests.titan_run import write_assets

pytestmark = pytest.mark.titan

CELL = Case("bf16", "deepep", "tp2-ep4")
PIPELINE = Case("bf16", "standard", "pp2-ep2")
FAULT = replace(CELL, fault="the router's gradient is one TP rank's")


def compare(
    case: Case, folder: Path, train: Callable[..., None] | None = None, **changes: Any
) -> dict[str, Any]:
    """Two steps of the case on CPU ranks; the result as `bench.gradients` keeps it."""
    from bench.compared_training import train_in_rank

    found = folder / f"{case.name}.json"
    exact = case.is_reference or not case.rounds
    compared = {"found": str(found), "step": 2, "fault": case.fault, "exact": exact, **changes}
    argv = [
        *train_argv(cell_of(case, None, folder)),
        *("--training.steps=2", f"--job.dump_folder={folder / 'job'}"),
    ]
    run_ranks(train or train_in_rank, case.ranks, argv, compared, seconds=200)
    read = json.loads(found.read_text())
    errors = {what: thinned(named) for what, named in read["errors"].items()}
    kept = {"stopped": None, "errors": errors, "choices": read["choices"]}
    return asdict(case) | {"name": case.name, **kept}


@pytest.mark.nightly
def test_corrected_cells_agree_with_one_rank_and_a_fault_does_not(tmp_path: Path) -> None:
    write_assets(tmp_path)
    (tmp_path / "corpus").symlink_to("varied")
    tensors = str(tmp_path / "reference.pt")
    compare(CELL.reference, tmp_path, keep=tensors, experts=("bf16", "standard"))
    agrees = compare(CELL, tmp_path, reference=tensors)
    assert set(agrees["errors"]) == {"gradients", "changes"}
    assert not is_seen(agrees), agrees["errors"]
    # Every parameter of every kind, and the balance of the experts.
    kinds = {*agrees["errors"]["gradients"], "layers.*.moe.expert_bias"}
    assert kinds == set(agrees["errors"]["changes"]) and len(kinds) > 20
    # Where experts' balance once counted the zeros by which a pipeline learns its shapes.
    piped = compare(PIPELINE, tmp_path, reference=tensors)
    assert not is_seen(piped), piped["errors"]
    differs = compare(FAULT, tmp_path, reference=tensors)
    assert is_seen(differs)
    found = worst(differs, GRADIENTS)
    assert found is not None and found.where.endswith("moe.router.gate.weight")


@pytest.mark.nightly
def test_random_routing_agrees_with_one_rank(tmp_path: Path) -> None:
    write_assets(tmp_path)
    (tmp_path / "corpus").symlink_to("varied")
    for precision, backends in {"bf16": ("standard", "deepep"), "mxfp8": ("standard",)}.items():
        tensors = str(tmp_path / f"{precision}.pt")
        for backend in backends:
            case = Case(precision, backend, "tp1-ep4", "random")
            if backend == "standard":
                compare(case.reference, tmp_path, keep=tensors, experts=(precision, backend))
            found = compare(case, tmp_path, reference=tensors)
            assert found["choices"] == 0 and not is_seen(found), found["errors"]


def train_with_another_choice(argv: list[str], compared: dict[str, Any]) -> None:
    """Rank 0's last token takes the expert that is next best, in the second MoE layer, once."""
    import torch.distributed as dist
    from torchtitan.models.moe.moe import TokenChoiceTopKRouter

    from bench.compared_training import train_in_rank

    forward, calls = TokenChoiceTopKRouter.forward, count(1)

    def choose(router: Any, x: torch.Tensor, bias: torch.Tensor) -> Any:
        scores, experts, counts = forward(router, x, bias)
        if dist.get_rank() == 0 and next(calls) == 4:
            best = (torch.sigmoid(router.gate(x[-1]).float()) + bias).topk(router.top_k + 1).indices
            last, other = best[-2], best[-1]
            experts = experts.clone()
            experts[-1][experts[-1] == last] = other
            counts = counts.clone()
            counts[last] -= 1
            counts[other] += 1
        return scores, experts, counts

    TokenChoiceTopKRouter.forward = choose
    train_in_rank(argv, compared)


@pytest.mark.nightly
def test_a_token_that_takes_another_expert_is_counted(tmp_path: Path) -> None:
    write_assets(tmp_path)
    (tmp_path / "corpus").symlink_to("varied")
    tensors = str(tmp_path / "reference.pt")
    cell = Case("mxfp8", "standard", "tp1-ep4")
    compare(cell.reference, tmp_path, keep=tensors, experts=("mxfp8", "standard"))
    same = compare(cell, tmp_path, reference=tensors)
    assert same["choices"] == 0 and not is_seen(same)
    other = compare(cell, tmp_path, train_with_another_choice, reference=tensors)
    assert other["choices"] == 1
    assert not is_seen(other) and is_seen(other | {"choices": 0})
    assert other["errors"][GRADIENTS] == same["errors"][GRADIENTS]


def test_the_largest_error_of_all_ranks_counts() -> None:
    from bench.compared_training import largest_of

    first = {"gradients": {"gate": (1e-7, 1.0)}}
    second = {"gradients": {"gate": (0.5, 0.5), "output": (1e-8, 1.0)}}
    assert largest_of([first, second]) == second
    assert largest_of([second, first]) == second


def put_in_all() -> set[str]:
    from bench.known_faults import FAULTS, put_in_fault

    for name in FAULTS:
        with put_in_fault(name):
            pass
    return set(FAULTS)


def test_every_known_fault_is_put_into_a_cell() -> None:
    # In a rank, which has the stand-in for DeepEP.
    assert run_ranks(put_in_all, 1) == [{case.fault for case in fault_cases()}]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear"])
def test_torchtitan_reads_the_options(precision: str) -> None:
    cases = [case for case in corrected_cases() if case.precision == precision]
    assert {case.backend for case in cases} == {"standard", "deepep", "mxfp8_a2a"}
    for case in [*cases, *(case.reference for case in cases)]:
        found = parse(train_argv(cell_of(case, None, Path("out"))))
        sequences = found["training.local_batch_size"] * case.ranks
        sequences //= found["parallelism.tensor_parallel_degree"]
        sequences //= found["parallelism.pipeline_parallel_degree"]
        assert sequences == 4
        assert found["training.mixed_precision_param"] == "float32"
        assert ("quantize.grouped_mm.mx" in found["model.converters"]) == (
            precision != "bf16" and not case.is_reference
        )


def test_mxfp8_written_out_is_torchaos() -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    from bench.plain_experts import round_to_mxfp8

    torch.manual_seed(0)
    values = torch.randn(6, 96) * torch.logspace(-6, 3, 6)[:, None]
    values[2, :32] = 0
    expected = MXTensor.to_mx(
        values, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL
    ).dequantize(torch.float32)
    assert torch.equal(round_to_mxfp8(values), expected)
    # What does not fill a block is rounded as if zeros did.
    torch.testing.assert_close(round_to_mxfp8(values[:, :40])[:, :32], expected[:, :32])
    assert round_to_mxfp8(values[:, :40]).shape == (6, 40)


def products(precision: str) -> tuple[torch.Tensor, ...]:
    """Output, input gradient and weight gradients of two experts, of 64 and 32 rows."""
    import torchtitan.models.moe.moe as moe

    from bench.plain_experts import plain_experts

    torch.manual_seed(0)
    x = torch.randn(96, 64, requires_grad=True)
    weights = [(0.2 * torch.randn(2, 64, 64)).requires_grad_() for _ in range(3)]
    with plain_experts(precision, "standard"):
        out = moe._run_experts_for_loop(*weights, x, torch.tensor([64, 32]))
    return (out, *torch.autograd.grad(out, [x, *weights], torch.randn(96, 64)))


def test_experts_round_what_their_precision_rounds() -> None:
    exact, hp, all_of_it = map(products, ("bf16", "mxfp8_wgrad_hp", "mxfp8"))
    assert torch.equal(hp[0], all_of_it[0]) and torch.equal(hp[1], all_of_it[1])
    for found, other in zip(hp[2:], all_of_it[2:], strict=True):
        assert not torch.equal(found, other)
    for found, expected in zip(all_of_it, exact, strict=True):
        assert 0.01 < float((found - expected).norm() / expected.norm()) < 0.15
