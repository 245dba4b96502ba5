"""How the benchmarks train a cell: its words and variables, its end, and what is read of it.

A short script stands in for torchrun; `test_gpu_throughput.py` and `test_gpu_memory.py` start the
real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import training
from bench.cells import gpu_ids
from bench.torchrun import Job, environment_of, released_argv, torchrun_command
from bench.training import Outcome, train_all, train_one
from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.config.resolve import cell_on, this_machine
from cookbook.config.stack import load_stack
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from tests.titan_config import parse

H200 = Gpu("NVIDIA H200", 9.0, 139.8)
PP2 = {"parallelism.pipeline_parallel_degree": 2}


def job(folder: Path, name: str = "a", **changes: Any) -> Job:
    """The debug model for three steps on two CPU ranks."""
    options = {"training.steps": 3, **changes.pop("options", {})}
    backend = changes.pop("ep_backend", "standard")
    cell = cell_on(this_machine(2, None), "debug", "bf16", backend, options, name)
    return Job(cell, folder / name, folder / "caches", **changes)


# What every stand-in may use.
_PRELUDE = """
import json, os, signal, subprocess, sys, time
attempt = os.environ["COOKBOOK_ATTEMPT_DIR"]

def step(number, rank=0, loss=2.0, memory=1.5):
    now = time.strftime("%Y-%m-%d %H:%M:%S,000")
    print(f"[rank{rank}]:[titan] {now} - root - INFO - step:  {number}  loss: {loss}  "
          f"grad_norm: 1.0  memory: {memory}GiB(1.0%)  tps: 1,234  tflops: 1.00  mfu: 1.00%",
          flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make `script` what a job starts in place of torchrun."""
    monkeypatch.setattr(training, "_GRACE_SECONDS", 1)

    def start(script: str) -> None:
        command = [sys.executable, "-c", _PRELUDE + script]
        monkeypatch.setattr(training, "torchrun_command", lambda *_: command)

    return start


def running_with(text: str) -> list[psutil.Process]:
    """Processes with `text` on their command line, this one aside."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        is_dead = process.info["status"] == psutil.STATUS_ZOMBIE
        if process.pid != os.getpid() and not is_dead and any(text in word for word in words):
            found.append(process)
    return found


def test_what_a_training_did_is_read_from_its_log(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in(
        'print(\'[rank1]:[titan] - root - INFO - cookbook active: {"dispatch": "standard"}\')\n'
        "for number in (1, 2, 3):\n"
        "    step(number, rank=0, loss=-1.0)\n"
        "    step(number, rank=1, loss=3.0 - number)\n"
        "    time.sleep(2 * (number < 3))\n"
        "folder = attempt + '/ranks/x/attempt_0/0'\n"
        "os.makedirs(folder)\n"
        "sys.stdout = open(folder + '/stdout.log', 'w')\n"
        "step(2, memory=7.25)\n"
    )
    asked = job(tmp_path, options=PP2)
    outcome = train_one(asked)
    assert outcome.reason is None
    # Both are logged by the second, so one may be missing.
    assert outcome.start_seconds and 1 <= outcome.start_seconds < outcome.seconds - 1
    # With two stages on two ranks the second has the loss; the most memory may be another's.
    assert outcome.losses == [2.0, 1.0, 0.0]
    assert outcome.memory_gib == 7.25
    assert outcome.active == {"dispatch": "standard"}
    folder = CellFolder(asked.folder)
    assert read_record(folder.record).options["training.steps"] == 3
    assert [attempt.number for attempt in folder.attempts()] == [0]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit(3)", "exit status 3"),
        ("step(1)", "its log has 1 of 3 steps"),
        ("step(1)\nraise RuntimeError('no room left')", "RuntimeError: no room left"),
    ],
)
def test_a_training_that_fails_says_why(
    tmp_path: Path, stand_in: Callable[[str], None], script: str, reason: str
) -> None:
    stand_in(script)
    assert train_one(job(tmp_path)).reason == reason
    # What the first attempt left is not taken for the second's.
    stand_in("pass")
    again = train_one(job(tmp_path))
    assert (again.reason, again.losses) == ("its log has 0 of 3 steps", [])


# A torchrun that does not end when it is told to, and a worker with a session of its own.
_WORKER = """
worker = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(300)", attempt], start_new_session=True
)
"""


def test_one_that_hangs_is_ended_with_its_workers(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _WORKER + "time.sleep(300)")
    outcome = train_one(job(tmp_path, seconds=2))
    # Not one that slept to its end, which says nothing of being stopped.
    assert outcome.reason == "stopped after 2 s"
    assert 2 <= outcome.seconds < 300
    assert not running_with(str(tmp_path))


def test_workers_that_outlive_torchrun_are_ended(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in(_WORKER + "os.kill(os.getpid(), signal.SIGKILL)")
    assert train_one(job(tmp_path)).reason == "exit status -9"
    assert not running_with(str(tmp_path))


def test_only_its_own_processes_are_ended(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(_WORKER + "time.sleep(2)")
    ended: list[str] = []
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(tmp_path)])
    try:
        train_all(
            [job(tmp_path, "short", seconds=0.5), job(tmp_path, "long")],
            lambda job, outcome: ended.append(f"{job.cell.name} {str(outcome.reason)[:7]}"),
            may_start=lambda job, running: True,
        )
        assert ended == ["short stopped", "long its log"]
        assert [process.pid for process in running_with(str(tmp_path))] == [other.pid]
    finally:
        other.kill()
        other.wait()


def test_the_deadline_ends_what_runs_and_starts_nothing_more(
    tmp_path: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in("step(1)\ntime.sleep(300)")
    outcomes: list[Outcome] = []
    jobs = [job(tmp_path, name) for name in "abc"]
    left = train_all(
        jobs,
        lambda job, outcome: outcomes.append(outcome),
        deadline=time.monotonic() + 3,
        least=0,
        may_start=lambda job, running: len(running) < 2,
    )
    assert left == jobs[2:]
    assert [outcome.losses for outcome in outcomes] == [[2.0], [2.0]]
    assert all(outcome.reason and "stopped" in outcome.reason for outcome in outcomes)
    # With less time left than is worth it, none is started.
    assert train_all(jobs, lambda *_: None, deadline=time.monotonic() + 5) == jobs


def test_what_runs_is_ended_once_enough_was_seen(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_LOOK_SECONDS", 0.1)
    stand_in("for number in range(1, 300):\n    step(number)\n    time.sleep(0.2)")
    seen: list[int] = []
    outcomes: list[Outcome] = []
    train_all(
        [job(tmp_path)],
        lambda job, outcome: outcomes.append(outcome),
        look=lambda job, steps: seen.append(len(steps)),
        enough=lambda: max(seen, default=0) >= 5,
    )
    (outcome,) = outcomes
    assert outcome.reason and outcome.reason.startswith("stopped")
    assert 5 <= len(outcome.steps) < 100
    assert not running_with(str(tmp_path))


@pytest.mark.parametrize("sent", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM] * 2])
def test_an_interrupted_benchmark_leaves_nothing_behind(
    tmp_path: Path, sent: list[signal.Signals]
) -> None:
    script = f"""
import sys
from pathlib import Path
from bench import training
from tests.test_gpu_training import _PRELUDE, _WORKER, job
command = [sys.executable, "-c", _PRELUDE + _WORKER + "time.sleep(300)"]
training.torchrun_command = lambda *_: command
folder = Path({str(tmp_path)!r})
training.train_all([job(folder, name) for name in "ab"], print, may_start=lambda *_: True)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    benchmark = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 60
    folders = [str(tmp_path / name / "attempt-0") for name in "ab"]
    while not all(map(running_with, folders)):
        assert benchmark.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    for one in sent:
        benchmark.send_signal(one)
        # A worker takes a moment to end: the second signal comes meanwhile.
        time.sleep(0.1)
    assert benchmark.wait(30) != 0
    assert not running_with(str(tmp_path))
    assert not list(tmp_path.glob("bench-*")), "its temporary folders are gone"


def test_the_variables_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", "/elsewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cell = cell_on(this_machine(4, H200), "debug", "bf16", "deepep", PP2)
    one = Job(cell, tmp_path / "one", tmp_path, environment={"MINE": "1"})
    two = Job(cell, tmp_path / "two", tmp_path)
    found, other = (
        environment_of(each, CellFolder(each.folder).next_attempt()) for each in (one, two)
    )
    assert found["COOKBOOK_ATTEMPT_DIR"] == str(tmp_path / "one" / "attempt-0")
    assert found["LOG_RANK"] == "2"
    assert (found["OMP_NUM_THREADS"], found["HF_HUB_OFFLINE"]) == ("1", "1")
    # The overlay's own, and the benchmark's.
    assert found["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    assert found["MINE"] == "1"
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_DATASETS_CACHE")
    for cache in (*caches, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        assert found[cache] == other[cache]
        assert found[cache].startswith(str(tmp_path))
    assert str(ROOT / "tests" / "stand_in") not in found["PYTHONPATH"]
    on_cpu = job(tmp_path, ep_backend="deepep")
    variables = environment_of(on_cpu, CellFolder(on_cpu.folder).next_attempt())
    assert str(ROOT / "tests" / "stand_in") in variables["PYTHONPATH"].split(os.pathsep)
    assert variables["CUDA_VISIBLE_DEVICES"] == ""


def test_torchrun_shows_the_rank_with_the_loss(tmp_path: Path) -> None:
    cell = cell_on(this_machine(4, H200), "debug", "bf16", "standard", PP2)
    one = Job(cell, tmp_path, tmp_path)
    command = torchrun_command(one, CellFolder(tmp_path).next_attempt())
    assert {"--nproc-per-node=4", "--local-ranks-filter=2"} <= set(command)
    assert command[-1] == f"--job.dump_folder={tmp_path / 'attempt-0'}"
    assert "--cookbook.dispatch=standard" in command


@pytest.mark.titan
def test_the_released_titan_lacks_just_what_is_left_out() -> None:
    machine = this_machine(4, H200)
    names = set(load_stack().options)
    cell = cell_on(machine, "debug", "bf16", "standard", {n: _default(n) for n in names})
    kept = {word[2:].partition("=")[0].replace(".no_", ".") for word in released_argv(cell)}
    # Of these, a list without items has no words.
    empty = {name for name in names if _default(name) == []}
    lost = names - set(parse([]))
    assert names - kept - empty == lost - empty | {"quantize.grouped_mm.mx.recipe_name"}


def _default(name: str) -> Any:
    return load_stack().options[name].default


def test_the_released_titan_cannot_be_asked_for_what_it_lacks() -> None:
    machine = this_machine(4, H200)
    for precision, backend in (("mxfp8", "standard"), ("bf16", "mxfp8_a2a")):
        cell = cell_on(machine, "debug", precision, backend, {})
        with pytest.raises(ValueError, match="does not exist"):
            released_argv(cell)


def test_gpus_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cells.visible_gpus", lambda: (H200, H200))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_ids() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert gpu_ids() == ["2", "3"]
