"""Programs that stand in for others."""

import sys
from dataclasses import replace
from pathlib import Path

from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record

# Of a virtual environment: the tests' own Python.
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def write_program(path: Path, text: str) -> None:
    """Write an executable file, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def set_command(cell: CellFolder, text: str) -> None:
    """Have the cell's attempts run this bash, in place of torchrun."""
    replace(read_record(cell.record), command=text).write(cell.record)
