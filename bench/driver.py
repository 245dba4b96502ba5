"""Times the driver, beside the time that it may take.

    python bench/driver.py            # --help, list, and 1,000 cells expanded, checked and rendered

Each command is a process of its own, as a user would start it; the median of ten is shown. The
cells are those of one sweep: the 671B recipe, two precisions, two EP backends, 250 layouts and
rates.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cookbook.base.paths import ROOT
from cookbook.config.cluster import load_cluster
from cookbook.config.expand import CellRequest, expand_sweep
from cookbook.config.sweep import load_sweep
from cookbook.launch.render import render_script

_COMMANDS = (["--help"], ["list"])
_COMMAND_LIMIT_SECONDS = 0.3
_CELLS_LIMIT_SECONDS = 3.0
_SWEEP = """\
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


def time_command(words: list[str], repeats: int) -> float:
    """Median wall time of `submit.py WORDS`, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "submit.py"), *words],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_cells() -> tuple[int, float]:
    """How many cells, and how long they took from the YAML files to their scripts, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.yaml"
        path.write_text(_SWEEP, encoding="utf-8")
        start = time.perf_counter()
        request = CellRequest(load_cluster("soperator-b200"))
        cells = expand_sweep(load_sweep(str(path)), request)
        scripts = {render_script(cell) for cell in cells}
        seconds = time.perf_counter() - start
    assert len(scripts) == len(cells), "two cells have the same script"
    return len(cells), seconds


def main() -> int:
    """Print the figures; status 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description="time the driver")
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    slow = False
    for words in _COMMANDS:
        seconds = time_command(words, repeats)
        slow |= seconds >= _COMMAND_LIMIT_SECONDS
        print(
            f"submit.py {' '.join(words)}: {seconds:.2f} s "
            f"(median of {repeats}; limit {_COMMAND_LIMIT_SECONDS} s)"
        )
    count, seconds = time_cells()
    slow |= seconds >= _CELLS_LIMIT_SECONDS
    print(
        f"{count:,} cells expanded, checked and rendered: {seconds:.2f} s "
        f"(limit {_CELLS_LIMIT_SECONDS:.0f} s)"
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
