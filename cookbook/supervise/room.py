"""Whether the disk of a cell has room for a checkpoint; a full one hides why a rank failed."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import replace

from cookbook.run.attempts import AttemptEnd, Cause
from cookbook.run.checkpoints import saved_steps
from cookbook.run.folder import CellFolder

# With less than this no log can be written either, so that it can't say what happened.
_FULL_BYTES = 8 << 20


def blame_full_disk(end: AttemptEnd, cell: CellFolder) -> AttemptEnd:
    """The end of a failed attempt, which a disk without any room explains."""
    free = shutil.disk_usage(cell.path).free
    if free >= _FULL_BYTES or end.cause is Cause.DISK_FULL:
        return end
    reason = f"{free >> 20} MiB are free at {cell.path}"
    return replace(end, cause=Cause.DISK_FULL, reason=reason)


def has_room(cell: CellFolder, folder: str) -> bool:
    """Whether a checkpoint of the size of the last one fits.

    Args:
        folder: the name of the checkpoints' folder in the cell's.
    """
    sizes = [
        sum(file.stat().st_size for file in path.iterdir())
        for _, path in saved_steps(cell.path / folder)
    ]
    return shutil.disk_usage(cell.path).free > max([_FULL_BYTES, *sizes])


def say(words: str) -> None:
    """Say something in the job's log, which may be on a full disk."""
    with contextlib.suppress(OSError):
        print(f"cookbook: {words}", file=sys.stderr, flush=True)
