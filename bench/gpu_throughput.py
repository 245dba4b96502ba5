"""Trains cells in turn on one machine, A B A B ..., and says how much faster one is than another.

    python -m bench.gpu_throughput OUT released-deepep deepep [--repeats 3] [--seconds 560]
    python -m bench.gpu_throughput OUT deepep half --cell half deepep training.local_batch_size=2

Machines of one kind differ by some percent, and one machine from hour to hour. So cells are
compared round by round: a round trains each of them once, one after another, and the spread of the
rounds' ratios says how much a ratio means. The first cell is what the others are compared with. All
of it on two corpora, short documents and long ones (`bench/corpora.py`), which are never compared.

After every training OUT/throughput.json and OUT/throughput.md are written anew; the logs are in
OUT/runs/<corpus>/<cell>/attempt-<k>. Started again, it goes on where it stopped. The names of cells
are those of `bench/throughput_cells.py`, or defined by `--cell`. `--device cpu` tries it out with
the debug model: not a result.
"""

from __future__ import annotations

import json
import shlex
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from bench.throughput_plan import Plan, read_plan
from bench.throughput_table import Round, Run, render_report
from bench.torchrun import Job
from bench.training import Outcome, train_one
from cookbook.base.files import write_whole

# With less time left than this, or than a training took before, none is started.
_LEAST_SECONDS = 30.0
# A round that was interrupted is gone on with on the same machine, and not much later.
_ROUND_SECONDS = 1800


def measure(plan: Plan, rounds: list[Round]) -> bool:
    """Train the rounds that `rounds` lacks, as far as time allows; whether all are there now.

    A cell that fails is not tried again on that corpus until the benchmark is started again.
    """
    waiting = {corpus.name: plan.jobs(corpus) for corpus in plan.corpora}
    _forget_changed(rounds, waiting)
    # All corpora within a repeat, so that a short time has something of each.
    for number in range(1, plan.repeats + 1):
        for corpus, jobs in waiting.items():
            if jobs and _complete(rounds, corpus, jobs) < number:
                for name in _train_round(plan, rounds, corpus, jobs):
                    del jobs[name]
    wanted = {corpus.name: plan.jobs(corpus) for corpus in plan.corpora}
    return all(_complete(rounds, corpus, jobs) >= plan.repeats for corpus, jobs in wanted.items())


def _forget_changed(rounds: Sequence[Round], wanted: Mapping[str, Mapping[str, Job]]) -> None:
    """Take out what cells of these names trained with other options; the logs stay."""
    for one in rounds:
        jobs = wanted.get(one["corpus"], {})
        for name in one["runs"].keys() & jobs.keys():
            if one["runs"][name]["trained"] != _trained(jobs[name]):
                del one["runs"][name]


def _train_round(
    plan: Plan, rounds: list[Round], corpus: str, jobs: Mapping[str, Job]
) -> list[str]:
    """Train what an unfinished round lacks, or a new round; the names of the cells that failed."""
    here = {"host": socket.gethostname(), "boot": int(psutil.boot_time())}
    failed: list[str] = []
    of_round = _unfinished(rounds, corpus, jobs, here)
    if of_round is None:
        of_round = {"corpus": corpus, "where": here, "began": time.time(), "runs": {}}
    for name, job in jobs.items():
        if _has(of_round, job):
            continue
        if plan.deadline - time.monotonic() < _expected_seconds(rounds, name):
            break
        outcome = train_one(job, plan.deadline)
        if of_round not in rounds:
            rounds.append(of_round)
        of_round["runs"][name] = run = _run_of(plan, job, outcome)
        if run["reason"]:
            failed.append(name)
        write(plan, rounds)
        print(f"{corpus} documents, {name}: {_said(run)}", flush=True)
    return failed


def _unfinished(
    rounds: Sequence[Round], corpus: str, jobs: Mapping[str, Job], here: Mapping[str, Any]
) -> Round | None:
    """The last round on `corpus`, where it can be gone on with."""
    last = next((one for one in reversed(rounds) if one["corpus"] == corpus), None)
    if last is None or last["where"] != here or time.time() - last["began"] > _ROUND_SECONDS:
        return None
    if set(last["runs"]) - set(jobs) or all(_has(last, job) for job in jobs.values()):
        return None
    return last


def _complete(rounds: Sequence[Round], corpus: str, jobs: Mapping[str, Job]) -> int:
    """How many rounds on `corpus` have all of these cells."""
    own = [one for one in rounds if one["corpus"] == corpus]
    return sum(all(_has(one, job) for job in jobs.values()) for one in own)


def _has(of_round: Round, job: Job) -> bool:
    """Whether the round has the cell, trained to the end."""
    run = of_round["runs"].get(job.cell.name)
    return run is not None and not run["reason"]


def _trained(job: Job) -> dict[str, Any]:
    """What the job trains, without the places of its data."""
    places = ("training.dataset_path", "model.hf_assets_path")
    return {
        "recipe": job.cell.recipe.name,
        "precision": job.cell.precision.name,
        "ep_backend": job.cell.ep_backend.name,
        "released": job.released,
        **{name: v for name, v in job.cell.options.values.items() if name not in places},
    }


def _expected_seconds(rounds: Sequence[Round], name: str) -> float:
    """What a training of the cell may take, by those before it; of others where it is the first."""
    runs = [(key, run) for one in rounds for key, run in one["runs"].items() if not run["reason"]]
    own = [run for key, run in runs if key == name] or [run for _, run in runs]
    return max([_LEAST_SECONDS, *(float(run["seconds"]) for run in own)])


def _run_of(plan: Plan, job: Job, outcome: Outcome) -> Run:
    measured = [step for step in outcome.steps if step.step > plan.warm_up]
    speeds = [step.tokens_per_second for step in measured if step.tokens_per_second]
    return {
        "reason": outcome.reason,
        "seconds": outcome.seconds,
        "tokens_per_second_per_gpu": statistics.median(speeds) if speeds else None,
        "by_step": speeds,
        "memory_gib": outcome.memory_gib,
        "losses": outcome.losses,
        "active": outcome.active,
        "trained": _trained(job),
        "command": shlex.join(outcome.command),
    }


def _said(run: Run) -> str:
    said = run["reason"] or f"{run['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU"
    return f"{said} ({run['seconds']:.0f} s)"


def write(plan: Plan, rounds: Sequence[Round]) -> None:
    """Write the measurements, and what they say."""
    content = {
        **plan.settings,
        "cells": list(plan.cells),
        "corpora": [asdict(corpus) for corpus in plan.corpora],
        "rounds": list(rounds),
    }
    write_whole(plan.out / "throughput.json", json.dumps(content, indent=1) + "\n")
    write_whole(plan.out / "throughput.md", render_report(content))


def read(plan: Plan) -> list[Round]:
    """The rounds that are there; ends the program where they were measured otherwise."""
    path = plan.out / "throughput.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    for name, value in plan.settings.items():
        if content[name] != value:
            found = f"{name} {content[name]}, asked for {value}"
            raise SystemExit(f"{path}: measured with {found}; name another folder")
    rounds: list[Round] = content["rounds"]
    return rounds


def main() -> int:
    """Measure; status 1 where not everything could be."""
    plan = read_plan((__doc__ or "").partition("\n")[0])
    rounds = read(plan)
    is_all = measure(plan, rounds)
    write(plan, rounds)
    print((plan.out / "throughput.md").read_text())
    return 0 if is_all else 1


if __name__ == "__main__":
    raise SystemExit(main())
