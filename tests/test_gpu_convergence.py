"""The rule that says whether a precision's loss curves are BF16's, and what is trained for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.convergence_verdict import MARGIN, PRECISIONS, SEEDS, Curves, curve_name, draw, judge
from bench.gpu_convergence import missing

STEPS = 200


def curves(shift: float, scatter: float) -> Curves:
    """BF16's seeds are far apart; `mxfp8` is `shift` from each of them, more or less."""
    found: dict[tuple[str, int], list[float]] = {}
    for number, seed in enumerate(SEEDS):
        base = [4.0 - step / STEPS + 0.5 * number for step in range(STEPS)]
        found["bf16", seed] = base
        found["mxfp8_wgrad_hp", seed] = base
        own = shift + scatter * (number - 2)
        found["mxfp8", seed] = [loss + own for loss in base]
    return found


@pytest.mark.parametrize(
    ("shift", "scatter", "word"),
    [
        (0.0, 0.0, "equal"),
        # The seeds of BF16 differ by 0.5; only the difference of each pair counts.
        (0.008, 0.0005, "equal"),
        (-0.02, 0.001, "different"),
        # Near enough on average, but a few seeds say too little.
        (0.0, 0.02, "undecided"),
        (0.011, 0.005, "undecided"),
    ],
)
def test_the_interval_decides(shift: float, scatter: float, word: str) -> None:
    high_precision, mxfp8 = judge(curves(shift, scatter))
    assert (high_precision.word, high_precision.difference) == ("equal", 0.0)
    assert mxfp8.word == word
    assert mxfp8.difference == pytest.approx(shift)
    # The mean of BF16 over its last tenth: 3.05 after 200 steps, 0.5 more for each further seed.
    assert mxfp8.limit == pytest.approx(MARGIN * 4.05, rel=2e-3)
    # Five values, evenly spaced: their deviation is sqrt(2.5) times the step, t(4) is 2.132.
    assert mxfp8.half_width == pytest.approx(2.132 * (2.5 / 5) ** 0.5 * scatter, rel=1e-3)


def test_a_loss_that_is_no_number_is_different() -> None:
    broken = dict(curves(0.0, 0.001))
    broken["mxfp8", SEEDS[0]] = [float("nan")] * STEPS
    assert judge(broken)[1].word == "different"


def test_whole_curves_are_kept_and_drawn(tmp_path: Path) -> None:
    out, target = tmp_path / "out", tmp_path / "target"
    out.mkdir()
    assert len(missing(out, STEPS)) == len(PRECISIONS) * len(SEEDS)
    for (precision, seed), losses in curves(0.0, 0.001).items():
        rows = [f"{step},{loss},1.0\n" for step, loss in enumerate(losses, 1)]
        text = "".join(["step,loss,grad_norm\n", *rows])
        (out / f"{curve_name(precision, seed)}.csv").write_text(text)
    assert missing(out, STEPS) == []
    half = out / "mxfp8-seed43.csv"
    text = half.read_text()
    half.write_text("".join(text.splitlines(keepends=True)[: STEPS // 2]))
    assert missing(out, STEPS) == [("mxfp8", 43)]
    half.write_text(text)

    draw(out, target)
    assert (
        "| mxfp8 | 4.0525 | +0.0000 | -0.0015 to +0.0015 | ±0.0101 | equal |"
        in (target / "verdict.md").read_text()
    )
    first = (target / "curves.svg").read_bytes()
    draw(target, target)
    assert (target / "curves.svg").read_bytes() == first
    assert half.read_text() == (target / half.name).read_text()
