"""A rank that makes no step leaves its stacks and its flight recorder's trace."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.observe.stacks import describe_stacks
from cookbook.run.folder import Attempt
from tests.submit import ROOT

pytestmark = pytest.mark.titan

_STALL = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from cookbook.titan.common import stall
stall.STEPS, stall.MORE_S = 2.0, 1.0
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
attempt = Path(sys.argv[1])
trace = attempt / "comm_traces" / "rank_0"
alarm = stall.StallAlarm(attempt, attempt / "comm_traces" / "rank_", 0)

def stands_still():
    dist.all_reduce(torch.ones(1))
    time.sleep(float(sys.argv[2]))
    # On a busy machine the first trace takes seconds.
    deadline = time.monotonic() + 30
    while sys.argv[3] == "-" and time.monotonic() < deadline and not trace.exists():
        time.sleep(0.1)

for step in range(6):
    time.sleep(0.2)
    alarm.step()
stands_still()
if sys.argv[3] == "goes on":
    alarm.step()
if sys.argv[3] == "ends":
    alarm.end()
    time.sleep(2)
stacks = attempt / "stacks" / "rank-0.txt"
print(len(stacks.read_text()) if stacks.exists() else 0)
os._exit(0)
"""


def _stall(attempt: Path, seconds: float, then: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _STALL, str(attempt), str(seconds), then],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_rank_that_stands_still_says_where(tmp_path: Path) -> None:
    assert _stall(tmp_path, 4, "-") > 0
    assert "stands_still (<string>" in (describe_stacks(Attempt(tmp_path, 0), 1) or "")
    recorded: dict[str, Any] = pickle.loads((tmp_path / "comm_traces" / "rank_0").read_bytes())
    assert "all_reduce" in recorded["entries"][-1]["profiling_name"]


@pytest.mark.parametrize(("seconds", "then"), [(4, "goes on"), (0.1, "ends")])
def test_one_that_goes_on_or_has_ended_leaves_no_stack(
    tmp_path: Path, seconds: float, then: str
) -> None:
    assert _stall(tmp_path, seconds, then) == 0
    # Nor an empty file for each rank.
    assert (tmp_path / "stacks").exists() is (then == "goes on")


@pytest.fixture
def on_a_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[float], Callable[[int], Any]]]:
    """The time, which the test sets, and what makes a rank's alarm, which ends with the test."""
    from cookbook.titan.common import stall

    now = [0.0]
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(stall, "_LOOK_S", 0.01)
    monkeypatch.setattr(stall, "recorded_collectives", lambda: b"trace")
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    with ExitStack() as ends:

        def alarm(rank: int) -> Any:
            made = stall.StallAlarm(tmp_path, tmp_path / "rank_", rank)
            ends.callback(made.end)
            return made

        yield now, alarm
    for thread in looking():
        thread.join(timeout=5)


def looking() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "stall alarm"]


def test_collectives_are_recorded_once_where_no_step_comes(
    tmp_path: Path, on_a_clock: tuple[list[float], Callable[[int], Any]]
) -> None:
    now, alarm = on_a_clock
    ended, stalled = alarm(0), alarm(1)
    for _ in range(6):
        now[0] += 10.0
        ended.step()
        stalled.step()
    ended.end()
    now[0] += 47.0
    # 48 s have not passed.
    time.sleep(0.2)
    assert not list(tmp_path.glob("rank_*"))
    now[0] += 2.0
    deadline = time.monotonic() + 30
    while not (tmp_path / "rank_1").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "rank_1").unlink()
    time.sleep(0.2)
    assert not list(tmp_path.glob("rank_*"))
    stalled.end()
    # Nothing is left that looks.
    while looking():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_alarm_is_set_by_usual_steps(
    on_a_clock: tuple[list[float], Callable[[int], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the first one, which compiles, nor by one that has saved."""
    (now, alarm_of), alarms = on_a_clock, []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, file: alarms.append(seconds)
    )
    alarm = alarm_of(0)
    for seconds in (100.0, 60.0, 5.0, 5.0, 90.0, 5.0):
        now[0] += seconds
        alarm.step()
    # Three steps must be known; then four usual steps, and 8 s.
    assert alarms == [28.0, 4 * 32.5 + 8.0, 28.0]


_ORPHAN = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "torchrun":
    rank = subprocess.Popen([sys.executable, "-c", os.environ["PROGRAM"], "rank"])
    print(rank.pid, flush=True)
    time.sleep(60)
from cookbook.titan.common.orphan import die_with_parent
die_with_parent()
# As a rank that hangs in a kernel does.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_ranks", [True, False])
def test_a_rank_ends_with_its_torchrun(is_ranks: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM": _ORPHAN}
    if is_ranks:
        environment["TORCHELASTIC_RUN_ID"] = "1"
    torchrun = subprocess.Popen(
        [sys.executable, "-c", _ORPHAN, "torchrun"],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert torchrun.stdout is not None
    rank = int(torchrun.stdout.readline())
    assert torchrun.stdout.readline() == "ready\n"
    torchrun.kill()
    torchrun.wait()
    deadline = time.monotonic() + (10 if is_ranks else 1)
    while _lives(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _lives(rank) == (not is_ranks)
    if not is_ranks:
        os.kill(rank, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_steps_that_are_not_logged_are_told_once_in_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor takes a silent log for a hang, until it knows how long a step takes."""
    from cookbook.titan.tt_0_2_2 import metrics

    now = [5000.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(metrics, "metrics_rank", lambda *_: 0)
    ranks = iter([0] * 6 + [1] * 6)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: next(ranks))
    monkeypatch.delenv("COOKBOOK_ATTEMPT_DIR", raising=False)
    caplog.set_level("INFO")
    for _ in range(2):
        report: Any = metrics.CookbookMetrics.__new__(metrics.CookbookMetrics)
        options = {"training": SimpleNamespace(steps=900), "comm": None}
        report.job_config = SimpleNamespace(metrics=SimpleNamespace(log_freq=10), **options)
        report.parallel_dims, report.reported = None, True
        for step in range(13, 32):
            now[0] += 25
            assert report.should_log(step) is (step in (20, 30))
    told = [13, 16, 19, 23, 26, 29]
    said = [f"cookbook: made step {step}, which is not logged" for step in told]
    assert [record.getMessage() for record in caplog.records] == said
