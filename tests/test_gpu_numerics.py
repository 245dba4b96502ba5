"""The benchmark of numerics without GPUs: its cells, its verdicts and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_numerics
from bench.gpu_numerics import job_of, run_cases
from bench.gpu_numerics_table import difference, render_report, verdict
from bench.numerics_cases import PARTS, Case
from bench.torchrun import Job, released_argv
from bench.training import Outcome
from cookbook.base.gpus import Gpu
from cookbook.config.cell import train_argv
from cookbook.config.resolve import this_machine
from cookbook.config.stack import load_stack
from cookbook.config.validate import validation_errors
from cookbook.observe.console import StepMetrics
from tests.titan_config import parse

# What has not been measured yet: losses of the fast options at TP 2 and PP 2.
PREPARED = PARTS["fast"]()
ALL = [case for name, part in PARTS.items() if name != "fast" for case in part()]
# The cells and their options when docs/numerics/h200.md was measured; options with TorchTitan's own
# default are left out. A difference means that its tables no longer show what the command runs.
MEASURED = json.loads((Path(__file__).parent / "gpu_numerics_cells.json").read_text())
H200 = this_machine(4, Gpu("NVIDIA H200", 9.0, 139.8))
# What the job says of itself, and where it reads and writes.
OF_THE_JOB = {"job.description", "training.steps", "training.dataset_path", "model.hf_assets_path"}
DECLARED = {"cookbook.grouped_gemms", "cookbook.linear_layers", "cookbook.dispatch"}


def result(name: str, losses: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "part": "numerics", "precision": "bf16", "backend": "deepep",
        "layout": "tp1-ep4", "variant": "plain", "reference": "", "bound": 1e-4,
        "status": "finished", "reason": "", "expected_to_fail": False, "released": False,
        "emulated": False, "losses": losses, "grad_norms": losses, "active": None,
        "tokens_per_second": None, "memory_gib": None,
    } | changes  # fmt: skip


def test_the_cells_are_those_that_were_measured() -> None:
    defaults = {"reference": "", "bound": 1e-4, "released": False, "expected_to_fail": False}
    defaults |= {"gpu_only": False, "seconds": 240, "rank": 0}
    found = {}
    for case in ALL:
        rank = job_of(case, H200, Path("out"), 20).cell.record().loss_rank
        attributes = {**vars(case), "rank": rank}
        name = attributes.pop("name")
        found[name] = {
            key: value
            for key, value in attributes.items()
            if key not in defaults or value != defaults[key]
        }
    assert found == MEASURED["cells"]
    assert len(found) == len(ALL)


@pytest.mark.titan
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_torchtitan_reads_the_options_that_were_measured(case: Case) -> None:
    cell = job_of(case, H200, Path("out"), 20).cell
    found = parse(released_argv(cell) if case.released else train_argv(cell))
    assert found["training.steps"] == 20
    assert found["training.dataset_path"] == "out/assets/corpus"
    assert found["model.hf_assets_path"] == "out/assets/tokenizer"
    defaults = {name: option.default for name, option in load_stack().options.items()}
    ignored = OF_THE_JOB | DECLARED
    if not found["checkpoint.enable"]:
        ignored = ignored | {name for name in defaults if name.startswith("checkpoint.")}
    set_to = {
        name: value
        for name, value in found.items()
        if name not in ignored and value != defaults[name]
    }
    expected = dict(MEASURED["every"])
    for axis in ("part", "layout", "variant", "backend", "precision"):
        expected |= MEASURED[axis][getattr(case, axis)]
    if not case.released:
        expected |= {
            "cookbook.precision": case.precision,
            "cookbook.ep_backend": case.backend,
            "job.custom_config_module": "cookbook.titan.tt_0_2_2.job_config",
            "experimental.custom_import": "cookbook.titan.tt_0_2_2",
        }
    assert set_to == expected


def test_names_are_unique_and_references_exist() -> None:
    cases = [*ALL, *PREPARED]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {case.reference for case in cases} - {""} <= set(names)


@pytest.mark.titan
@pytest.mark.parametrize("case", PREPARED, ids=lambda case: case.name)
def test_the_fast_options_are_held_against_the_published_ones(case: Case) -> None:
    """At TP 1, TP 2 and PP 2, to the bound that all losses are held to."""
    (reference,) = [one for one in ALL if one.name == case.reference]
    assert case.bound == 1e-4
    own, published = (job_of(one, H200, Path("out"), 20).cell for one in (case, reference))
    assert validation_errors(own) == validation_errors(published) == []
    found, expected = (parse(train_argv(cell)) for cell in (own, published))
    assert found["model.attention"] == "flash_attention_4"
    assert (found["loss.num_chunks"], found["deepep.num_chunks"]) == (4, 2)
    assert expected["activation_checkpoint.mode"] == "full"
    assert found["compile.enable"] and expected["compile.enable"]
    same = ("parallelism.", "training.", "optimizer.", "lr_scheduler.", "debug.")
    for name in found.keys() - {"parallelism.expert_parallel_comm_backend"}:
        assert not name.startswith(same) or found[name] == expected[name], name


def test_ranks_share_a_gpu_where_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Job] = []

    def train_all(jobs: Sequence[Job], *given: Any, **named: Any) -> list[Job]:
        asked.extend(jobs)
        return []

    here = [H200.gpu]
    monkeypatch.setattr("bench.cells.visible_gpus", lambda: here)
    monkeypatch.setattr(gpu_numerics, "train_all", train_all)
    # Its tokenizer needs the training stack, and nothing is trained here.
    monkeypatch.setattr(gpu_numerics, "make_corpus", lambda out: out)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["x", str(tmp_path), "--parts", "fast", "--share"]
    for shares in (True, False):
        asked.clear()
        monkeypatch.setattr("sys.argv", words)
        gpu_numerics.main()
        assert [job.shares for job in asked] == [shares] * len(PREPARED)
        here *= 4
    here[1:] = []
    for more, said in (([], "--share or --device cpu"), (["--share"], "show no throughput")):
        monkeypatch.setattr("sys.argv", [*words[:2], "--parts", "throughput", *more])
        with pytest.raises(SystemExit) as ended:
            gpu_numerics.main()
        assert said in f"{ended.value} {capsys.readouterr().err}"


def test_what_a_gpu_can_compute_is_not_emulated() -> None:
    (case,) = [one for one in ALL if one.name == "mxfp8-deepep-tp1-ep4-plain"]
    b200 = this_machine(4, Gpu("NVIDIA B200", 10.0, 179.0))
    for machine, emulated in ((H200, True), (b200, False), (this_machine(4, None), True)):
        cell = job_of(case, machine, Path("out"), 20).cell
        assert cell.emulated is emulated
        assert ("--quantize.grouped_mm.mx.emulate" in train_argv(cell)) is emulated


def test_verdicts() -> None:
    reference = result("reference", [2.0, 1.0])
    by_name = {"reference": reference}
    near = result("near", [2.0, 1.00005], reference="reference")
    far = result("far", [2.0, 1.001], reference="reference")
    nan = result("nan", [2.0, float("nan")], reference="reference")
    found = difference(far, reference)
    assert found is not None
    assert found[0] == pytest.approx(1e-3)
    assert found[1] == 2
    assert verdict(near, by_name) == "agrees"
    assert verdict(far, by_name) == "DIFFERS"
    assert verdict(nan, by_name) == "DIFFERS"
    assert verdict(far | {"bound": None}, by_name) == "shown"
    assert verdict(near, {}) == "no reference"
    assert verdict(near | {"status": "failed", "reason": "why"}, by_name) == "failed: why"
    known = near | {"expected_to_fail": True}
    assert verdict(known, by_name) == "did not fail"
    assert verdict(known | {"status": "failed"}, by_name) == "fails, as known"


def test_a_row_for_every_result_and_a_warning_on_a_cpu() -> None:
    results = [
        result("a", [1.0]),
        result("b", [], status="not run", reason="no time left"),
        result("c", [1.0], part="throughput", tokens_per_second=1234.5),
    ]
    text = render_report(results, cpu=True)
    assert "not a result" in text
    assert "not run: no time left" in text
    assert "1,234" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| bf16")}
    assert len(widths) == 1


def test_what_has_a_result_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = PARTS["fault"]()
    asked: list[str] = []

    def train_all(
        jobs: Sequence[Job],
        note: Callable[[Job, Outcome], None],
        deadline: float,
        may_start: Callable[[Job, Sequence[Job]], bool],
    ) -> list[Job]:
        asked[:] = [job.cell.name for job in jobs]
        assert may_start(jobs[0], jobs[:1]) and not may_start(jobs[0], jobs[:2])
        for number, job in enumerate(jobs[:3]):
            speeds = (1.0, 10.0, 30.0, 50.0)
            steps = [
                StepMetrics(0, step, 5.0 - step, 0.5, tokens_per_second=speed)
                for step, speed in enumerate(speeds, 1)
            ]
            reason = "RuntimeError: no" if number == 1 else None
            note(
                job,
                Outcome(reason, 9.0, steps, {"gpu": "H200", "versions": {}}, 70.5, ["torchrun"]),
            )
            assert len(json.loads((tmp_path / "results.json").read_text())["cells"])
        return list(jobs[3:])

    monkeypatch.setattr(gpu_numerics, "train_all", train_all)
    names = [case.name for case in cases]
    (first, failed, _, not_run, *_) = run_cases(cases, H200, tmp_path, 4, 2, 60)
    assert asked == names
    assert (first["name"], first["status"]) == (names[0], "finished")
    # The median of the later half.
    assert (first["tokens_per_second"], first["memory_gib"]) == (40.0, 70.5)
    assert first["losses"] == [4.0, 3.0, 2.0, 1.0]
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: no")
    assert (not_run["status"], not_run["reason"]) == ("not run", "no time left")
    # Also where it was to fail.
    assert [case.name for case in cases if case.expected_to_fail] == names[3:4]
    assert verdict(not_run, {}) == "not run: no time left"
    run_cases(cases, H200, tmp_path, 4, 2, 60)
    assert asked == [names[1], *names[3:]]
