"""Compare gradients and parameters of cells with one rank's, also with known faults put in.

    python -m bench.proofs.gradients OUT [--parts corrected,faults] [--only REGEX] [--jobs 1]
                                         [--share]

The same command runs on 4 GPUs, on fewer that ranks `--share` (`shared_gpus`), else on a CPU
with gloo and the tests' stand-in for DeepEP. Each run is one training by TorchTitan, in float32 but
for what the precision quantizes; on GPUs, cells with DeepEP are in BF16, the only type that it
sends. OUT/results.json is rewritten after each run and its runs are not repeated; OUT/references
holds tensors, 0.1 GB a reference. docs/evidence/numerics/gradients.json is such a file. Exit with
status 1 if a corrected cell differs or a fault is not seen.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench.proofs.gradient_cases import (
    CHANGED_AFTER,
    RANKS,
    Case,
    cell_of,
    corrected_cases,
    fault_cases,
    qwen3_cases,
)
from bench.proofs.gradient_table import Result, is_seen, render, verdict
from cookbook.base.files import write_whole
from cookbook.base.gpus import Gpu, visible_gpus
from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell, train_argv
from cookbook.install.corpus import is_made, make_corpus

PARTS = ("corrected", "faults", "bfloat16", "qwen3")
_LIMIT = 900


class Comparison:
    """Run cases and their references, and keep the results in one file.

    Args:
        gpu: the machine's; None to run on the CPU.
        shares: several ranks share a GPU.
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
        """Run the cases without a result, references first."""
        cases = [case for case in cases if case.name not in self.results]
        # All runs begin with the weights of the first.
        first = dict.fromkeys(case.first for case in cases)
        others = dict.fromkeys(case.reference for case in cases if case.reference not in first)
        for some in (first, others, cases):
            new = [one for one in some if not (one.is_reference and self._tensors(one).exists())]
            with ThreadPoolExecutor(jobs) as pool:
                outcomes = (pool.map if self.gpu else map)(self._train, new)
                for case, (reason, seconds) in zip(new, outcomes, strict=True):
                    self._note(case, reason, seconds)

    def _tensors(self, reference: Case) -> Path:
        return self.out / "references" / f"{reference.name}.pt"

    def _found(self, case: Case) -> Path:
        return self.out / "runs" / case.name / "compared.json"

    def _train(self, case: Case) -> tuple[str | None, float]:
        """Return why the training stopped early, or None, and its seconds."""
        # Even the reference of a float8 cell has TorchAO's experts, not plain ones.
        has_plain_reference = case.precision != "float8"
        compared: dict[str, Any] = {
            "found": str(self._found(case)),
            "step": CHANGED_AFTER,
            "fault": case.fault,
            "exact": case.exact and has_plain_reference and (case.is_reference or not case.rounds),
        }
        if case.is_reference:
            compared["keep"] = str(self._tensors(case))
            compared["weights"] = "" if case == case.first else str(self._tensors(case.first))
            if has_plain_reference:
                compared["experts"] = (case.precision, case.backend)
        else:
            compared["reference"] = str(self._tensors(case.reference))
        cell, folder = cell_of(case, self.gpu, self.out / "assets"), self._found(case).parent
        folder.mkdir(parents=True, exist_ok=True)
        argv = [*train_argv(cell), f"--job.dump_folder={folder}"]
        started = time.monotonic()
        if self.gpu:
            reason = train_by_torchrun(cell, argv, compared, folder, self.shares)
        else:
            reason = train_forked(cell, argv, compared)
        return reason, time.monotonic() - started

    def _note(self, case: Case, reason: str | None, seconds: float) -> None:
        path = self._found(case)
        found = {} if reason else json.loads(path.read_text(encoding="utf-8"))
        result: Result = {
            "name": case.name,
            **asdict(case),
            "reference": "" if case.is_reference else case.reference.name,
            "stopped": reason,
            "losses": [float(f"{loss:.6g}") for loss in found.get("losses", [])],
            "torch": found.get("torch"),
            "choices": found.get("choices", 0),
            "errors": {what: thinned(errors) for what, errors in found.get("errors", {}).items()},
        }
        self.results[case.name] = result
        if case.is_reference and reason:
            sys.exit(f"{case.name}: {reason}")
        device = self.gpu.name if self.gpu else "CPU"
        lines = ",\n".join(json.dumps(run) for run in in_order(self.results.values()))
        write_whole(self.path, f'{{"device": {json.dumps(device)}, "runs": [\n{lines}\n]}}\n')
        print(f"{seconds:6.0f} s  {case.name}: {verdict(result)}", flush=True)


def train_by_torchrun(
    cell: Cell, argv: Sequence[str], compared: Mapping[str, Any], folder: Path, shares: bool
) -> str | None:
    """Train on GPUs; return why the training stopped early, or None."""
    module = "bench.proofs.compared_training"
    modules = ["bench.proofs.shared_gpus", module] if shares else [module]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        **cell.environment,
        "COMPARED": json.dumps(compared),
        "COOKBOOK_ATTEMPT_DIR": str(folder),
    }
    log = folder / "train.log"
    with log.open("wb") as output:
        process = psutil.Popen(
            [*torchrun, f"--nproc-per-node={cell.world}", "-m", *modules, *argv],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(_LIMIT)
        except psutil.TimeoutExpired:
            return f"stopped after {_LIMIT} s"
        finally:
            # Ranks lead sessions of their own: no signal to torchrun's group reaches them.
            for left in process.children(recursive=True) if process.is_running() else []:
                left.kill()
            if process.is_running():
                process.kill()
    errors = re.findall(r"\w*(?:Error|Exception): .*", log.read_text("utf-8", errors="replace"))
    return None if status == 0 else [*errors, f"exit status {status}"][0]


def train_forked(cell: Cell, argv: list[str], compared: dict[str, Any]) -> str | None:
    """Train in CPU ranks forked from a process that has TorchTitan; its import takes longer.

    Returns:
        Why the training stopped early, or None.
    """
    from bench.proofs.compared_training import train_in_rank
    from tests.titan_ranks import run_ranks

    try:
        run_ranks(train_in_rank, cell.world, argv, compared, seconds=_LIMIT)
    except AssertionError as failed:
        return str(failed).strip().splitlines()[-1]
    return None


def in_order(runs: Iterable[Result]) -> list[Result]:
    """Sort into references, corrected cells and faults, each as listed."""
    listed = [case.name for case in (*corrected_cases(), *fault_cases(), *qwen3_cases())]
    place = {name: number for number, name in enumerate(listed)}

    def key(run: Result) -> tuple[bool, int, str]:
        return bool(run["reference"]), place.get(run["name"], len(place)), run["name"]

    return sorted(runs, key=key)


def thinned(errors: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the largest error of each kind of parameter, its ratio of norms, and its layer."""
    kept: dict[str, list[float]] = {}
    for name, (error, ratio) in errors.items():
        layer = re.search(r"^layers\.(\d+)\.", name)
        kind = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        if kind not in kept or error > kept[kind][0]:
            number = [int(layer[1])] if layer else []
            kept[kind] = [float(f"{error:.3g}"), float(f"{ratio:.5g}"), *number]
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on GPUs")
    parser.add_argument("--share", action="store_true", help="one GPU is enough, for all ranks")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: allowed: {', '.join(PARTS)}")
    gpus = visible_gpus()
    gpu = gpus[0] if len(gpus) >= (1 if options.share else RANKS) else None
    # `kill` ends the trainings too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out.resolve()
    if not is_made(out / "assets"):
        make_corpus(out / "assets")
    comparison = Comparison(out, gpu, shares=len(gpus) < RANKS)
    known = fault_cases(version("torch"))
    cases = corrected_cases() if "corrected" in parts else []
    cases += known if "faults" in parts else []
    cases += qwen3_cases() if "qwen3" in parts else []
    if gpu:
        cases = [replace(case, exact=case.exact and case.backend != "deepep") for case in cases]
    elif "bfloat16" in parts:
        # As GPUs compute it.
        cases += [
            replace(case, exact=False)
            for case in (*corrected_cases(), *known)
            if case.backend == "deepep" and not case.rounds and case.variant == "plain"
        ]
    comparison.run([case for case in cases if re.search(options.only, case.name)], options.jobs)
    print(render(json.loads(comparison.path.read_text(encoding="utf-8"))))
    runs = [run for run in comparison.results.values() if run["reference"]]
    return 0 if all(is_seen(run) == bool(run["fault"]) for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
