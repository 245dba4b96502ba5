"""The runs of the convergence experiment: which, in which order, where, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.convergence_curves import read_arms
from bench.convergence_plan import ARMS, REGISTERED, TRIAL, order
from bench.convergence_rehearsal import Pace, choose_steps, rehearse, seconds_for, waves
from bench.convergence_runs import (
    Place,
    Run,
    Turns,
    cell_of,
    curve_of,
    done_in,
    jobs_of,
    keep,
    missing,
    read_records,
    refused,
    train,
)
from bench.gpu_convergence import ARCHIVE, collect, pack
from bench.torchrun import Job
from bench.training import Outcome
from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu
from cookbook.config.validate import validation_errors
from cookbook.observe.console import StepMetrics

pytestmark = pytest.mark.bench

H200 = Gpu("NVIDIA H200", 9.0, 139.8)
BY_NAME = {arm.name: arm for arm in ARMS}
STEPS = 3
PLAN = TRIAL.plan(STEPS)
# What the arms may differ in, beside their precision's and their EP backend's own options.
OF_LAYOUT = {"training.local_batch_size", "parallelism.expert_parallel_degree"}


def place(out: Path, gpus: Sequence[str] = ("4", "7"), beside: int = 2) -> Place:
    return Place(out, "abc", H200 if gpus else None, gpus, beside)


def outcome(losses: Sequence[float], reason: str | None = None) -> Outcome:
    steps = [StepMetrics(0, step, loss, 1.0) for step, loss in enumerate(losses, 1)]
    return Outcome(reason, 5.0, steps, None, None, [])


def test_every_arm_trains_on_the_same_tokens_and_can_run_on_two_h200(tmp_path: Path) -> None:
    plan = REGISTERED.plan(1000)
    for arm in ARMS:
        cell = cell_of(plan, arm, 1003, place(tmp_path))
        assert validation_errors(cell) == []
        assert (cell.recipe.name, cell.world) == ("proxy", arm.gpus)
        assert cell.options["training.local_batch_size"] * cell.world == 16
        assert cell.options["parallelism.expert_parallel_degree"] == arm.gpus
        assert (cell.steps, cell.options["debug.seed"]) == (1000, 1003)
        assert cell.options["debug.moe_force_load_balance"] is False
        assert cell.options["training.dataset_path"] == str(tmp_path / "assets/pieces")
        declared = cell.precision.name, cell.ep_backend.name
        assert declared == (arm.precision, arm.ep_backend)


def test_a_precision_differs_from_its_reference_in_its_overlay_alone(tmp_path: Path) -> None:
    plan = REGISTERED.plan(1000)
    for arm in ARMS:
        if arm.reference:
            own, base = (
                cell_of(plan, one, 1003, place(tmp_path)).options
                for one in (arm, BY_NAME[arm.reference])
            )
            names = own.settings.keys() | base.settings.keys()
            apart = {name for name in names if own[name] != base[name]}
            assert not apart & OF_LAYOUT
            prefixes = ("quantize.", "model.converters", "cookbook.", "job.description")
            others = {name for name in apart if not name.startswith(prefixes)}
            assert all("expert_parallel_a2a" in name for name in others), others


def test_kernels_prove_themselves_in_the_rehearsal_and_not_again(tmp_path: Path) -> None:
    for plan, proves in ((REGISTERED.plan(600), False), (REGISTERED.rehearsal(), True)):
        cell = cell_of(plan, ARMS[0], plan.seeds[0], place(tmp_path))
        assert cell.options["cookbook.self_check"] is proves
    assert set(REGISTERED.rehearsal().seeds).isdisjoint(REGISTERED.seeds)


def test_what_cannot_run_here_is_said(tmp_path: Path) -> None:
    assert refused(REGISTERED.plan(600), place(tmp_path)) == {}
    assert refused(REGISTERED.plan(600), place(tmp_path, ["0"])) == {
        "bf16_ep2": "needs 2 GPUs, 1 are here",
        "mxfp8_a2a_ep2": "needs 2 GPUs, 1 are here",
    }
    on_cpu = refused(PLAN, place(tmp_path, []))
    assert list(on_cpu) == ["float8"]
    assert "9.0" in on_cpu["float8"]


def test_the_next_runs_are_those_without_a_curve_in_the_registered_order() -> None:
    everything = order(PLAN.seeds)
    assert missing(PLAN, set(), []) == everything
    done = {(everything[0][0].name, everything[0][1]), (everything[4][0].name, everything[4][1])}
    assert missing(PLAN, done, []) == [*everything[1:4], *everything[5:]]


def test_a_run_that_fails_by_itself_is_given_up_after_three_starts() -> None:
    first = order(PLAN.seeds)[0]

    def starts(*results: str) -> list[dict[str, Any]]:
        return [{"arm": first[0].name, "seed": first[1], "result": result} for result in results]

    assert first in missing(PLAN, set(), starts("failed", "failed"))
    assert first in missing(PLAN, set(), starts("failed", "cut off", "cut off", "failed"))
    assert first not in missing(PLAN, set(), starts("failed", "cut off", "failed", "failed"))


def test_runs_take_the_gpus_in_turn_and_start_in_order(tmp_path: Path) -> None:
    one, two = BY_NAME["bf16"], BY_NAME["bf16_ep2"]
    runs: list[Run] = [(one, 1), (one, 2), (two, 1), (one, 3), (one, 4)]
    jobs = jobs_of(PLAN, runs, place(tmp_path))
    gpus = [job.environment["CUDA_VISIBLE_DEVICES"] for job in jobs]
    assert gpus == ["4", "7", "4,7", "4", "7"]
    turns = Turns(jobs, 2)
    running: list[Job] = []
    # The second does not go before the first.
    assert not turns.may_start(jobs[1], running)
    for job in jobs[:3]:
        assert turns.may_start(job, running)
        running.append(job)
    # Two runs on each GPU now.
    assert not turns.may_start(jobs[3], running)
    assert not turns.may_start(jobs[4], running)
    running.remove(jobs[1])
    # GPU 7 has room, but the next in order is for GPU 4.
    assert not turns.may_start(jobs[4], running)
    assert not turns.may_start(jobs[3], running)
    running.remove(jobs[0])
    assert turns.may_start(jobs[3], running)
    on_cpu = jobs_of(PLAN, runs[:2], place(tmp_path, []))
    assert [dict(job.environment) for job in on_cpu] == [{}, {}]
    assert not Turns(on_cpu, 1).may_start(on_cpu[0], [on_cpu[1]])


def test_where_gpus_are_too_few_the_ranks_of_a_run_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.convergence_runs.visible_gpus", lambda: [H200])
    monkeypatch.setattr("bench.cells.visible_gpus", lambda: [H200])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    alone, shared = (Place.here(tmp_path, "abc", 3, shares) for shares in (False, True))
    plan = REGISTERED.plan(600)
    assert set(refused(plan, alone)) == {"bf16_ep2", "mxfp8_a2a_ep2"}
    assert refused(plan, shared) == {}
    one, two = BY_NAME["bf16"], BY_NAME["bf16_ep2"]
    jobs = jobs_of(plan, [(one, 1), (two, 1), (one, 2)], shared)
    assert [(job.environment["CUDA_VISIBLE_DEVICES"], job.shares) for job in jobs] == [
        ("3", False),
        ("3,3", True),
        ("3", False),
    ]
    # The same cell as on two GPUs.
    own = cell_of(plan, two, 1, place(tmp_path))
    assert cell_of(plan, two, 1, shared).options.settings == own.options.settings
    turns = Turns(jobs, 3)
    assert turns.may_start(jobs[0], [])
    assert turns.may_start(jobs[1], jobs[:1])
    assert not turns.may_start(jobs[2], jobs[:2])
    # Of three ranks two are taken.
    assert not Turns(jobs[1:], 3).may_start(jobs[1], [jobs[0], jobs[2]])
    # A run that needs more than a GPU may have goes alone.
    assert not Turns(jobs[1:], 1).may_start(jobs[1], jobs[:1])
    assert Turns(jobs[1:], 1).may_start(jobs[1], [])
    keep(plan, (two, 1), jobs[1], outcome([4.0]), shared)
    assert read_records(tmp_path)[0]["gpus"] == "3,3"


def test_what_has_gpus_enough_does_not_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.convergence_runs.visible_gpus", lambda: [H200, H200])
    monkeypatch.setattr("bench.cells.visible_gpus", lambda: [H200, H200])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = Place.here(tmp_path, "abc", 3, shares=True)
    (job,) = jobs_of(PLAN, [(BY_NAME["bf16_ep2"], 1)], found)
    assert (job.environment["CUDA_VISIBLE_DEVICES"], job.shares) == ("0,1", False)


@pytest.mark.parametrize(
    ("losses", "reason", "result"),
    [
        ([4.0, 3.5, 3.0], None, "finished"),
        # All its steps are there, whatever became of it then.
        ([4.0, 3.5, 3.0], "exit status 1", "finished"),
        ([4.0, 3.5], "stopped after 5 s", "cut off"),
        ([4.0, 3.5], "exit status 1", "failed"),
        ([], "out of memory", "failed"),
        # A loss that is no number is a result.
        ([4.0, math.nan, math.nan], None, "finished"),
        ([4.0, math.inf], "exit status 1", "finished"),
    ],
)
def test_what_a_run_did_is_kept(
    tmp_path: Path, losses: list[float], reason: str | None, result: str
) -> None:
    run = (BY_NAME["mxfp8"], 2)
    (job,) = jobs_of(PLAN, [run], place(tmp_path))
    assert keep(PLAN, run, job, outcome(losses, reason), place(tmp_path)) == result
    assert done_in(tmp_path) == ({("mxfp8", 2)} if result == "finished" else set())
    (record,) = read_records(tmp_path)
    assert (record["arm"], record["seed"], record["result"]) == ("mxfp8", 2, result)
    assert (record["steps"], record["steps_made"]) == (STEPS, len(losses))
    assert record["text"] == "abc"
    assert {"python", "torch", "torchtitan", "torchao"} == set(record["versions"])
    keep(PLAN, run, job, outcome(losses, reason), place(tmp_path))
    assert len(read_records(tmp_path)) == 2


def test_a_curve_has_every_step_or_is_none() -> None:
    steps = [StepMetrics(0, step, float(step), 1.0) for step in (1, 2, 3)]
    assert curve_of(steps, 3) == [1.0, 2.0, 3.0]
    assert curve_of(steps[:2], 3) is None
    assert curve_of([steps[0], steps[2]], 3) is None
    broken = [steps[0], StepMetrics(0, 2, math.nan, 1.0)]
    found = curve_of(broken, 4)
    assert found is not None and found[0] == 1.0
    assert all(math.isnan(loss) for loss in found[1:])


def test_a_session_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, asked = tmp_path / "docs", list[str]()

    def train_all(
        jobs: Sequence[Job], note: Callable[[Job, Outcome], None], **given: Any
    ) -> list[Job]:
        assert given["least"] == 7
        asked.extend(job.cell.name for job in jobs)
        for number, job in enumerate(jobs[:8]):
            cut_off = number == 7
            losses = [9.87, 9.87] if cut_off else [9.87, 9.87, 9.87]
            note(job, outcome(losses, "stopped after 5 s" if cut_off else None))
        return list(jobs[8:])

    monkeypatch.setattr("bench.convergence_runs.train_all", train_all)
    names = [f"{arm.name}-seed{seed}" for arm, seed in order(PLAN.seeds)]
    first, second = place(tmp_path / "first"), place(tmp_path / "second")
    assert train(PLAN, first, data, 60, 7) == len(names) - 7
    assert asked == names
    pack(first.out, tmp_path / "results")
    assert collect(tmp_path / "results" / ARCHIVE, data) == 7
    asked.clear()
    assert train(PLAN, second, data, 60, 7) == len(names) - 14
    assert asked == names[7:]
    assert collect(second.out, data) == 7
    assert len(read_arms(data)) == 14
    assert [one["result"] for one in read_records(data)].count("cut off") == 2
    # No loss is shown on the way.
    assert "9.87" not in capsys.readouterr().out
    other = replace(second, text="xyz")
    with pytest.raises(InputError, match="one text only"):
        train(PLAN, other, data, 60, 7)


def test_a_machine_that_fails_does_not_use_up_the_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def train_all(
        jobs: Sequence[Job],
        note: Callable[[Job, Outcome], None],
        *,
        enough: Callable[[], bool],
        **given: Any,
    ) -> list[Job]:
        for job, reason in zip(jobs, ["no GPU", None, *["no GPU"] * 3], strict=False):
            ended.append(enough())
            note(job, outcome([] if reason else [4.0, 3.5, 3.0], reason))
        ended.append(enough())
        return list(jobs[5:])

    monkeypatch.setattr("bench.convergence_runs.train_all", train_all)
    train(PLAN, place(tmp_path / "out"), tmp_path / "docs", 60, 7)
    assert ended == [False] * 5 + [True]


def test_what_was_collected_stays(tmp_path: Path) -> None:
    data, run = tmp_path / "docs", (BY_NAME["bf16"], 1)
    (job,) = jobs_of(PLAN, [run], place(tmp_path))
    for number, losses in enumerate(([4.0, 3.5, 3.0], [5.0, 5.0, 5.0])):
        where = place(tmp_path / str(number))
        keep(PLAN, run, job, replace(outcome(losses), seconds=float(number)), where)
        collect(where.out, data)
    assert read_arms(data) == {("bf16", 1): [4.0, 3.5, 3.0]}
    assert collect(where.out, data) == 0
    assert len(read_records(data)) == 2
    longer = place(tmp_path / "longer")
    keep(replace(PLAN, steps=4), run, job, outcome([4.0, 3.0, 2.0, 1.0]), longer)
    other = replace(place(tmp_path / "other"), text="xyz")
    keep(PLAN, run, job, outcome([4.0, 3.0, 2.0]), other)
    for where in (longer, other):
        with pytest.raises(InputError, match="another text or number of steps"):
            collect(where.out, data)
    assert read_arms(data) == {("bf16", 1): [4.0, 3.5, 3.0]}


def test_the_rehearsal_takes_the_most_steps_that_fit(tmp_path: Path) -> None:
    one = {arm.name: Pace(10, 0.05) for arm in ARMS}
    # Four runs of one GPU and two of two: eight GPU runs a seed, 14 seeds, 2 GPUs of 4 runs.
    assert seconds_for(REGISTERED, 1000, one, 4, 2) == pytest.approx(14 * 8 * 60 / 8)
    slow = {name: Pace(10, 0.5) for name in one}
    found = choose_steps(REGISTERED, {2: one, 4: slow}, 2)
    # 14 x 8 x (10 + 800 x 0.05) / 4 = 1,400 s; 600 steps take 1,120 s.
    assert REGISTERED.seconds == 1260
    assert (found["steps"], found["beside"]) == (600, 2)
    assert (found["seconds_of_all"], found["longest_run"]) == (1120, 40)
    faster = {name: Pace(10, 0.075) for name in one}
    assert choose_steps(REGISTERED, {2: one, 4: faster}, 2)["beside"] == 4
    assert choose_steps(REGISTERED, {2: slow}, 2)["steps"] == 400


def test_steps_are_timed_while_all_runs_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ended = [0.0], list[float]()

    def train_all(
        jobs: Sequence[Job],
        note: Callable[[Job, Outcome], None],
        *,
        look: Callable[[Job, Sequence[StepMetrics]], None],
        enough: Callable[[], bool],
        **given: Any,
    ) -> list[Job]:
        steps = [0] * len(jobs)
        while not enough():
            now[0] += 10
            for number, job in enumerate(jobs):
                # They begin one after another, and are faster while others still load.
                if now[0] >= 10 * number:
                    steps[number] += 5 if now[0] > 10 * (len(jobs) - 1) else 50
                look(job, [StepMetrics(0, step, 4.0, 1.0) for step in range(steps[number])])
        ended.append(now[0])
        for number, job in enumerate(jobs):
            note(job, replace(outcome([], "stopped"), start_seconds=10.0 + number // 6))
        return []

    monkeypatch.setattr("bench.convergence_rehearsal.train_all", train_all)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("bench.convergence_rehearsal.time", clock)
    found = rehearse(REGISTERED, place(tmp_path, beside=8), 1000)
    assert found.keys() == BY_NAME.keys()
    # Ten seconds make five steps; the runs of an arm start in 10 or 11 s.
    assert all(pace.step == pytest.approx(2) for pace in found.values())
    assert sum(pace.start for pace in found.values()) == pytest.approx(6 * 10.5)
    # The last of twelve begins at 110 s; 45 s later the next look is the last.
    assert ended == [160]


def test_the_rehearsal_fills_the_gpus(tmp_path: Path) -> None:
    def names(beside: int) -> list[list[str]]:
        found = waves((1, 2), place(tmp_path, beside=beside))
        assert len({run for wave in found for run in wave}) == sum(map(len, found))
        return [sorted(arm.name for arm, _ in wave) for wave in found]

    alone = ["bf16", "float8", "mxfp8", "mxfp8_wgrad_hp"]
    assert names(2) == [alone, ["bf16_ep2", "mxfp8_a2a_ep2"]]
    assert names(4) == [sorted(arm.name for arm in ARMS)]
    # Two GPUs of eight runs have room for all arms twice; there is no third seed to fill more.
    assert names(8) == names(16) == [sorted(arm.name for arm in (*ARMS, *ARMS))]
