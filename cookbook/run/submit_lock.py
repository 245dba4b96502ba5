"""The lock that a submitter holds on a run, from its look at the cells to its note of the jobs.

The kernel frees it when the submitter ends, however it ends: a cell without a job then waits for
nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from cookbook.base.errors import InputError

_FILE = "submit.lock"
_held: dict[tuple[int, int], int] = {}


def take_submit_lock(folder: Path) -> None:
    """Keep others from submitting cells of the run in `folder`; a second call changes nothing."""
    path = folder / _FILE
    if path.exists() and _key(path.stat()) in _held:
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 1000).decode(errors="replace").strip()
        os.close(handle)
        raise InputError(
            folder.name, f"{holder or 'another process'} submits its cells", "wait until it has"
        ) from None
    except OSError as error:
        # Some file systems have no locks; Lustre without the option `flock` says ENOSYS.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held[_key(os.fstat(handle))] = handle


def release_submit_lock(folder: Path) -> None:
    """Let others submit cells of the run, which may have been renamed meanwhile."""
    path = folder / _FILE
    handle = _held.pop(_key(path.stat()), None) if path.exists() else None
    if handle is not None:
        os.ftruncate(handle, 0)
        os.close(handle)


def is_submit_locked(folder: Path) -> bool:
    """Whether somebody, maybe this process, submits cells of the run."""
    try:
        with (folder / _FILE).open("rb") as file:
            state = os.fstat(file.fileno())
            if _key(state) in _held:
                return True
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return False
    except OSError:
        return False
    return False


def _key(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino
