"""Starts processes, and looks for them."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cookbook.base.paths import ROOT
from tests.waiting import HANG_S


def start_marked(seconds: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that sleeps in a session of its own; `/proc` shows its environment by now.

    `Popen` returns a little sooner than that.
    """
    process = subprocess.Popen(["sleep", str(seconds)], env=dict(env), start_new_session=True)
    environment = Path(f"/proc/{process.pid}/environ")
    while b"CELL_DIR=" not in environment.read_bytes():
        time.sleep(0.01)
    return process


def lives(pid: int) -> bool:
    """Whether a process runs; neither a zombie nor gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def python(
    *words: str,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python of this environment that finds the checkout."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), **(variables or {})},
        input=input,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
