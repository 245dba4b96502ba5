"""Whether somebody still submits the cells of a run: the submitter's mark in the run's folder.

A cell without a job waits for its submitter, or for nobody, where that was killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.run.processes import start_time
from cookbook.run.status import read_json

_FILE = "submitting.json"
# Of a submitter on another machine only the age of its mark is known.
_LONGEST_S = 600.0


def take_submit_lock(folder: Path) -> None:
    """Note that this process submits the cells of the run in `folder`."""
    pid = os.getpid()
    mark = {"host": socket.gethostname(), "pid": pid, "started": start_time(pid)}
    write_whole(folder / _FILE, json.dumps(mark) + "\n")


def release_submit_lock(folder: Path) -> None:
    """Note that all that will be submitted is."""
    (folder / _FILE).unlink(missing_ok=True)


def is_submit_locked(folder: Path) -> bool:
    """Whether the submitter of the run in `folder` is still at it."""
    try:
        mark, age = read_json(folder / _FILE), time.time() - (folder / _FILE).stat().st_mtime
    except (InputError, OSError):
        return False
    if mark.get("host") != socket.gethostname():
        return age < _LONGEST_S
    pid = mark.get("pid")
    return isinstance(pid, int) and start_time(pid) == mark.get("started") is not None
