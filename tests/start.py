"""Starts commands as a user would, and returns how they end."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.submit import ROOT, environment


def start(
    command: list[str], folder: Path, variables: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `command`; runs go to `folder`, and no environment is started again into."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(folder / "runs", **{"VENV": str(folder / "none"), **(variables or {})}),
        capture_output=True,
        timeout=300,
    )
    return subprocess.CompletedProcess(
        command, done.returncode, done.stdout.decode(), done.stderr.decode()
    )
