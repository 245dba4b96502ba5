"""The convergence page: its verdicts on made-up curves, its plan, and the first verdict's fate."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench import convergence_first, convergence_power
from bench.convergence_curves import (
    DATA,
    FIRST,
    FIRST_PRECISIONS,
    FIRST_SEEDS,
    measure,
    read_arms,
    read_first,
    write_arms,
)
from bench.convergence_page import arms_of, by_part, complete_seeds, render, write
from bench.convergence_plan import (
    ARMS,
    COMPARED,
    END,
    FAMILY_ERROR,
    MARGIN,
    REGISTERED,
    SEEDS,
    STARTS,
    WHOLE,
    Plan,
)
from bench.convergence_power import spread_of
from bench.convergence_rule import interval, judge
from bench.convergence_runs import FINISHED, RECORD, read_records
from bench.gpu_convergence import chosen_steps
from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.results.loss import EQUIVALENT, judge_repeats

pytestmark = pytest.mark.bench

STEPS = 40
PLAN = REGISTERED.plan(STEPS)
PAGE = (DATA.parent / "convergence.md").read_text(encoding="utf-8")
POWER = (DATA / "power.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
AGAIN = (FIRST / "again.md").read_text(encoding="utf-8")


def made_up(
    shifts: dict[str, float], late: dict[str, float] | None = None
) -> dict[tuple[str, int], list[float]]:
    """Curves from 8 to 4; an arm's are higher by a part of the loss, `late` at their end alone."""
    chance = random.Random(1)
    found = {}
    for seed in SEEDS:
        of_seed = chance.gauss(0, 0.02)
        for arm in ARMS:
            own = chance.gauss(0, 0.001)
            curve = [
                (8 - step / 10 + of_seed) * (1 + own + shifts.get(arm.name, 0.0))
                for step in range(STEPS)
            ]
            for step in range(STEPS - STEPS // 10, STEPS):
                curve[step] *= 1 + (late or {}).get(arm.name, 0.0)
            found[arm.name, seed] = curve
    return found


def words(text: str, name: str) -> dict[str, str]:
    """The verdicts of a measure's table."""
    lines = text.partition(f"| {name}: arm")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[5] for row in rows}


def test_verdicts_of_curves_whose_truth_is_known() -> None:
    curves = made_up({"mxfp8": 0.01, "float8": MARGIN}, late={"mxfp8_wgrad_hp": -0.01})
    text = render(curves, SEEDS, PLAN, {"finished": 84, "cut off": 3}, "")
    assert words(text, END) == {
        "mxfp8": "different",
        "mxfp8_wgrad_hp": "different",
        "float8": "undecided",
        "mxfp8_a2a_ep2": "equivalent",
    }
    assert words(text, WHOLE)["mxfp8_wgrad_hp"] == "equivalent"
    assert words(text, WHOLE)["mxfp8"] == "different"
    assert "14 of 14 registered seeds. Starts of runs: 3 cut off, 84 finished." in text


def test_an_arm_is_held_against_the_reference_in_its_own_layout() -> None:
    """Two GPUs read the text in another order, so that their losses may be others."""
    curves = made_up({"bf16_ep2": 0.02, "mxfp8_a2a_ep2": 0.02})
    text = render(curves, SEEDS, PLAN, {}, "")
    assert set(words(text, END).values()) == {"equivalent"}


def test_measures_are_of_the_last_tenth_and_of_all() -> None:
    curve = [float(step) for step in range(40)]
    assert (measure(END, curve), measure(WHOLE, curve)) == (37.5, 19.5)
    assert math.isnan(measure(END, [*curve[:-1], math.nan]))
    assert measure(END, [math.nan, *curve[1:]]) == 37.5


def test_nobody_looks_before_the_end(tmp_path: Path) -> None:
    curves = made_up({})
    del curves["bf16", SEEDS[3]]
    curves["mxfp8", SEEDS[5]] = curves["mxfp8", SEEDS[5]][:-1]
    assert complete_seeds(curves, PLAN) == [s for s in SEEDS if s not in (SEEDS[3], SEEDS[5])]
    del curves["mxfp8", SEEDS[5]]
    whole = {key: curve for key, curve in curves.items() if key[1] not in (SEEDS[3], SEEDS[5])}
    write_arms(whole, tmp_path)
    (tmp_path / RECORD).write_text('[{"result": "finished"}]')
    with pytest.raises(InputError, match="12 of 14 seeds have all runs"):
        write(tmp_path, PLAN, "")
    assert not (tmp_path / "verdict.md").exists()
    write(tmp_path, PLAN, "the machine was taken back")
    text = (tmp_path / "verdict.md").read_text()
    assert "Judged before all runs were there: the machine was taken back." in text
    assert "12 of 14 registered seeds" in text
    assert (tmp_path / "effect.svg").stat().st_size < 100_000
    first = (tmp_path / "effect.svg").read_bytes()
    write(tmp_path, PLAN, "the machine was taken back")
    assert (tmp_path / "effect.svg").read_bytes() == first


def test_an_arm_that_was_not_run_is_said(tmp_path: Path) -> None:
    curves = {key: curve for key, curve in made_up({}).items() if key[0] != "float8"}
    assert complete_seeds(curves, PLAN) == list(SEEDS)
    text = render(curves, SEEDS, PLAN, {}, "")
    assert words(text, END)["float8"] == "undecided"
    assert re.search(r"\| float8 +\| +not run", text)


def test_the_course_of_a_difference_is_shown_by_tenths() -> None:
    curves = made_up({}, late={"mxfp8": 0.01})
    parts = by_part(curves, SEEDS, "mxfp8")
    assert [len(part) for part in parts] == [len(SEEDS)] * 10
    rise = [a - b for a, b in zip(parts[9], parts[8], strict=True)]
    assert sum(rise) / len(rise) == pytest.approx(0.01, abs=1e-3)


def test_curves_are_kept_as_they_were_read(tmp_path: Path) -> None:
    curves = {("a", 1): [4.12345, 3.0], ("a", 2): [4.0, math.nan], ("b", 1): [1.0, 2.0]}
    write_arms(curves, tmp_path)
    found = read_arms(tmp_path)
    assert found.keys() == curves.keys()
    assert found["a", 1] == curves["a", 1]
    assert math.isnan(found["a", 2][1])
    assert (tmp_path / "a.csv").read_text().splitlines()[:2] == ["step,1,2", "1,4.12345,4.0"]


# --- The page ------------------------------------------------------------------------------------


def test_the_first_verdict_is_recomputed_from_its_curves() -> None:
    assert convergence_first.render() == AGAIN
    assert AGAIN in PAGE
    losses = convergence_first.ends()
    assert convergence_first.pooled(losses, "mxfp8") == pytest.approx(0.036, abs=5e-4)
    assert convergence_first.paired(losses, "mxfp8_wgrad_hp") == pytest.approx(0.043, abs=5e-4)
    assert convergence_first.welch(losses, "mxfp8") == pytest.approx(0.055, abs=5e-4)


def test_the_first_verdict_is_that_of_its_rule() -> None:
    curves = read_first()
    runs = {
        name: [dict(enumerate(curves[name, seed], 1)) for seed in FIRST_SEEDS]
        for name in FIRST_PRECISIONS
    }
    text = (FIRST / "verdict.md").read_text(encoding="utf-8")
    for name, (_, last) in judge_repeats(runs, "bf16").items():
        assert last.low is not None and last.high is not None and last.difference is not None
        (row,) = re.findall(rf"^\| {name} .*", text, re.M)
        for value in (f"{last.difference:+.4f}", f"{last.low:+.4f} to {last.high:+.4f}"):
            assert value in row
        assert last.verdict in row
    words = " ".join(PAGE.split())
    assert "`mxfp8` *equivalent* (0.03% below BF16, within 0.23%)" in words
    assert "`mxfp8_wgrad_hp` *cannot tell* (0.06% above, within 0.26%)" in words


def test_the_first_text_had_tables_where_runs_lay_far_apart() -> None:
    curves = read_first()

    def between(start: int) -> dict[tuple[str, int], list[float]]:
        return {key: curve[start : start + 50] for key, curve in curves.items()}

    spreads = [spread_of(between(start), WHOLE).run for start in range(100, 1500, 50)]
    assert f"of up to {max(spreads):.1%} (50 steps)" in " ".join(PAGE.split())
    before, table = (measure(WHOLE, between(start)["bf16", 42]) for start in (250, 300))
    assert table / before == pytest.approx(2 / 3, abs=0.03)


def test_the_tables_of_power_are_those_that_the_code_makes() -> None:
    """The whole takes minutes; what needs no simulation, and a row that does, are made again."""
    assert POWER in PAGE
    curves = read_first()
    assert len(curves) == 3 * len(FIRST_SEEDS)
    spread = spread_of(curves, END)
    assert f"{100 * spread.strangers:.3f}%" in POWER
    odds = convergence_power.simulate(len(SEEDS), spread.strangers, {})
    row = next(line for line in POWER.splitlines() if line.startswith(f"|    {len(SEEDS)} |"))
    assert [word.strip() for word in row.split("|")[-3:-1]] == [
        f"{100 * odds.each:.1f}%",
        f"{100 * odds.every:.1f}%",
    ]
    for steps in REGISTERED.steps:
        minutes = convergence_power.gpu_minutes(steps, 3)
        (row,) = re.findall(rf"^\| +{steps:,} \|.*", POWER, re.M)
        assert f" {minutes:.0f} " in row


def test_the_seeds_are_as_many_as_the_power_asks_for() -> None:
    rows = [
        [word.strip(" %") for word in line.split("|")[1:-1]]
        for line in POWER.partition("| seeds")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    enough = [int(row[0]) for row in rows if float(row[3]) >= 90]
    assert min(enough) == len(SEEDS)
    sizes = re.findall(
        r"\| +([\d.]+)% \|", POWER.partition("falsely equivalent")[2].split("\n\n")[0]
    )
    assert len(sizes) == 5
    # Two standard errors of 5% in 2,000 are one percent.
    assert all(float(size) <= 100 * FAMILY_ERROR + 1 for size in sizes)


def test_the_page_says_what_is_registered() -> None:
    for arm in ARMS:
        assert re.search(rf"^\| `{arm.name}` +\|", PAGE, re.M), arm.name
    text = " ".join(PAGE.split())
    assert f"{SEEDS[0]} to {SEEDS[-1]}" in text
    assert f"±{MARGIN:.2%}" in text
    assert f"{len(ARMS) * len(SEEDS)} runs" in text
    assert f"within {STARTS} starts" in text
    assert f"{len(COMPARED)} comparisons" in text
    assert f"{REGISTERED.seconds / 60:.0f} minutes" in text


def test_the_page_says_what_the_rehearsal_chose() -> None:
    chosen = chosen_steps(DATA)
    text = " ".join(PAGE.split())
    assert chosen["steps"] in REGISTERED.steps
    assert f"It chose {chosen['steps']} steps, with {chosen['beside']} runs a GPU" in text
    assert f"all runs take {chosen['seconds_of_all'] / 60:.0f}." in text
    for name, pace in chosen["paces"][str(chosen["beside"])].items():
        assert re.search(rf"`{name}` {pace['step']:.3f}", text), name


def test_the_page_has_the_verdict_where_there_is_one() -> None:
    curves = read_arms(DATA)
    starts = read_records(DATA)
    made = {(one["arm"], one["seed"]) for one in starts if one["result"] == FINISHED}
    assert made == set(curves)
    plan = REGISTERED.plan(chosen_steps(DATA)["steps"])
    assert complete_seeds(curves, plan) == list(SEEDS)
    found = render(curves, SEEDS, plan, Counter(one["result"] for one in starts), "")
    assert (DATA / "verdict.md").read_text(encoding="utf-8") == found
    assert found in PAGE


def test_page_and_readme_say_no_more_than_the_verdict() -> None:
    """Who repeats a run, or changes the rule, changes these sentences."""
    curves = read_arms(DATA)
    page, readme = (" ".join(text.split()) for text in (PAGE, README))
    of_end, of_whole = (arms_of(curves, SEEDS, name) for name in (END, WHOLE))
    for arms in (of_end, of_whole):
        assert {verdict.word for verdict in judge(arms).values()} == {EQUIVALENT}
    assert "all four arms are *equivalent* to BF16, at the end and over the whole curve" in page
    assert (
        f"are equivalent to BF16 within {MARGIN:.2%}, at the end and over the whole curve" in readme
    )
    assert all(one["result"] == FINISHED for one in read_records(DATA))
    assert f"All {len(curves)} runs are made, none was lost" in page
    assert f"first of {len(curves)} runs, {len(SEEDS)} seeds an arm" in readme
    steps = chosen_steps(DATA)["steps"]
    assert f"as far as {steps} steps" in page and f"in {steps} steps" in readme
    # Which arms are seen to differ from zero, and which are not.
    ends = {arm: interval(found) for arm, found in of_end.items()}
    courses = {arm: interval(found) for arm, found in of_whole.items()}
    apart = {arm for arm in COMPARED if ends[arm][0] > 0 and courses[arm][0] > 0}
    assert apart == {"float8"}
    others = [*ends.values(), *courses.values()]
    hold_zero = [(low, high) for low, high in others if low < 0 < high]
    assert len(hold_zero) == 2 * (len(COMPARED) - 1)
    most = max(max(-low, high) for low, high in hold_zero)
    assert f"theirs hold zero, and end at {most:.3%} or less" in page
    early = [by_part(curves, SEEDS, arm)[part] for arm in COMPARED for part in (0, 1)]
    assert all(interval(found)[0] > 0 for found in early)
    assert f"above BF16, by {max(map(statistics.fmean, early)):.3%} at most" in page
    assert f"FP8 rowwise ends {statistics.fmean(of_end['float8']):.3%} above BF16" in readme


def test_the_page_says_how_the_runs_that_shared_a_gpu_compare() -> None:
    shared = {one["seed"] for one in read_records(DATA) if one["gpus"] == "0,0"}
    found = dict(zip(SEEDS, arms_of(read_arms(DATA), SEEDS, END)["mxfp8_a2a_ep2"], strict=True))
    own = [one for seed, one in found.items() if seed not in shared]
    assert (len(shared), len(own)) == (5, 9)
    lies = statistics.fmean(found[seed] for seed in shared)
    page = " ".join(PAGE.split())
    assert f"lies {lies:.3%} above its reference at the end in these five" in page
    assert f"{statistics.fmean(own):.3%} in the nine that had two GPUs" in page


def test_a_plan_is_for_its_own_steps_alone() -> None:
    curves = made_up({})
    longer: Plan = replace(PLAN, steps=STEPS + 1)
    assert complete_seeds(curves, longer) == []
