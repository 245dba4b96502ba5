"""The benchmarks' tables, the registered rule, and predictions beside measurements."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import convergence, memory, peer, step_times
from bench.convergence import MARGIN, REFERENCE, SEEDS, holm, judge, judge_by, sign_flips, t_test
from bench.step_times import POINTS, PREDICTED, cell_of_point, compare, keep, read_points
from cookbook.predict.memory import FITS, FITS_PIPELINE
from docs import make
from tests.cells import walked

# Student's sleep data: t is 4.0621, p of 9 degrees of freedom 0.001416 (one-sided).
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def test_documents_have_the_tables_of_their_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["--check"]) == 0, f"{capsys.readouterr().out}; run: make docs"
    pages = "".join(path.read_text() for path in make.pages())
    assert all(f"<!-- table: {name} -->" in pages for name in make.TABLES)
    old = "<!-- table: faults -->\nold\n<!-- end of table -->"
    assert "| the released code " in make.rewrite(old)


def around(mean: float, spread: float = 0.0005, number: int = len(SEEDS)) -> list[float]:
    """Return evenly spaced values with this mean."""
    return [mean + spread * (2 * n / (number - 1) - 1) for n in range(number)]


def test_the_two_tests_are_as_published() -> None:
    assert t_test([-one for one in SLEEP], 0.0) == pytest.approx(0.001416, abs=1e-6)
    assert t_test([one + 5 for one in SLEEP], 5.0) == pytest.approx(t_test(SLEEP, 0.0))
    chance = random.Random(3)
    values = [chance.gauss(0.1, 1) for _ in range(9)]
    for bound in (-0.5, 0.0, 0.3):
        gaps = [one - bound for one in values]
        sums = [
            sum(sign * abs(one) for sign, one in zip(signs, gaps, strict=True))
            for signs in itertools.product((1, -1), repeat=len(gaps))
        ]
        wanted = sum(one <= sum(gaps) + 1e-9 for one in sums) / len(sums)
        assert sign_flips(values, bound) == pytest.approx(wanted)
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
    losses = {"bf16": [2.0] * 14, "bf16_ep2": [4.0] * 14} | dict.fromkeys(REFERENCE, [2.0] * 14)
    found = convergence.differences(losses)
    assert found["float8"][0] == 0.0 and found["mxfp8_a2a_ep2"][0] == -0.5


def test_every_point_is_a_cell_of_its_own() -> None:
    points = read_points()
    assert len({point.key for point in points}) == len(points)
    for point in walked(points):
        cell = cell_of_point(point)
        assert cell.world == (256 if "B200" in point.group else point.gpus)
        assert cell.uses_deepep is (point.ep_backend == "deepep")
        assert (cell.hooks == "") is point.released
        sizes = {"16B_8layers": "8 layers", "16B": "27 layers", "671B": "671B"}
        assert point.group.startswith(sizes[cell.options["model.flavor"]])


def test_a_foretold_step_is_the_prediction_that_was_committed() -> None:
    kept = json.loads(PREDICTED.read_text())["points"]
    speeds = {
        (one["group"], one["name"], one["documents"]): one["tokens_per_second_per_gpu"]
        for one in kept
    }
    points = {point.key: point for point in read_points()}
    assert len(speeds) == len(kept) and set(speeds) <= set(points)
    foretold = [point for point in points.values() if point.foretold]
    assert len(foretold) >= 34
    assert all(point.foretold == speeds[point.key] for point in foretold)


def test_new_predictions_leave_the_earlier_ones(tmp_path: Path) -> None:
    group = [one for one in read_points(POINTS) if one.group == "8 layers, 2 H200"]
    measured = next(one for one in group if one.measured)
    waiting = replace(group[-1], measured=None)
    comparisons = list(compare([measured, waiting]))
    text = step_times.tables(comparisons)
    assert f"{comparisons[0].error:+.1%}" in text and "not measured yet" in text
    old = dict(zip(("group", "name", "documents"), measured.key, strict=True))
    stale = dict(zip(("group", "name", "documents"), waiting.key, strict=True))
    path = tmp_path / "kept.json"
    points = [{**one, "tokens_per_second_per_gpu": 1} for one in (old, stale)]
    path.write_text(json.dumps({"points": points}))
    keep(comparisons, path)
    found = json.loads(path.read_text())["points"]
    assert found[0] == points[0] and len(found) == 2
    predicted = comparisons[1].predicted.tokens_per_second_per_gpu
    assert found[1]["tokens_per_second_per_gpu"] == round(predicted)


def test_a_job_that_fits_would_fit_if_the_model_erred_as_it_did() -> None:
    worst = {True: 0.0, False: 0.0}
    for one in walked(memory.compare(memory.read_measured())):
        assert -0.12 < one.error < 0.05, one.name
        # Jobs that could fill a GPU; the workspaces that dominate small ones stay as they are.
        if one.measured > 4:
            worst[" PP " in one.name] = max(worst[" PP " in one.name], 1 / (1 + one.error))
    assert FITS_PIPELINE * worst[True] < 1 and FITS * worst[False] < 1


def test_one_formula_counts_both_sides() -> None:
    # Embeddings left out: 872,415,232 weights; 8 layers x 8192 / 2 keys x 16 heads x 320 twice.
    assert peer.flops_per_token() == 6 * 872_415_232 + 3 * 2 * 2 * 8 * 4096 * 16 * 320 / 2
    line = peer.render([peer.Result("cell", 65_178, 125.6)]).splitlines()[2]
    assert line == "| cell | 65,178 | 407 | 125.6 |  |"


def test_both_are_read_and_wrong_attention_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"fused": 11.9300, "flash": 11.9301}
    cell: dict[str, Any] = {"name": "rows_8layers", "status": "finished", "reason": None}
    cell |= {"tokens_per_second_per_gpu": 69_436.0, "memory_gib": 97.3}

    def run(words: list[str], **environment: str) -> str:
        if "report" in words:
            return json.dumps({"cells": [cell]})
        if "run" in words:
            (Path(environment["COOKBOOK_RUNS"]) / "run").mkdir(parents=True)
            (Path(environment["COOKBOOK_RUNS"]) / "run/run.json").touch()
            return ""
        name = words[-1].partition("=")[2]
        result = {"name": name, "tokens_per_second": 65_000.0, "memory_gib": 125.6}
        return f"a warning\nPEER RESULT {json.dumps(result | {'first_loss': losses[name]})}\n"

    monkeypatch.setattr(peer, "_run", run)
    (tmp_path / "corpus").mkdir()
    monkeypatch.setattr("sys.argv", ["peer", str(tmp_path), "--repeats=1"])
    assert peer.main() == 0
    assert "first losses of the peer agree" in capsys.readouterr().out
    losses["flash"] = 11.9367
    assert peer.main() == 1
    assert "DISAGREE" in capsys.readouterr().out
