"""The benchmark of memory, tried out on CPU ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import gpu_memory
from bench.memory_points import POINTS, cell_of, key_of
from bench.torchrun import Job
from bench.training import Outcome
from cookbook.base.gpus import Gpu

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


def test_points_share_the_gpus_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [point for point in POINTS if point.recipe == "deepseek_v3_16b"][:8]
    assert any(point.alone for point in points)
    sizes = [70.0, 50.0, 20.0, 5.0, 5.0, 5.0, 5.0, 200.0]
    beside: list[list[str]] = []

    def train_all(
        jobs: Sequence[Job],
        note: Callable[[Job, Outcome], None],
        may_start: Callable[[Job, Sequence[Job]], bool],
    ) -> None:
        names = {job: key_of(point) for job, point in zip(jobs, points, strict=True)}
        waiting = list(jobs)
        while waiting:
            running: list[Job] = []
            for job in list(waiting):
                if may_start(job, running):
                    waiting.remove(job)
                    running.append(job)
            beside.append([names[job] for job in running])
            for job in running:
                probe = Path(job.environment["MEMORY_PROBE_DIR"])
                for rank, gib in ((0, 40.5), (1, 41.25)):
                    lines = [{"reserved_gib": gib - 1}, {"reserved_gib": gib, "retries": 0}]
                    text = "\n".join(map(json.dumps, lines))
                    (probe / f"{rank}.jsonl").write_text(text)
                error = "out of memory" if job is jobs[1] else None
                note(job, Outcome(error, 12.5, [], None, None, []))

    monkeypatch.setattr(gpu_memory, "train_all", train_all)
    gpu, out = Gpu("NVIDIA H200", 9.0, 139.8), tmp_path / "memory.json"
    cells = [cell_of(point, gpu) for point in points]
    gpu_memory.measure(points, cells, sizes, 131.8, out)
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["gpu"]["name"] == "NVIDIA H200"
    assert content["points"][key_of(points[0])] == {
        "reserved_gib": 41.25,
        "retries": 0,
        "seconds": 12.5,
        "error": None,
    }
    assert content["points"][key_of(points[1])]["error"] == "out of memory"
    size_of = dict(zip(map(key_of, points), sizes, strict=True))
    alone = {key_of(point) for point in points if point.alone}
    assert sorted(name for names in beside for name in names) == sorted(size_of)
    for names in beside:
        assert len(names) == 1 or sum(size_of[name] for name in names) <= 131.8
        assert len(names) == 1 or not alone & set(names)
        assert len(names) <= 3
    # 70 and 50 GiB leave no room for 20, but for 5.
    assert beside[0] == [key_of(points[number]) for number in (0, 1, 3)]
