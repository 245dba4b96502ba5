"""The comparison of gradients: a corrected cell agrees, a fault is seen, the reference is plain."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.proofs.gradient_cases import Case, cell_of, fault_cases
from bench.proofs.gradient_table import is_seen
from bench.proofs.gradients import thinned
from cookbook.config.cell import train_argv
from tests.titan_ranks import run_ranks
from tests.titan_run import write_assets

pytestmark = pytest.mark.titan


def compare(case: Case, folder: Path, **changes: Any) -> dict[str, Any]:
    """Two steps of the case on CPU ranks; the result as `bench.proofs.gradients` keeps it."""
    from bench.proofs.compared_training import train_in_rank

    found = folder / f"{case.name}.json"
    exact = case.precision != "float8" and (case.is_reference or not case.rounds)
    compared = {"found": str(found), "step": 2, "fault": case.fault, "exact": exact, **changes}
    argv = [
        *train_argv(cell_of(case, None, folder)),
        *("--training.steps=2", f"--job.dump_folder={folder / 'job'}"),
    ]
    run_ranks(train_in_rank, case.ranks, argv, compared)
    read = json.loads(found.read_text())
    errors = {what: thinned(named) for what, named in read["errors"].items()}
    kept = {"stopped": None, "errors": errors, "choices": read["choices"]}
    return asdict(case) | {"name": case.name, **kept}


FAULT = "the router's gradient is one TP rank's"
CASES = {
    "deepseek_v3": (
        Case("bf16", "deepep", "tp2-ep4", "fast"),
        Case("bf16", "standard", "pp2-ep2"),
        Case("bf16", "deepep", "pp2-ep2", "fast"),
        Case("bf16", "deepep", "tp2-ep4", fault=FAULT),
    ),
    "qwen3": (Case("bf16", "deepep", "tp2-ep4", recipe="qwen3_debug"),),
    "random": tuple(Case("bf16", one, "tp1-ep4", "random") for one in ("standard", "deepep")),
    "random, mxfp8": (Case("mxfp8", "standard", "tp1-ep4", "random"),),
    "fp8": tuple(Case("float8", one, "tp1-ep4", "experts") for one in ("standard", "deepep")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_cells_agree_with_one_rank_and_a_fault_does_not(
    cases: tuple[Case, ...], tmp_path: Path
) -> None:
    write_assets(tmp_path)
    (tmp_path / "corpus").symlink_to("varied")
    reference, tensors = cases[0].reference, str(tmp_path / "reference.pt")
    plain = {} if "float8" in reference.name else {"experts": (reference.precision, "standard")}
    compare(reference, tmp_path, keep=tensors, **plain)
    for case in cases:
        found = compare(case, tmp_path, reference=tensors)
        # Parameters of every kind; the routing bias has changes alone.
        kinds = {*found["errors"]["gradients"], "layers.*.moe.expert_bias"}
        assert kinds == set(found["errors"]["changes"]) and len(kinds) > 10
        assert is_seen(found) == bool(case.fault), found["errors"]
        assert case.fault or found["choices"] == 0


def test_the_largest_error_of_all_ranks_counts() -> None:
    from bench.proofs.compared_training import largest_of

    first = {"gradients": {"gate": (1e-7, 1.0)}}
    second = {"gradients": {"gate": (0.5, 0.5), "output": (1e-8, 1.0)}}
    assert largest_of([first, second]) == second
    assert largest_of([second, first]) == second


def put_in_all() -> set[str]:
    from bench.proofs.known_faults import FAULTS, put_in_fault

    for name in FAULTS:
        with put_in_fault(name):
            pass
    return set(FAULTS)


def test_every_known_fault_is_put_into_a_cell() -> None:
    # In a rank, which has the stand-in for DeepEP.
    assert run_ranks(put_in_all, 1) == [{case.fault for case in fault_cases()}]
