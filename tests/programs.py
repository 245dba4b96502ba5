"""Programs that stand in for others."""

import sys
from pathlib import Path

# Of a virtual environment: the tests' own Python.
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def write_program(path: Path, text: str) -> None:
    """Write an executable file, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)
