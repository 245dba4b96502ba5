"""The verdicts of the gradient comparison, and the measured runs that the documents show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.gradient_cases import Case, corrected_cases, fault_cases, qwen3_cases
from bench.gradient_table import corrected, is_seen, render, verdict, worst
from cookbook.base.paths import ROOT

DOCUMENT = json.loads((ROOT / "docs/evidence/numerics/gradients.json").read_text())
RUNS: list[dict[str, Any]] = DOCUMENT["runs"]
BY_NAME = {run["name"]: run for run in RUNS}
EXACT = [run for run in RUNS if run["exact"]]


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


def test_a_token_that_takes_another_expert_excuses_parameters_alone() -> None:
    """And only where something rounds its scores."""
    chose = run(4e-3, 3e-2, precision="mxfp8", choices=1, layout="tp1-ep4", variant="plain")
    assert not is_seen(chose) and is_seen(chose | {"choices": 0})
    assert is_seen(run(4e-3, 3e-2, precision="mxfp8"))
    assert is_seen(run(6e-3, 3e-2, precision="mxfp8", choices=1))
    # Not a thousandth of what all choose: 4 x 64 tokens, 3 experts, 2 layers, 5 steps.
    assert not is_seen(chose | {"choices": 7}) and is_seen(chose | {"choices": 8})
    assert is_seen(run(4e-6, 3e-4, choices=1))
    table = render({"runs": [run(0.0, reference="", name="b"), chose]})
    assert "agrees, 1 chose otherwise" in table


def test_what_was_measured_is_what_the_command_runs() -> None:
    listed = {case.name for case in (*corrected_cases(), *fault_cases())}
    assert {one["name"] for one in EXACT if one["reference"] and not one.get("scale")} == listed
    for one in RUNS:
        chosen = {key: one[key] for key in ("precision", "backend", "layout", "variant", "fault")}
        if one["scale"]:
            continue
        case = Case(**chosen, exact=one["exact"])
        assert case.name == one["name"]
        if one["reference"]:
            assert one["reference"] == case.reference.name in BY_NAME


def test_ranks_that_share_gpus_see_one_each(tmp_path: Path) -> None:
    """As many as there are, in turn; for NCCL each is a host of its own."""
    said = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], __name__]))"
    (tmp_path / "said.py").write_text(said)
    seen = []
    for rank in range(4):
        here = {"CUDA_VISIBLE_DEVICES": "5,3", "LOCAL_RANK": str(rank), "RANK": str(rank + 8)}
        found = subprocess.run(
            [sys.executable, "-m", "bench.shared_gpus", "said", "--job.dump_folder=x"],
            cwd=ROOT,
            env={**os.environ, **here, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            check=True,
        )
        variables, words, name = json.loads(found.stdout)
        assert (words, name) == (["--job.dump_folder=x"], "__main__")
        assert (variables["LOCAL_RANK"], variables["RANK"]) == ("0", str(rank + 8))
        seen.append((variables["CUDA_VISIBLE_DEVICES"], variables["NCCL_HOSTID"]))
    assert [gpu for gpu, _ in seen] == ["5", "3", "5", "3"]
    assert len({host for _, host in seen}) == 4


def test_corrected_cells_agree_and_every_fault_is_seen() -> None:
    """The numbers of the repository; a run of the command makes its own."""
    assert [one["name"] for one in corrected(RUNS) if verdict(one) != "agrees"] == []
    assert [one["name"] for one in RUNS if one["fault"] and verdict(one) != "DIFFERS"] == []
    assert {one["torch"].split("+")[0] for one in RUNS if not one["stopped"]} == {"2.10.0"}


def test_the_second_family_agrees_but_for_choices_that_linear_mxfp8_moves() -> None:
    document = json.loads((ROOT / "docs/evidence/numerics/gradients-qwen3.json").read_text())
    found = corrected(document["runs"])
    assert {one["name"] for one in found} == {case.name for case in qwen3_cases()}
    (apart,) = [one for one in found if verdict(one) != "agrees"]
    assert apart["name"] == "qwen3_debug-mxfp8_linear-standard-tp1-ep4-plain"
    largest = worst(apart, "gradients")
    assert largest is not None and largest.error < 5e-3 and apart["choices"] == 47


def test_on_an_h200_one_cell_moves_by_a_token_that_takes_another_expert() -> None:
    document = json.loads((ROOT / "docs/evidence/numerics/gradients-h200.json").read_text())
    apart = [one for one in corrected(document["runs"]) if verdict(one) != "agrees"]
    again = document["counted"][-1]
    assert [one["name"] for one in apart] == [again["name"]] and again["choices"] == 4
    assert verdict(again) == "agrees" and verdict(again | {"choices": 0}) == "DIFFERS"
