"""Trains the runs of the convergence experiment: the next ones in the registered order.

A run that has all its steps is finished, whatever its loss. One that was cut off, or that ended by
itself, is lost: it starts again from its first step, with the same seed. Nothing here looks at a
loss but to write it down.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cells import gpu_ids
from bench.convergence_curves import read_arms
from bench.convergence_plan import ARMS, STARTS, Arm, Plan, order, run_name
from bench.convergence_text import PIECES
from bench.torchrun import Job
from bench.training import Outcome, train_all
from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.gpus import Gpu, visible_gpus
from cookbook.config.cell import Cell
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.validate import validation_errors
from cookbook.observe.console import StepMetrics

RECORD = "runs.json"
CURVES = "curves"
FINISHED, CUT_OFF, FAILED = "finished", "cut off", "failed"
_PACKAGES = ("torch", "torchtitan", "torchao")

Run = tuple[Arm, int]
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where runs are made: a folder, its text's fingerprint, and the machine's GPUs.

    Attributes:
        gpus: as CUDA_VISIBLE_DEVICES names them; none on a machine without. One that stands here
            twice takes two ranks of a run.
        beside: ranks that share a GPU.
    """

    out: Path
    text: str
    gpu: Gpu | None
    gpus: Sequence[str]
    beside: int

    @classmethod
    def here(cls, out: Path, text: str, beside: int, shares: bool = False) -> Place:
        """This machine; where it `shares`, its GPUs are enough for every arm."""
        gpus = gpu_ids()
        while shares and 0 < len(gpus) < max(arm.gpus for arm in ARMS):
            gpus = [*gpus, *gpus]
        return cls(out, text, next(iter(visible_gpus()), None), gpus, beside)


def cell_of(plan: Plan, arm: Arm, seed: int, place: Place) -> Cell:
    """The arm's cell: all arms share the tokens of a step and differ in nothing else."""
    options = {
        "training.steps": plan.steps,
        "training.local_batch_size": plan.sequences // arm.gpus,
        "parallelism.expert_parallel_degree": arm.gpus,
        "training.dataset_path": str(place.out / "assets" / PIECES),
        "model.hf_assets_path": str(place.out / "assets" / "tokenizer"),
        "debug.seed": seed,
        **plan.options,
    }
    machine = this_machine(arm.gpus, place.gpu)
    name = run_name(arm.name, seed)
    return cell_on(machine, plan.recipe, arm.precision, arm.ep_backend, options, name)


def refused(plan: Plan, place: Place) -> dict[str, str]:
    """The arms that this machine cannot run, with the reason."""
    found = {}
    for arm, seed in order(plan.seeds[:1]):
        if place.gpus and len(place.gpus) < arm.gpus:
            found[arm.name] = f"needs {arm.gpus} GPUs, {len(place.gpus)} are here"
        elif problems := validation_errors(cell_of(plan, arm, seed, place)):
            found[arm.name] = problems[0].reason
    return found


def missing(plan: Plan, done: set[tuple[str, int]], records: Records) -> list[Run]:
    """The runs to make, in the registered order; not those that failed as often as is allowed."""
    failures = Counter((one["arm"], one["seed"]) for one in records if one["result"] == FAILED)
    return [
        (arm, seed)
        for arm, seed in order(plan.seeds)
        if (arm.name, seed) not in done and failures[arm.name, seed] < STARTS
    ]


def done_in(out: Path) -> set[tuple[str, int]]:
    """The finished runs of a folder of runs."""
    names = (path.stem.rpartition("-seed") for path in (out / CURVES).glob("*.csv"))
    return {(arm, int(seed)) for arm, _, seed in names}


def read_records(folder: Path) -> Records:
    """Every start of a run so far."""
    path = folder / RECORD
    found: Records = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return found


def jobs_of(plan: Plan, runs: Sequence[Run], place: Place) -> list[Job]:
    """The runs as trainings; those on one GPU take the GPUs in turn."""
    found, turn = [], 0
    for arm, seed in runs:
        chosen = place.gpus[: arm.gpus]
        if place.gpus and arm.gpus == 1:
            chosen, turn = [place.gpus[turn % len(place.gpus)]], turn + 1
        cell = cell_of(plan, arm, seed, place)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {}
        found.append(
            Job(
                cell,
                place.out / "runs" / cell.name,
                caches=place.out,
                environment=environment,
                shares=len(set(chosen)) < len(chosen),
            )
        )
    return found


class Turns:
    """Says whether a run may start: in the order of the list, and where its GPUs have room."""

    def __init__(self, jobs: Sequence[Job], beside: int) -> None:
        self._waiting = list(jobs)
        self._beside = beside

    def may_start(self, job: Job, running: Sequence[Job]) -> bool:
        if job is not self._waiting[0]:
            return False
        load = Counter(gpu for one in running for gpu in _gpus_of(one))
        own = Counter(_gpus_of(job))
        if any(load[gpu] and load[gpu] + own[gpu] > self._beside for gpu in own):
            return False
        self._waiting.pop(0)
        return True


def _gpus_of(job: Job) -> list[str]:
    return job.environment.get("CUDA_VISIBLE_DEVICES", "cpu").split(",")


def train(plan: Plan, place: Place, have: Path, seconds: float, least: float) -> int:
    """Make the runs that neither `place.out` nor `have` holds, until `seconds` have passed.

    Args:
        have: collected curves and records of earlier times; they must be of the same text.
        least: with fewer seconds left, no run is started.

    Returns:
        The number of runs that are still to be made.
    """
    deadline = time.monotonic() + seconds
    earlier = read_records(have)
    if others := {one["text"] for one in earlier} - {place.text}:
        raise InputError(
            str(have / RECORD),
            f"its runs read the text {others.pop()[:12]}, this machine made {place.text[:12]}",
            "compare runs of one text only: make it of the same Python sources",
        )
    left_out = refused(plan, place)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", flush=True)
    finished = done_in(place.out) | set(read_arms(have))
    runs = missing(plan, finished, earlier + read_records(place.out))
    jobs = jobs_of(plan, [run for run in runs if run[0].name not in left_out], place)
    print(f"{len(jobs)} runs to make, {len(finished)} are there", flush=True)
    run_of = {run_name(arm.name, seed): (arm, seed) for arm, seed in runs}

    results: list[str] = []

    def note(job: Job, outcome: Outcome) -> None:
        results.append(keep(plan, run_of[job.cell.name], job, outcome, place))
        print(f"{job.cell.name}: {results[-1]} after {outcome.seconds:.0f} s", flush=True)

    turns = Turns(jobs, place.beside)
    train_all(
        jobs,
        note,
        deadline=deadline,
        least=least,
        may_start=turns.may_start,
        # A machine that fails would use up every run's starts.
        enough=lambda: len(results) >= STARTS and set(results[-STARTS:]) == {FAILED},
    )
    records = earlier + read_records(place.out)
    finished = done_in(place.out) | set(read_arms(have))
    return len([run for run in missing(plan, finished, records) if run[0].name not in left_out])


def keep(plan: Plan, run: Run, job: Job, outcome: Outcome, place: Place) -> str:
    """Write down what a run did, and its curve where it is whole; return the result."""
    arm, seed = run
    losses = curve_of(outcome.steps, plan.steps)
    result, reason = FINISHED, ""
    if losses is None:
        reason = outcome.reason or "its log lacks steps"
        result = CUT_OFF if reason.startswith("stopped after") else FAILED
    else:
        rows = [f"{step},{loss}\n" for step, loss in enumerate(losses, 1)]
        path = place.out / CURVES / f"{job.cell.name}.csv"
        write_whole(path, "".join(["step,loss\n", *rows]))
    record = {
        "arm": arm.name,
        "seed": seed,
        "result": result,
        "reason": reason,
        "steps": plan.steps,
        "steps_made": len(outcome.steps),
        "seconds": outcome.seconds,
        "memory_gib": outcome.memory_gib,
        "gpus": job.environment.get("CUDA_VISIBLE_DEVICES", ""),
        "gpu": place.gpu.name if place.gpu else "",
        "text": place.text,
        "versions": versions(),
    }
    records = [*read_records(place.out), record]
    write_whole(place.out / RECORD, json.dumps(records, indent=1) + "\n")
    return result


def curve_of(steps: Sequence[StepMetrics], wanted: int) -> list[float] | None:
    """The losses of all steps; None where some are missing.

    A run that ended after a loss that is no number is whole: what is missing is none either.
    """
    found = {step.step: step.loss for step in steps if step.loss is not None}
    losses = [found.get(step, math.nan) for step in range(1, wanted + 1)]
    broken = any(not math.isfinite(loss) for loss in found.values())
    return losses if broken or len(found) == wanted else None


def read_curve(path: Path) -> list[float]:
    with path.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def versions() -> Mapping[str, str]:
    """Of Python and what trains."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found}
