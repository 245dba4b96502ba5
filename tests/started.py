"""Starts a process that others find by its environment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path


def start_marked(seconds: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that sleeps in a session of its own; `/proc` shows its environment by now.

    `Popen` returns a little sooner than that.
    """
    process = subprocess.Popen(["sleep", str(seconds)], env=dict(env), start_new_session=True)
    environment = Path(f"/proc/{process.pid}/environ")
    while b"CELL_DIR=" not in environment.read_bytes():
        time.sleep(0.01)
    return process
