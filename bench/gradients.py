"""Compares gradients and parameters of cells with those of one rank, also with known faults put in.

    python -m bench.gradients OUT [--parts corrected,faults] [--only REGEX] [--jobs 1] [--share]

The same command on 4 GPUs, or on fewer that ranks `--share` (under CUDA's Multi-Process Service:
`bench.shared_gpus`), with torchrun, and on a CPU, with gloo and the tests' stand-in for DeepEP.
Each run is one training of real TorchTitan, in float32 but for what the precision quantizes; on
GPUs, cells with DeepEP are in BF16, the only type that it sends. OUT/results.json is written anew
after each run, and what it has already is not run again; OUT/references holds tensors, 0.1 GB a
reference. `docs/numerics/gradients.json` is that file. Ends with status 1 where a corrected cell
differs or a fault is not seen.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.gradient_cases import ALONE, CHANGED_AFTER, Case, cell_of, corrected_cases, fault_cases
from bench.gradient_table import GRADIENTS, Result, bounds_of, is_seen, render, verdict
from bench.numerics_cases import RANKS
from bench.torchrun import Job
from bench.training import Outcome, train_all
from cookbook.base.files import write_whole
from cookbook.base.gpus import Gpu, visible_gpus
from cookbook.config.cell import train_argv
from cookbook.install.corpus import is_made, make_corpus

PARTS = ("corrected", "faults", "smallest", "bfloat16")
_LIMIT = 900
FIRST = Case("bf16", "standard", ALONE)
# Any would do.
_SCALED = Case("bf16", "deepep", "tp2-ep4", scale=("layers.1.moe.router.gate.weight", 1.0))


class Comparison:
    """Runs cases and their references, and keeps what is found in one file.

    Args:
        gpu: the machine's; none to run on the CPU.
        shares: a GPU has several ranks.
    """

    def __init__(self, out: Path, gpu: Gpu | None, shares: bool = False) -> None:
        self.out, self.gpu, self.shares = out, gpu, shares
        self.path = out / "results.json"
        self.results: dict[str, Result] = {}
        if self.path.exists():
            kept = json.loads(self.path.read_text(encoding="utf-8"))["runs"]
            self.results = {run["name"]: run for run in kept}
        (out / "references").mkdir(parents=True, exist_ok=True)

    def run(self, cases: Iterable[Case], jobs: int = 1) -> None:
        """Run what has no result yet, references first."""
        cases = [case for case in cases if case.name not in self.results]
        # All runs begin with the weights of the first.
        first = [FIRST] if cases else []
        others = {case.reference: None for case in cases if case.reference != FIRST}
        for some in (first, others, cases):
            of_job = {
                self._job(case): case
                for case in some
                if not (case.is_reference and self._tensors(case).exists())
            }

            def note(job: Job, outcome: Outcome, of_job: dict[Job, Case] = of_job) -> None:
                self._note(of_job[job], outcome)

            if self.gpu:
                train_all(list(of_job), note, may_start=lambda job, running: len(running) < jobs)
            else:
                for job in of_job:
                    note(job, train_forked(job))

    def _tensors(self, reference: Case) -> Path:
        return self.out / "references" / f"{reference.name}.pt"

    def _found(self, case: Case) -> Path:
        return self.out / "runs" / case.name / "compared.json"

    def _job(self, case: Case) -> Job:
        compared: dict[str, Any] = {
            "found": str(self._found(case)),
            "step": CHANGED_AFTER,
            "fault": case.fault,
            "scale": case.scale,
            "exact": case.exact and (case.is_reference or not case.rounds),
        }
        if case.is_reference:
            compared["keep"] = str(self._tensors(case))
            compared["weights"] = "" if case == FIRST else str(self._tensors(FIRST))
            compared["experts"] = (case.precision, case.backend)
        else:
            compared["reference"] = str(self._tensors(case.reference))
        return Job(
            cell_of(case, self.gpu, self.out / "assets"),
            folder=self.out / "runs" / case.name,
            caches=self.out,
            seconds=_LIMIT,
            environment={"COMPARED": json.dumps(compared)},
            module="bench.compared_training",
            shares=self.shares,
        )

    def _note(self, case: Case, outcome: Outcome) -> None:
        path = self._found(case)
        found = {} if outcome.reason else json.loads(path.read_text(encoding="utf-8"))
        result: Result = {
            "name": case.name,
            **{key: value for key, value in asdict(case).items() if key != "torch"},
            "reference": "" if case.is_reference else case.reference.name,
            "stopped": outcome.reason,
            "losses": [float(f"{loss:.6g}") for loss in found.get("losses", outcome.losses)],
            "torch": found.get("torch"),
            "choices": found.get("choices", 0),
            "errors": {what: thinned(errors) for what, errors in found.get("errors", {}).items()},
        }
        self.results[case.name] = result
        if case.is_reference and outcome.reason:
            sys.exit(f"{case.name}: {outcome.reason}")
        device = self.gpu.name if self.gpu else "CPU"
        lines = ",\n".join(json.dumps(run) for run in in_order(self.results.values()))
        write_whole(self.path, f'{{"device": {json.dumps(device)}, "runs": [\n{lines}\n]}}\n')
        print(f"{outcome.seconds:6.0f} s  {case.name}: {verdict(result)}", flush=True)

    def bisect(self, rounds: int = 6) -> None:
        """Scale one gradient by 1 + eps, until the smallest eps that is seen is known to 20%."""
        assert _SCALED.scale is not None
        name, bound = _SCALED.scale[0], bounds_of(asdict(_SCALED))[GRADIENTS]
        low, high = bound / 8, bound * 8
        for _ in range(rounds):
            middle = float(f"{(low * high) ** 0.5:.3g}")
            case = replace(_SCALED, scale=(name, 1 + middle))
            self.run([case])
            low, high = (low, middle) if is_seen(self.results[case.name]) else (middle, high)


def in_order(runs: Iterable[Result]) -> list[Result]:
    """References, then corrected cells, faults and scaled gradients, as they stand in the lists."""
    listed = [case.name for case in (*corrected_cases(), *fault_cases())]
    place = {name: number for number, name in enumerate(listed)}

    def key(run: Result) -> tuple[bool, int, str]:
        return bool(run["reference"]), place.get(run["name"], len(place)), run["name"]

    return sorted(runs, key=key)


def thinned(errors: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The largest error of each kind of parameter, its ratio of norms, and the layer it is in."""
    kept: dict[str, list[float]] = {}
    for name, (error, ratio) in errors.items():
        layer = re.search(r"^layers\.(\d+)\.", name)
        kind = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        if kind not in kept or error > kept[kind][0]:
            number = [int(layer[1])] if layer else []
            kept[kind] = [float(f"{error:.3g}"), float(f"{ratio:.5g}"), *number]
    return kept


def train_forked(job: Job) -> Outcome:
    """Train in CPU ranks, forked from a process that has imported TorchTitan once.

    That import takes longer than these trainings.
    """
    from bench.compared_training import train_in_rank
    from tests.titan_ranks import run_ranks

    job.folder.mkdir(parents=True, exist_ok=True)
    argv = [*train_argv(job.cell), f"--job.dump_folder={job.folder}"]
    compared = json.loads(job.environment["COMPARED"])
    started, reason = time.monotonic(), None
    try:
        run_ranks(train_in_rank, job.cell.world, argv, compared, seconds=job.seconds)
    except AssertionError as failed:
        reason = str(failed).strip().splitlines()[-1]
    return Outcome(reason, time.monotonic() - started, [], None, None, argv)


def is_torch(wanted: str) -> bool:
    """Whether the installed torch has this beginning of a version."""
    return version("torch").startswith(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on GPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="GPUs where enough are here")
    parser.add_argument("--share", action="store_true", help="one GPU is enough, for all ranks")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: allowed: {', '.join(PARTS)}")
    gpus = [] if options.device == "cpu" else visible_gpus()
    needed = 1 if options.share else RANKS
    if options.device == "cuda" and len(gpus) < needed:
        ways = "--device cpu" if options.share else "--share or --device cpu"
        parser.error(f"{needed} GPUs are needed, found {len(gpus)}; try {ways}")
    gpu = gpus[0] if len(gpus) >= needed else None
    out = options.out.resolve()
    if not is_made(out / "assets"):
        make_corpus(out / "assets")
    comparison = Comparison(out, gpu, shares=len(gpus) < RANKS)
    known = [case for case in fault_cases() if not case.torch or is_torch(case.torch)]
    cases = corrected_cases() if "corrected" in parts else []
    cases += known if "faults" in parts else []
    as_on_gpus = [
        replace(case, exact=False)
        for case in (*corrected_cases(), *known)
        if case.backend == "deepep" and not case.rounds and case.variant == "plain"
    ]
    if gpu:
        # DeepEP sends BF16 and nothing else.
        cases = [replace(case, exact=case.backend != "deepep") for case in cases]
    elif "bfloat16" in parts:
        cases += as_on_gpus
    comparison.run([case for case in cases if re.search(options.only, case.name)], options.jobs)
    if "smallest" in parts:
        comparison.bisect()
    print(render(json.loads(comparison.path.read_text(encoding="utf-8"))))
    runs = [run for run in comparison.results.values() if run["reference"] and not run["scale"]]
    return 0 if all(is_seen(run) == bool(run["fault"]) for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
