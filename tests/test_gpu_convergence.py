"""The rule that says whether a precision's loss curves are BF16's, and what is trained for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.convergence_verdict import (
    PRECISIONS,
    SEEDS,
    Curves,
    curve_name,
    draw,
    judge,
    read_curves,
    render,
)
from bench.gpu_convergence import cell_of, missing, train
from bench.torchrun import Job
from bench.training import Outcome
from cookbook.base.errors import InputError
from cookbook.log.lines import StepMetrics
from cookbook.results.loss import MARGIN, LossVerdict

pytestmark = pytest.mark.bench

DOCS = Path(__file__).resolve().parent.parent / "docs"
STEPS = 200


def curves(shift: float, scatter: float, seeds: int = len(SEEDS)) -> Curves:
    """Five seeds of BF16, `scatter` apart; `mxfp8`'s are the same, moved by `shift`."""
    found: dict[tuple[str, int], list[float]] = {}
    for number, seed in enumerate(SEEDS):
        base = [4.0 - step / STEPS + scatter * (number - 2) for step in range(STEPS)]
        found["bf16", seed] = base
        found["mxfp8_wgrad_hp", seed] = base
        if number < seeds:
            found["mxfp8", seed] = [loss + shift for loss in base]
    return found


def half_width(verdict: LossVerdict) -> float:
    assert verdict.low is not None and verdict.high is not None
    return (verdict.high - verdict.low) / 2


@pytest.mark.parametrize(
    ("shift", "scatter", "word"),
    [
        (0.0, 0.0, "equivalent"),
        (0.005, 0.0005, "equivalent"),
        (-0.02, 0.001, "different"),
        # Near enough on average, but so few seeds say too little.
        (0.0, 0.02, "cannot tell"),
        (0.005, 0.003, "cannot tell"),
    ],
)
def test_the_interval_decides(shift: float, scatter: float, word: str) -> None:
    found = judge(curves(shift, scatter))
    assert found["mxfp8_wgrad_hp"].difference == 0.0
    mxfp8 = found["mxfp8"]
    assert mxfp8.verdict == word
    assert mxfp8.difference == pytest.approx(shift)
    # The mean of BF16 over its last tenth, steps 180 to 199.
    assert mxfp8.limit == pytest.approx(MARGIN * 3.0525)
    # Five values evenly spaced have the variance 2.5 times the step's square; t(12) is 1.782.
    assert half_width(mxfp8) == pytest.approx(1.782 * (2.5 * 2 / 5) ** 0.5 * scatter, rel=1e-3)


def test_one_run_is_judged_by_what_chance_does_to_the_others() -> None:
    found = judge(curves(0.0, 0.001, seeds=1))["mxfp8"]
    assert found.runs == 1
    # Variance 2.5e-6 from two groups of five, t(8) is 1.860; means over one and five.
    assert half_width(found) == pytest.approx(1.860 * (2.5 * 1.2) ** 0.5 * 0.001, rel=1e-3)


def test_a_loss_that_is_no_number_is_different() -> None:
    broken = dict(curves(0.0, 0.001))
    broken["mxfp8", SEEDS[0]] = [float("nan")] * STEPS
    words = {name: verdict.verdict for name, verdict in judge(broken).items()}
    assert words == {"mxfp8_wgrad_hp": "equivalent", "mxfp8": "different"}
    assert "different" in render(broken)


def test_without_a_second_seed_nothing_is_judged() -> None:
    one = {key: curve for key, curve in curves(0.0, 0.001).items() if key[1] == SEEDS[0]}
    with pytest.raises(SystemExit, match="what chance does"):
        judge(one)


def test_whole_curves_are_kept_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, target = tmp_path / "out", tmp_path / "target"
    out.mkdir()
    assert len(missing(out, STEPS)) == len(PRECISIONS) * len(SEEDS)
    for (precision, seed), losses in curves(0.0, 0.001).items():
        rows = [f"{step},{loss},1.0\n" for step, loss in enumerate(losses, 1)]
        text = "".join(["step,loss,grad_norm\n", *rows])
        (out / f"{curve_name(precision, seed)}.csv").write_text(text)
    assert missing(out, STEPS) == []
    half = out / "mxfp8-seed43.csv"
    half.write_text("".join(half.read_text().splitlines(keepends=True)[: STEPS // 2]))
    assert missing(out, STEPS) == [("mxfp8", 43)]

    draw(out, target)
    assert not (target / half.name).exists()
    assert "left out: mxfp8-seed43 has 99 of 200 steps" in capsys.readouterr().out
    verdict = (target / "verdict.md").read_text()
    table = [[word.strip() for word in line.split("|")[1:-1]] for line in verdict.splitlines()]
    (row,) = (row[1:] for row in table if row and row[0] == "mxfp8")
    seeds, loss, distance, interval, limit, word, gap = row
    assert (seeds, limit, word) == ("4", "±0.0076", "equivalent")
    # The missing seed is the second lowest, so that the mean of the others is higher.
    assert float(loss) == pytest.approx(3.05275, abs=1e-4)
    assert float(distance) == pytest.approx(0.00025, abs=1e-4)
    low, high = map(float, interval.split(" to "))
    # Variances 2.5, 2.5 and 2.917 millionths over 11 degrees of freedom, t(11) is 1.796.
    assert (high - low) / 2 == pytest.approx(
        1.796 * (2.614 * (1 / 4 + 1 / 5)) ** 0.5 / 1e3, abs=1e-4
    )
    assert gap.startswith("0.0000")
    # BF16's seeds are 0.001 to 0.004 from one another, 0.002 on average.
    assert ["bf16", "5", "3.0525", "", "", "", "", "0.0020"] in table
    assert ["43", "3.0515", "3.0515", ""] in table
    first = (target / "curves.svg").read_bytes()
    draw(target, target)
    assert (target / "curves.svg").read_bytes() == first


def test_the_page_says_what_its_data_does() -> None:
    curves = read_curves(DOCS / "convergence")
    assert {len(curve) for curve in curves.values()} == {1500}
    assert len(curves) == len(PRECISIONS) * len(SEEDS)
    verdict = render(curves)
    assert (DOCS / "convergence/verdict.md").read_text() == verdict
    assert verdict in (DOCS / "convergence.md").read_text()


def test_a_cell_is_that_of_the_sweep_on_one_gpu(tmp_path: Path) -> None:
    cell = cell_of("mxfp8_wgrad_hp", 44, 30, tmp_path, ["optimizer.lr=1e-3"])
    assert (cell.recipe.name, cell.ep_backend.name) == ("proxy", "standard")
    assert cell.precision.name == "mxfp8_wgrad_hp"
    assert (cell.steps, cell.options["debug.seed"]) == (30, 44)
    assert cell.options["optimizer.lr"] == 1e-3
    assert cell.options["training.dataset_path"] == str(tmp_path / "corpus")
    assert cell.options["model.hf_assets_path"] == str(tmp_path / "tokenizer")
    assert cell.cluster.gpu is None or cell.world == 1
    with pytest.raises(InputError, match="has no option"):
        cell_of("bf16", 42, 30, tmp_path, ["optimizer.rate=1"])


def test_what_is_missing_is_trained_and_kept_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu_convergence.make_corpus", lambda *_: None)
    monkeypatch.setattr("bench.gpu_convergence.gpu_ids", lambda: ["4", "7"])
    made = tmp_path / "mxfp8-seed42.csv"
    made.write_text("step,loss,grad_norm\n1,4.0,1.0\n2,3.5,1.0\n")
    asked: list[Job] = []

    def train_all(
        jobs: Sequence[Job],
        note: Callable[[Job, Outcome], None],
        look: Callable[[Job, Sequence[StepMetrics]], None],
        **_: Any,
    ) -> None:
        asked.extend(jobs)
        steps = [StepMetrics(0, 1, 4.0, 1.0), StepMetrics(0, 2, 3.0, 0.5)]
        first, second, *others = jobs
        look(first, steps[:1])
        assert (tmp_path / f"{first.cell.name}.csv").read_text().count("\n") == 2
        note(second, Outcome("stopped after 5 s", 5.0, steps[:1], None, None, []))
        for job in (first, *others):
            note(job, Outcome(None, 5.0, steps, None, None, []))

    monkeypatch.setattr("bench.gpu_convergence.train_all", train_all)
    assert train(tmp_path, None, 2, 60, []) == 1
    names = [job.cell.name for job in asked]
    assert len(names) == len(PRECISIONS) * len(SEEDS) - 1
    assert "mxfp8-seed42" not in names
    assert [job.environment["CUDA_VISIBLE_DEVICES"] for job in asked[:3]] == ["4", "7", "4"]
    assert [curve_name(*key) for key in missing(tmp_path, 2)] == names[1:2]
    curve = (tmp_path / f"{names[0]}.csv").read_text()
    assert curve == "step,loss,grad_norm\n1,4.0,1.0\n2,3.0,0.5\n"
    assert made.read_text().endswith("2,3.5,1.0\n")
