"""Times `submit.py check` and measures its memory, against its targets.

python bench/check.py        # 671B matrix of 4 cells; then one option changed; then the debug model
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
_CLUSTER = ["--cluster", "soperator-b200"]
_CHANGED = ["--set", "parallelism.tensor_parallel_degree=4"]
# What is run, its limit in seconds and in GiB of all its processes together.
CASES = (
    ("671B matrix, 4 cells", ["matrix", *_CLUSTER], 40.0, 6.0),
    ("671B, one option changed", ["deepseek_v3_671b", *_CLUSTER, *_CHANGED], 15.0, 6.0),
    ("debug model on this machine", ["debug", "--cluster", "local"], 8.0, 6.0),
    ("matrix by the rules alone", ["matrix", *_CLUSTER, "--rules-only"], 1.0, 0.5),
)


def _resident_gib(pid: int) -> float:
    """Proportional memory of a process and its descendants: what they share counts once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total / 2**30


def run_case(words: list[str]) -> tuple[float, float]:
    """Seconds, and the largest GiB that was seen."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "submit.py"), "check", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    largest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.2):
            largest = max(largest, _resident_gib(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    done.set()
    watcher.join()
    return time.perf_counter() - begin, largest


def main() -> int:
    """Print a line a case; status 1 where one is over its limit."""
    over = False
    for name, words, limit_s, limit_gib in CASES:
        seconds, gib = run_case(words)
        over = over or seconds > limit_s or gib > limit_gib
        print(f"{name}: {seconds:.1f} s (limit {limit_s:.0f}), {gib:.2f} GiB (limit {limit_gib:g})")
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU time of all: {cpu.ru_utime + cpu.ru_stime:.0f} s")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
