"""Time the driver against its limits.

    python -m bench.stress.driver [commands|cells|check|queue ...]     # default: all but queue

`commands`: `--help` and `list`, the median of ten. `cells`: 1,000 cells expanded, checked and
rendered. `check`: time and memory of `submit.py check`. `queue`: 100 jobs on a Slurm cluster of 32
nodes started here. Exit with status 1 if one is over its limit.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from cookbook.base.paths import ROOT
from cookbook.config.cluster import load_cluster
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep
from cookbook.launch.script import render_script

SUBMIT = (sys.executable, str(ROOT / "submit.py"))
_B200 = ("--cluster", "soperator-b200")
_CHECKS = (
    (("matrix", *_B200), 40.0),
    (("deepseek_v3_671b", *_B200, "--set", "parallelism.tensor_parallel_degree=4"), 15.0),
    (("debug", "--cluster", "local"), 8.0),
    (("matrix", *_B200, "--rules-only"), 1.0),
)
_CHECK_GIB = 6.0
_MANY = """\
description: many cells
recipes: [deepseek_v3_671b]
precision: [bf16, mxfp8]
ep_backend: [standard, deepep]
baseline: {precision: bf16, ep_backend: standard}
vary:
  training.local_batch_size: [8, 16, 32, 64, 128]
  parallelism.expert_parallel_degree: [4, 8, 16, 32, 64]
  optimizer.lr: [1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4]
"""
_PROFILE = """\
description: one CPU node each
scheduler: slurm
exclusive: false
ranks_per_node: 2
"""
JOBS = 100
_SEEDS = f"""\
description: as many cells as there are seeds
recipes: [debug]
vary: {{debug.seed: {list(range(JOBS))}}}
"""


class Timed(NamedTuple):
    """A measured time with its limit, in seconds; GiB if memory was measured."""

    name: str
    seconds: float
    limit: float
    gib: float = 0.0


def time_commands() -> Iterator[Timed]:
    for word in ("--help", "list"):
        times = []
        for _ in range(10):
            start = time.perf_counter()
            subprocess.run([*SUBMIT, word], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        yield Timed(f"submit.py {word}", statistics.median(times), 0.3)


def time_cells() -> Iterator[Timed]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.yaml"
        path.write_text(_MANY, encoding="utf-8")
        start = time.perf_counter()
        cells = expand_sweep(load_sweep(str(path)), CellRequest(load_cluster("soperator-b200")))
        scripts = {render_script(cell) for cell in cells}
        seconds = time.perf_counter() - start
    assert len(scripts) == len(cells), "two cells have the same script"
    yield Timed(f"{len(cells):,} cells expanded, checked and rendered", seconds, 3.0)


def time_checks() -> Iterator[Timed]:
    for words, limit in _CHECKS:
        start, largest = time.perf_counter(), 0
        quiet = subprocess.DEVNULL
        process = psutil.Popen([*SUBMIT, "check", *words], stdout=quiet, stderr=quiet)
        while process.poll() is None:
            # Shared memory counts once.
            resident = 0
            with suppress(psutil.Error):
                for one in (process, *process.children(recursive=True)):
                    resident += one.memory_full_info().pss
            largest = max(largest, resident)
            time.sleep(0.2)
        seconds = time.perf_counter() - start
        yield Timed(f"check {' '.join(words)}", seconds, limit, largest / 2**30)


def time_queue() -> Iterator[Timed]:
    from tests.slurm_cluster import SlurmCluster

    # Socket names are short, so the folder must be.
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder)
        (path / "profile.yaml").write_text(_PROFILE)
        (path / "seeds.yaml").write_text(_SEEDS)
        with SlurmCluster.start(path / "slurm") as cluster:
            for name in cluster.node_names:
                cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=bench")
            start = time.perf_counter()
            words = ("sweep", path / "seeds.yaml", "--cluster", path / "profile.yaml", "--detach")
            runs = {"COOKBOOK_RUNS": str(path / "runs"), "VENV": sys.prefix}
            cluster.run(*SUBMIT, *map(str, words), env=runs)
            seconds = time.perf_counter() - start
            queued = len(cluster.run("squeue", "--noheader").stdout.splitlines())
    assert queued == JOBS, f"{queued} jobs queued"
    yield Timed(f"{JOBS} jobs queued", seconds, 15.0)


PARTS = {
    "commands": time_commands,
    "cells": time_cells,
    "check": time_checks,
    "queue": time_queue,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    usual = ["commands", "cells", "check"]
    parser.add_argument("parts", nargs="*", choices=PARTS, default=usual)
    over = False
    for part in parser.parse_args().parts:
        for one in PARTS[part]():
            over |= one.seconds > one.limit or one.gib > _CHECK_GIB
            memory = f", {one.gib:.2f} GiB (limit {_CHECK_GIB:g})" if one.gib else ""
            print(f"{one.name}: {one.seconds:.2f} s (limit {one.limit:g}){memory}", flush=True)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
