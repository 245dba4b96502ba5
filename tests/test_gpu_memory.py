"""The benchmark of memory, tried out on CPU ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.titan

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "bench.gpu_memory"]


def processes_with(name: str, value: str) -> set[int]:
    """The processes that were started with this beginning of a value in their environment."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name, "").startswith(value):
                found.add(process.pid)
    return found


def test_an_interrupted_one_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [*COMMAND, "--cpu", "--only", "none", "-o", str(tmp_path / "memory.json")]
    log = tmp_path / "log"
    with log.open("w") as errors:
        bench = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors)
    # torchrun and its workers, which lead sessions of their own.
    mark = ("MEMORY_PROBE_DIR", str(tmp_path))
    deadline = time.monotonic() + 120
    while len(processes_with(*mark)) < 3:
        assert bench.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    bench.send_signal(signal.SIGINT)
    assert bench.wait(90) != 0
    assert not processes_with(*mark)
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "memory.json"}


def test_points_that_do_not_exist_are_refused() -> None:
    answer = subprocess.run(
        [*COMMAND, "--only", "17B"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 2
    assert "--only 17B: no point has this in its name" in answer.stderr
