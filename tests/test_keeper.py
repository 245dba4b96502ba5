"""A supervisor that is killed is started again; its signals and its exit status are its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.submit import ROOT

_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from cookbook.supervise.keeper import keep
folder = Path(sys.argv[1])

def work():
    starts = len(list(folder.glob("start-*")))
    (folder / f"start-{starts}").write_text(str(os.getpid()))
    if sys.argv[2] == "dies" or (sys.argv[2] == "dies once" and not starts):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "is stopped":
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[2] == "fails":
        raise ValueError("no")
    if sys.argv[2] == "waits":
        time.sleep(60)

def handle_signals():
    (folder / "born").touch()
    time.sleep(float(sys.argv[3]))
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(7))

keep(work, handle_signals)
"""


def _start(folder: Path, how: str, seconds: float = 0.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder), how, str(seconds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("how", "status", "starts"),
    [
        ("ends", 0, 1),
        ("fails", 1, 1),
        # Whoever tells it to end means it.
        ("is stopped", 128 + signal.SIGTERM, 1),
        ("dies once", 0, 2),
        ("dies", 128 + signal.SIGKILL, 5),
    ],
)
def test_only_what_was_killed_is_started_again(
    tmp_path: Path, how: str, status: int, starts: int
) -> None:
    keeper = _start(tmp_path, how)
    _, said = keeper.communicate(timeout=30)
    assert keeper.returncode == status
    assert len(list(tmp_path.glob("start-*"))) == starts
    assert said.count("the supervisor was killed") == starts - 1
    assert ("ValueError: no" in said) == (how == "fails")


@pytest.mark.parametrize(("sign", "seconds"), [("start-0", 0.0), ("born", 1.0)])
def test_a_signal_is_handed_on_also_before_the_child_can_handle_it(
    tmp_path: Path, sign: str, seconds: float
) -> None:
    keeper = _start(tmp_path, "waits", seconds)
    deadline = time.monotonic() + 20
    while not (tmp_path / sign).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    keeper.send_signal(signal.SIGUSR1)
    keeper.communicate(timeout=10)
    assert keeper.returncode == 7
