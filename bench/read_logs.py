"""Times how long collect_results takes to read the logs of a large run.

    python bench/read_logs.py            # 256 ranks x 1,500 steps, the 671B layout at PP 2

    python bench/read_logs.py --steps 18500 --console-only [--failed]     # one log of 1 GB

The logs are made in a temporary folder, as torchrun leaves them: a console log of the first rank of
every node, and a log of each rank. `--all-on-console` puts every rank on the console as well,
`--console-only` there alone. Of a cell that `--failed`, the reason is looked for, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cookbook.results.collect import collect_results
from cookbook.run.run import read_run
from cookbook.run.states import cell_states

_RANKS_PER_NODE = 8
# For so many bytes, as for one log of a gigabyte.
_LIMIT_SECONDS, _LIMIT_BYTES = 10.0, 10**9


def write_run(
    run_dir: Path,
    num_ranks: int,
    num_steps: int,
    all_on_console: bool,
    console_only: bool,
    state: str,
) -> int:
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
    (run_dir / name / "status.json").write_text(json.dumps({"state": state}))
    rng = random.Random(1)
    size = 0
    with contextlib.ExitStack() as files:
        console = files.enter_context((attempt / "train.log").open("wb"))
        own = []
        for rank in range(0 if console_only else num_ranks):
            node, local_rank = divmod(rank, _RANKS_PER_NODE)
            folder = attempt / "ranks" / f"7_0_{node:08x}" / "attempt_0" / str(local_rank)
            folder.mkdir(parents=True)
            own.append(files.enter_context((folder / "stdout.log").open("wb")))
        for step in range(1, num_steps + 1):
            for rank in range(num_ranks):
                line = _line(step, 1 if rank >= num_ranks // 2 else -1, rng)
                if own:
                    size += own[rank].write(line)
                if all_on_console or rank % _RANKS_PER_NODE == 0:
                    size += console.write(b"[rank%d]:" % rank + line)
    return size


def _line(step: int, sign: int, rng: random.Random) -> bytes:
    return (
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
    )


def main() -> int:
    """Print the figures; status 1 where the median is over the limit."""
    parser = argparse.ArgumentParser(description="time the reading of a big run's logs")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--all-on-console", action="store_true")
    parser.add_argument("--console-only", action="store_true")
    parser.add_argument("--failed", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "matrix"
        size = write_run(
            run_dir,
            args.ranks,
            args.steps,
            args.all_on_console or args.console_only,
            args.console_only,
            "failed" if args.failed else "finished",
        )
        times, works = [], []
        run = read_run(run_dir)
        states = cell_states(run)
        for _ in range(args.repeats):
            start, work = time.perf_counter(), time.process_time()
            results = collect_results(run, states)
            times.append(time.perf_counter() - start)
            works.append(time.process_time() - work)
    cell = results.cells[0]
    assert cell.steps == args.steps, cell
    assert cell.tokens_per_second_per_gpu, cell
    assert cell.memory_gib, cell
    median, limit = statistics.median(times), max(3.0, _LIMIT_SECONDS * size / _LIMIT_BYTES)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"{args.ranks} ranks x {args.steps:,} steps, {size / 10**6:,.0f} MB of logs: "
        f"{median:.2f} s "
        f"({statistics.median(works):.2f} s of one core; medians of {args.repeats}; limit "
        f"{limit:.1f} s); at most {peak:,.0f} MiB of memory"
    )
    return 0 if median < limit else 1


if __name__ == "__main__":
    sys.exit(main())
