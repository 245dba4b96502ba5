"""Trains cells side by side on 4 GPUs: which compute the same, and how fast the 16B ones are.

    python -m bench.gpu_numerics OUT [--parts numerics,fault] [--jobs 6] [--seconds 560]
    python -m bench.gpu_numerics OUT --parts numerics,fast --only 'bf16-.*-(recompute|fast)-compile'
    python -m bench.gpu_numerics OUT --parts throughput --steps 12

Each cell is one torchrun of real TorchTitan on all 4 GPUs with the same seed and real routing (the
throughput cells force balance); tiny ones run side by side. After each cell OUT/results.json and
OUT/numerics.md are written anew, and its log is OUT/runs/<cell>/attempt-<k>/train.log. Cells that
OUT/results.json has already are not run again. With fewer GPUs ranks `--share` them, for losses and
no speeds (under CUDA's Multi-Process Service: `bench.shared_gpus`). `--device cpu` tries all of
this out on a machine without GPUs, with the tests' stand-in for DeepEP: small, slow, no result.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.cells import first_gpu, gpu_ids
from bench.gpu_numerics_table import render_report
from bench.numerics_cases import PARTS, RANKS, Case, cell_of
from bench.torchrun import Job
from bench.training import Outcome, train_all
from cookbook.base.files import write_whole
from cookbook.config.cluster import Cluster
from cookbook.config.resolve import this_machine
from cookbook.install.corpus import is_made, make_corpus

# Many processes compile at once; each would take a thread per core.
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}

Result = dict[str, Any]


def job_of(case: Case, machine: Cluster, out: Path, steps: int, shares: bool = False) -> Job:
    """The case as a training on `machine`, with all that it writes below `out`."""
    return Job(
        cell_of(case, machine, out / "assets", steps),
        folder=out / "runs" / case.name,
        caches=out,
        seconds=case.seconds,
        environment=_ENVIRONMENT,
        released=case.released,
        shares=shares,
    )


def run_cases(
    cases: Sequence[Case],
    machine: Cluster,
    out: Path,
    steps: int,
    jobs: int,
    seconds: float,
    shares: bool = False,
) -> list[Result]:
    """Run what has no result yet, `jobs` at a time, until `seconds` have passed."""
    deadline = time.monotonic() + seconds
    results = _kept(out)
    case_of = {
        job_of(case, machine, out, steps, shares): case
        for case in cases
        if case.name not in results
    }

    def note(job: Job, outcome: Outcome) -> None:
        found = results[job.cell.name] = _result(case_of[job], job, outcome)
        print(f"{found['status']:8} {found['wall_s']:6.1f} s {found['name']} {found['reason']}")
        _write(out, list(results.values()), machine)

    not_run = train_all(
        list(case_of),
        note,
        deadline=deadline,
        may_start=lambda job, running: len(running) < jobs,
    )
    for job in not_run:
        results[job.cell.name] = _of_case(case_of[job], job) | {
            "status": "not run",
            "reason": "no time left",
            "losses": [],
            "grad_norms": [],
            "active": None,
        }
    _write(out, list(results.values()), machine)
    return list(results.values())


def _kept(out: Path) -> dict[str, Result]:
    path = out / "results.json"
    kept = json.loads(path.read_text())["cells"] if path.exists() else []
    return {result["name"]: result for result in kept if is_as_expected(result)}


def is_as_expected(result: Result) -> bool:
    """Whether the cell finished, or failed where the released code is known to."""
    return result["status"] == "finished" or bool(
        result["status"] == "failed" and result["expected_to_fail"]
    )


def _of_case(case: Case, job: Job) -> Result:
    return asdict(case) | {"emulated": job.cell.emulated}


def _result(case: Case, job: Job, outcome: Outcome) -> Result:
    later_half = outcome.steps[len(outcome.steps) // 2 :]
    speeds = [step.tokens_per_second for step in later_half if step.tokens_per_second]
    return _of_case(case, job) | {
        "status": "failed" if outcome.reason else "finished",
        "reason": outcome.reason or "",
        "wall_s": outcome.seconds,
        "losses": outcome.losses,
        "grad_norms": [step.grad_norm for step in outcome.steps],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "memory_gib": outcome.memory_gib,
        "active": outcome.active,
        "command": shlex.join(outcome.command),
    }


def _write(out: Path, results: list[Result], machine: Cluster) -> None:
    document = {"device": machine.device, "command": shlex.join(sys.argv)}
    write_whole(out / "results.json", json.dumps(document | {"cells": results}, indent=1) + "\n")
    write_whole(out / "numerics.md", render_report(results, machine.gpu is None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="numerics,fault", help=f"of {','.join(PARTS)}")
    parser.add_argument("--only", default="", help="regular expression of cell names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=6, help="cells at a time; throughput: always 1")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--share", action="store_true", help="one GPU is enough, for all ranks")
    options = parser.parse_args()
    parts = options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--parts {part}: there is no such part; allowed: {', '.join(PARTS)}")
    if options.share and "throughput" in parts:
        parser.error("--share: ranks that share a GPU show no throughput; leave --parts throughput")
    ways = "--device cpu" if options.share else "--share or --device cpu"
    needed = 1 if options.share else RANKS
    gpu = None if options.device == "cpu" else first_gpu(needed, ways)
    out = options.out.resolve()
    if not is_made(out / "assets"):
        make_corpus(out / "assets")
    cases = [case for part in parts for case in PARTS[part]()]
    cases = [case for case in cases if re.search(options.only, case.name)]
    cases = [case for case in cases if gpu or not case.gpu_only]
    jobs = 1 if "throughput" in parts else options.jobs
    machine = this_machine(RANKS, gpu)
    shares = gpu is not None and len(gpu_ids()) < RANKS
    results = run_cases(cases, machine, out, options.steps, jobs, options.seconds, shares)
    print((out / "numerics.md").read_text())
    return 0 if all(map(is_as_expected, results)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
