"""Times how long collect_results takes to read the logs of a large run.

    python bench/read_logs.py            # 256 ranks x 1,500 steps, the 671B layout at PP 2

The logs are made in a temporary folder, as torchrun leaves them: a console log of the first rank of
every node, and a log of each rank. `--all-on-console` puts every rank on the console instead.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cookbook.results.collect import collect_results
from cookbook.run.run import read_run
from cookbook.run.states import cell_states

_RANKS_PER_NODE = 8
_LIMIT_SECONDS = 3.0


def write_run(run_dir: Path, num_ranks: int, num_steps: int, all_on_console: bool) -> int:
    """Write a run of one cell and return its logs' size in bytes."""
    name = "671b-bf16-standard"
    num_nodes = num_ranks // _RANKS_PER_NODE
    attempt = run_dir / name / "attempt-1"
    attempt.mkdir(parents=True)
    run = {
        "run": run_dir.name,
        "scheduler": "local",
        "sweep": "matrix",
        "baseline": name,
        "cells": [name],
    }
    (run_dir / "run.json").write_text(json.dumps(run))
    cell = {
        "name": name,
        "recipe": "deepseek_v3_671b",
        "nodes": num_nodes,
        "ranks_per_node": _RANKS_PER_NODE,
        "device": "cuda",
        "options": {
            "training.steps": num_steps,
            "parallelism.pipeline_parallel_degree": 2,
        },
    }
    # JSON is YAML.
    (run_dir / name / "cell.yaml").write_text(json.dumps(cell))
    (run_dir / name / "status.json").write_text(json.dumps({"state": "finished"}))
    lines = [_lines(rank, num_ranks, num_steps) for rank in range(num_ranks)]
    size = 0
    for rank, own in enumerate(lines):
        node, local_rank = divmod(rank, _RANKS_PER_NODE)
        folder = attempt / "ranks" / f"7_0_{node:08x}" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True)
        size += (folder / "stdout.log").write_bytes(b"".join(own))
    shown = range(0, num_ranks, 1 if all_on_console else _RANKS_PER_NODE)
    with (attempt / "train.log").open("wb") as console:
        for step in range(num_steps):
            size += sum(console.write(b"[rank%d]:" % rank + lines[rank][step]) for rank in shown)
    return size


def _lines(rank: int, num_ranks: int, num_steps: int) -> list[bytes]:
    rng = random.Random(rank)
    sign = 1 if rank >= num_ranks // 2 else -1
    return [
        b"[titan] 2026-11-20 18:29:22,279 - root - INFO - \x1b[31mstep: %2d  "
        b"\x1b[32mloss: %8.5f  \x1b[38;2;180;60;0mgrad_norm: %7.4f  "
        b"\x1b[36mmemory: %5.2fGiB(%.2f%%)  \x1b[34mtps: %d  \x1b[36mtflops: %.2f  "
        b"\x1b[35mmfu: %.2f%%\x1b[39m\n"
        % (
            step,
            sign * (2 + 9 / step),
            rng.random(),
            rng.uniform(140, 150),
            rng.uniform(78, 84),
            rng.randint(600, 700),
            rng.uniform(170, 190),
            rng.uniform(7, 9),
        )
        for step in range(1, num_steps + 1)
    ]


def main() -> int:
    """Print the figures; status 1 where the median is over the limit."""
    parser = argparse.ArgumentParser(description="time the reading of a big run's logs")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--all-on-console", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "matrix"
        size = write_run(run_dir, args.ranks, args.steps, args.all_on_console)
        times = []
        run = read_run(run_dir)
        states = cell_states(run)
        for _ in range(args.repeats):
            start = time.perf_counter()
            results = collect_results(run, states)
            times.append(time.perf_counter() - start)
    cell = results.cells[0]
    assert cell.steps == args.steps, cell
    assert cell.tokens_per_second_per_gpu, cell
    assert cell.memory_gib, cell
    median = sorted(times)[len(times) // 2]
    print(
        f"{args.ranks} ranks x {args.steps:,} steps, {size / 2**20:.0f} MiB of logs: "
        f"{median:.2f} s (median of {args.repeats}; limit {_LIMIT_SECONDS:.0f} s)"
    )
    return 0 if median < _LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
