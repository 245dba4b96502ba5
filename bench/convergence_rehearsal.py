"""Times the convergence experiment's cells side by side, and says how many steps fit.

No loss is read. The seeds are none of the experiment's, and their runs are not kept.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.convergence_plan import ARMS, Arm, Experiment, order
from bench.convergence_runs import Place, jobs_of, refused
from bench.torchrun import Job
from bench.training import Outcome, train_all
from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.observe.console import StepMetrics

STEPS_FILE = "steps.json"
# What is timed: so long, once every run trains that shares the GPUs.
_TOGETHER_SECONDS = 45


@dataclass(frozen=True)
class Pace:
    """How fast an arm trains where `beside` runs share a GPU.

    Attributes:
        start: seconds from a run's start to its second step.
        step: seconds of a step.
    """

    start: float
    step: float


def rehearse(experiment: Experiment, place: Place, seconds: float) -> dict[str, Pace]:
    """The pace of every arm beside as many others as fit, which all must train within `seconds`."""
    plan = experiment.rehearsal()
    left_out = refused(plan, place)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", flush=True)
    found = {}
    for wave in waves(plan.seeds, place):
        runs = [(arm, seed) for arm, seed in wave if arm.name not in left_out]
        arms = dict(zip(jobs_of(plan, runs, place), (arm for arm, _ in runs), strict=True))
        for arm, pace in _time(arms, seconds).items():
            found[arm] = pace
            print(f"{arm}: start {pace.start:.0f} s, a step {pace.step:.3f} s", flush=True)
    shutil.rmtree(place.out / "runs", ignore_errors=True)
    return found


def waves(seeds: Sequence[int], place: Place) -> list[list[tuple[Arm, int]]]:
    """The runs in groups that run at once, each as full as the GPUs have room.

    Where there is room for all arms of several seeds, as many seeds as that are taken.
    """
    room = place.beside * max(1, len(place.gpus))
    full = max(1, room // sum(arm.gpus for arm in ARMS))
    found: list[list[tuple[Arm, int]]] = []
    for run in sorted(order(seeds[:full]), key=lambda run: run[0].gpus):
        if not found or sum(arm.gpus for arm, _ in found[-1]) + run[0].gpus > room:
            found.append([])
        found[-1].append(run)
    return found


def _time(arms: Mapping[Job, Arm], seconds: float) -> dict[str, Pace]:
    seen: dict[Job, list[tuple[float, int]]] = {job: [] for job in arms}
    paces: dict[str, list[Pace]] = {}

    def look(job: Job, steps: Sequence[StepMetrics]) -> None:
        seen[job].append((time.monotonic(), len(steps)))

    def all_train() -> float:
        """When every run was first seen to train; steps count from then on."""
        return max(next((at for at, n in one if n > 2), math.inf) for one in seen.values())

    def note(job: Job, outcome: Outcome) -> None:
        counted = [(at, steps) for at, steps in seen[job] if at >= all_train()]
        if len(counted) < 2 or counted[0][1] == counted[-1][1] or not outcome.start_seconds:
            reason = outcome.reason or "it made all its steps"
            raise InputError(job.cell.name, f"cannot be timed: {reason}", f"see {job.folder}")
        (began, first), (ended, last) = counted[0], counted[-1]
        pace = Pace(outcome.start_seconds, (ended - began) / (last - first))
        paces.setdefault(arms[job].name, []).append(pace)

    train_all(
        list(arms),
        note,
        deadline=time.monotonic() + seconds,
        may_start=lambda job, running: True,
        look=look,
        enough=lambda: time.monotonic() > all_train() + _TOGETHER_SECONDS,
    )
    return {name: _mean(found) for name, found in paces.items()}


def _mean(paces: Sequence[Pace]) -> Pace:
    return Pace(
        statistics.fmean(one.start for one in paces), statistics.fmean(one.step for one in paces)
    )


def seconds_for(
    experiment: Experiment, steps: int, paces: Mapping[str, Pace], beside: int, num_gpus: int
) -> float:
    """Of the whole experiment with that many steps."""
    gpus = {arm.name: arm.gpus for arm in ARMS}
    each = [gpus[name] * duration(steps, pace) for name, pace in paces.items()]
    return len(experiment.seeds) * sum(each) / (beside * num_gpus)


def duration(steps: int, pace: Pace) -> float:
    """Of one run, in seconds."""
    return pace.start + steps * pace.step


def choose_steps(
    experiment: Experiment, found: Mapping[int, Mapping[str, Pace]], num_gpus: int
) -> dict[str, Any]:
    """The most steps that fit, and the runs a GPU with which they are done soonest.

    Args:
        found: the paces by the number of runs that shared a GPU.
    """

    def total(steps: int, beside: int) -> float:
        return seconds_for(experiment, steps, found[beside], beside, num_gpus)

    best = {steps: min(found, key=lambda n: total(steps, n)) for steps in experiment.steps}
    fitting = [steps for steps, n in best.items() if total(steps, n) <= experiment.seconds]
    steps = max(fitting) if fitting else min(best)
    beside = best[steps]
    return {
        "steps": steps,
        "beside": beside,
        "seconds_of_all": round(total(steps, beside)),
        "seconds_allowed": experiment.seconds,
        "longest_run": round(max(duration(steps, one) for one in found[beside].values())),
        "paces": {
            number: {arm: asdict(pace) for arm, pace in paces.items()}
            for number, paces in found.items()
        },
    }


def write_steps(chosen: Mapping[str, Any], target: Path) -> None:
    write_whole(target, json.dumps(chosen, indent=1) + "\n")
