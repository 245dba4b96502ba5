"""Runs the setup.sh of a copy of this checkout without a network.

The packages of the environment that runs the tests stand in for the index: the Python that setup.sh
is given adds them to each environment that it makes, so that pip finds every pin in place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkout import copy_checkout


@dataclass
class Checkout:
    """A copy of the checkout and the environment that its setup.sh runs in."""

    folder: Path
    python: Path
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *options: str) -> list[str]:
        return [str(self.folder / "setup.sh"), *options]

    def variables(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "HF_", "PYTHON", "CUDA", "TORCH_", "NVSHMEM"))
        }
        kept |= {"PIP_NO_INDEX": "1", "PYTHON": str(self.python), "TERM": "dumb"}
        return kept | self.environment

    def setup(self, *options: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*options),
            cwd="/",
            env=self.variables(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*options),
            env=self.variables(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def exists(self, path: str) -> bool:
        return (self.folder / path).exists()


PYTHON = """#!/bin/sh
# Stands in for the index: environments made with it see the packages of the tests' own, pip too.
if [ "$1 $2" = "-m venv" ]; then
  "{real}" -m venv --without-pip "$3" || exit
  for folder in "$3"/lib/python*/site-packages; do
    echo "{packages}" >"$folder/stand-in.pth"
  done
  if [ -n "$HANG" ]; then
    echo $$ >"$HANG"
    exec sleep 600
  fi
else
  exec "{real}" "$@"
fi
"""


def copy_for_setup(tmp_path: Path) -> Checkout:
    """A copy of the checkout, and a Python that its setup.sh makes environments with."""
    python = tmp_path / "python"
    packages = sysconfig.get_path("purelib")
    python.write_text(PYTHON.format(real=sys.executable, packages=packages))
    python.chmod(0o755)
    return Checkout(copy_checkout(tmp_path / "check out"), python)
