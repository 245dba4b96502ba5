"""The benchmarks' tables, verdicts, the registered rule, and predictions beside measurements."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.fits import memory, step_times
from bench.fits.step_times import cell_of_point, compare, read_points
from bench.proofs import convergence
from bench.proofs.convergence import MARGIN, REFERENCE, holm, judge, judge_by, t_test
from bench.proofs.gradient_cases import VARIANTS, Case, cell_of, fault_cases, qwen3_cases
from bench.proofs.gradient_table import corrected, is_seen, verdict, worst
from bench.stress import chaos
from bench.stress.chaos_faults import FAULTS
from cookbook.base.paths import ROOT
from cookbook.predict.memory import MOST_FITS, MOST_FITS_PIPELINE
from docs import make
from tests.cells import walked

# Student's sleep data: t is 4.0621, p of 9 degrees of freedom 0.001416 (one-sided).
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def test_a_plan_of_faults_is_repeatable_and_has_every_kind() -> None:
    assert chaos.plan(20, 1) == chaos.plan(20, 1) != chaos.plan(20, 2)
    assert {one.name for one in chaos.plan(20, 3)} == set(FAULTS)
    assert len(chaos.plan(20, 3)) == 20


@pytest.mark.titan  # torch lists a pipeline's actions
def test_documents_have_the_tables_of_their_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["--check"]) == 0, f"{capsys.readouterr().out}; run: make docs"
    pages = "".join(path.read_text() for path in make.pages())
    assert all(f"<!-- table: {name} -->" in pages for name in make.TABLES)
    old = "<!-- table: faults -->\nold\n<!-- end of table -->"
    assert "| the released code " in make.rewrite(old)


def around(mean: float, spread: float = 0.0005, number: int = 14) -> list[float]:
    """Return evenly spaced values with this mean."""
    return [mean + spread * (2 * n / (number - 1) - 1) for n in range(number)]


def test_the_two_tests_are_as_published() -> None:
    assert t_test([-one for one in SLEEP], 0.0) == pytest.approx(0.001416, abs=1e-6)
    assert t_test([one + 5 for one in SLEEP], 5.0) == pytest.approx(t_test(SLEEP, 0.0))
    found = holm({"a": 0.01, "b": 0.04, "c": 0.012, "d": 0.9})
    assert found == pytest.approx({"a": 0.04, "b": 0.08, "c": 0.04, "d": 0.9})
    assert holm({"a": 0.02, "b": 0.021}) == pytest.approx({"a": 0.04, "b": 0.04})


@pytest.mark.parametrize(
    ("mean", "spread", "number", "word"),
    [
        (0.0, 0.0005, 14, "equivalent"),
        (-0.0015, 0.0005, 14, "equivalent"),
        (0.0, 0.02, 14, "undecided"),
        (MARGIN, 0.0005, 14, "undecided"),
        (0.004, 0.0005, 14, "different"),
        (-0.004, 0.0005, 14, "different"),
        # Of six pairs the sign flips cannot go below 1/64, so the tests differ.
        (0.0, 0.0002, 6, "undecided"),
    ],
)
def test_the_verdict_follows_the_margin(mean: float, spread: float, number: int, word: str) -> None:
    found = judge(dict.fromkeys(REFERENCE, around(mean, spread, number)))
    assert set(found.values()) == {word}


def test_each_arm_is_corrected_for_all_and_held_against_its_own_reference() -> None:
    arms = dict.fromkeys(REFERENCE, around(0.0, 0.02)) | {"mxfp8": around(0.0016, 0.0026)}
    p_value, word = judge_by(t_test, arms)["mxfp8"]
    assert word == "undecided" and p_value == pytest.approx(4 * t_test(arms["mxfp8"], MARGIN))
    losses = {key: {"1": 2.0} for key in [*REFERENCE, "bf16"]} | {"bf16_ep2": {"1": 4.0}}
    found = convergence.differences(losses)
    assert found["float8"][0] == 0.0 and found["mxfp8_a2a_ep2"][0] == -0.5


def test_every_point_is_a_cell_of_its_own() -> None:
    points = read_points()
    keys = {(point.group, point.name, point.documents) for point in points}
    assert len(keys) == len(points) and sum(bool(one.foretold) for one in points) >= 34
    for point in walked(points):
        cell = cell_of_point(point)
        assert cell.world == (256 if "B200" in point.group else point.gpus)
        assert cell.facts.exchange.has_own_layer is (point.ep_backend == "deepep")
        sizes = {"16B_8layers": "8 layers", "16B": "27 layers", "671B": "671B"}
        assert point.group.startswith(sizes[cell.options["model.flavor"]])


def test_a_table_has_errors_and_what_is_not_measured() -> None:
    group = [one for one in read_points() if one.group == "8 layers, 2 H200"]
    measured = next(one for one in group if one.measured)
    comparisons = list(compare([measured, replace(group[-1], measured=None)]))
    text = step_times.tables(comparisons)
    assert f"{comparisons[0].error:+.1%}" in text and "not measured yet" in text


@pytest.mark.titan
def test_a_job_that_fits_would_fit_if_the_model_erred_as_it_did() -> None:
    worst = {True: 0.0, False: 0.0}
    for one in walked(memory.compare(memory.read_measured())):
        assert -0.12 < one.error < 0.05, one.name
        # Jobs that could fill a GPU; the workspaces that dominate small ones stay as they are.
        if one.measured > 4:
            worst[" PP " in one.name] = max(worst[" PP " in one.name], 1 / (1 + one.error))
    assert MOST_FITS_PIPELINE * worst[True] < 1 and MOST_FITS * worst[False] < 1


def run(gradient: float, change: float | None = None, **changes: Any) -> dict[str, Any]:
    errors = {"gradients": {"layers.*.gate": [1e-9, 1.0, 0], "output": [gradient, 1.5]}}
    if change is not None:
        errors["changes"] = {"layers.*.gate": [change, 1.0, 2]}
    return {
        "name": "a", "precision": "bf16", "backend": "deepep", "exact": True, "fault": "",
        "scale": None, "reference": "b", "stopped": None, "losses": [], "errors": errors,
    } | changes  # fmt: skip


def test_an_error_above_its_bound_is_seen_wherever_it_is() -> None:
    assert not is_seen(run(4e-6, 1e-4))
    assert is_seen(run(6e-6, 1e-4)) and is_seen(run(4e-6, 3e-4))
    assert is_seen(run(float("nan"), 1e-4)) and is_seen(run(4e-6, float("inf")))
    assert not is_seen(run(4e-6)) and is_seen(run(6e-6))
    assert is_seen(run(4e-6, 1e-4, stopped="RuntimeError: no"))
    assert is_seen(run(4e-6, 1e-4, errors={}))
    # Each is held to the bound of what it rounds.
    for changes in ({"precision": "mxfp8"}, {"backend": "mxfp8_a2a"}, {"exact": False}):
        assert not is_seen(run(6e-6, 3e-4, **changes))
    # A few tokens that take another expert change their parameters.
    assert [is_seen(run(4e-3, 3e-2, precision="mxfp8", choices=n)) for n in (0, 7, 8)] == [1, 0, 1]
    # A fault that breaks the comparison's own code has not been seen.
    broken = run(1.0, stopped="TypeError: no", fault="the released code")
    assert not is_seen(broken) and verdict(broken) == "stopped"
    unpadded = broken | {"fault": "expert groups are not padded"}
    assert not is_seen(unpadded)
    assert is_seen(unpadded | {"stopped": "241 must be divisible by block_size 32"})
    assert verdict(run(1.0)) == "DIFFERS" and verdict(run(0.0)) == "agrees"
    assert verdict(run(0.0, reference="")) == "reference"
    found = worst(run(4e-6, 1e-4), "changes")
    assert found is not None and (found.where, found.error) == ("layers.2.gate", 1e-4)


def test_each_variant_trains_another_cell(tmp_path: Path) -> None:
    cases = [Case("bf16", "deepep", "tp1-ep4", variant) for variant in VARIANTS]
    known = [cell_of(case, None, tmp_path).options for case in cases]
    values = [{name: options[name] for name in options.stack.options} for options in known]
    assert len(values) > 1
    assert all(one != other for one, other in itertools.combinations(values, 2))


@pytest.mark.parametrize(
    ("document", "cases", "apart"),
    [
        ("gradients", fault_cases(), []),
        ("gradients-h200", fault_cases("2.11.0"), []),
        # Linear MXFP8 moves choices.
        ("gradients-qwen3", qwen3_cases(), ["qwen3_debug-mxfp8_linear-standard-tp1-ep4-plain"]),
    ],
)
def test_corrected_cells_agree_and_every_fault_is_seen(
    document: str, cases: list[Case], apart: list[str]
) -> None:
    """The numbers of the repository; a run of the command makes its own."""
    runs = json.loads((ROOT / f"docs/evidence/numerics/{document}.json").read_text())["runs"]
    assert {case.name for case in cases} <= {one["name"].replace("-bfloat16", "") for one in runs}
    assert [one["name"] for one in corrected(runs) if verdict(one) != "agrees"] == apart
    assert [one["name"] for one in runs if one["fault"] and verdict(one) != "DIFFERS"] == []
