"""Find and record runs: a run is one execution of a sweep or a cell, in a folder below `runs/`."""

import contextlib
import errno
import fcntl
import getpass
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.paths import CHECKOUT, CODE, ROOT, runs_folder
from cookbook.base.yamlfile import shown_path
from cookbook.run.folder import CellFolder
from cookbook.run.status import read_json_as, write_json

_FILE = "run.json"
# Of the code that runs: what a run carries of it, so that its jobs run no later code. submitit's
# RsyncSnapshot would need git and rsync, and leave out files that are not committed.
_PARTS = ("cookbook", "templates", "requirements.txt")


@dataclass(frozen=True)
class RunRecord:
    """`run.json`: the request, who made it, and the commit and cluster it uses."""

    scheduler: Literal["slurm", "local"]
    cells: tuple[str, ...]
    run: str = ""
    sweep: str | None = None
    created: str | None = None
    user: str | None = None
    commit: str | None = None
    cluster: str | None = None
    stack: str | None = None
    command: tuple[str, ...] = ()
    baseline: str | None = None


@dataclass(frozen=True)
class Run:
    folder: Path
    record: RunRecord
    cells: tuple[CellFolder, ...]

    @property
    def name(self) -> str:
        """The name that commands accept for this run; its path if it is not below `runs/`."""
        is_listed = self.folder.parent.resolve() == runs_folder().resolve()
        return self.folder.name if is_listed else shown_path(self.folder)

    @property
    def scheduler(self) -> Literal["slurm", "local"]:
        return self.record.scheduler

    def cell(self, name: str) -> CellFolder:
        cells = {cell.name: cell for cell in self.cells}
        if name not in cells:
            raise unknown_name(self.name, "cell", name, cells)
        return cells[name]


def write_run(folder: Path, asked: RunRecord) -> None:
    """Write the record of a run that starts now, with the time, the user and the commit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # some containers have no passwd entry for the user id
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(folder / _FILE, replace(asked, created=created, user=user, commit=commit()))
    note_new_job(folder)


def publish_run(building: Path, name: str, asked: RunRecord) -> Run:
    """Publish the folder `building` as the run `name`, or as `name-2`, ... if that is taken.

    The run stays locked until `release_submit_locks` is called.
    """
    # Until this lock is released, `status` shows a cell that has no job yet as queued, not failed.
    take_submit_lock(building)
    folder, number = building.with_name(name), 1
    while True:
        write_run(building, replace(asked, run=folder.name))
        try:
            # The rename reserves the name, so two sweeps in the same second get different names.
            building.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        else:
            return read_run(folder)
        number += 1
        folder = building.with_name(f"{name}-{number}")


def is_run(folder: Path) -> bool:
    return (folder / _FILE).is_file()


def read_run(folder: Path) -> Run:
    try:
        record = read_json_as(RunRecord, folder / _FILE)
    except InputError as error:
        remedy = (
            'write {"scheduler": "slurm", "cells": []} into it, or "local" for "slurm"; '
            "cells are found by their folders"
        )
        raise InputError(error.place, error.found, remedy) from None
    # The record lists only the cells that the run began with. Scripts that join the run later do
    # not add their cells, because several may start at once and overwrite one another's changes.
    found = sorted(path.parent.name for path in folder.glob("[!.]*/cell.yaml"))
    names = [*record.cells, *(name for name in found if name not in record.cells)]
    record = replace(record, run=folder.name)  # the folder may have been renamed
    return Run(folder, record, tuple(CellFolder(folder / name) for name in names))


def find_run(name: str | None) -> Run:
    """Return the run with this name or path; by default the newest run."""
    root, names = runs_folder(), run_names()
    if name is None:
        if not names:
            remedy = "start one: python submit.py sweep smoke"
            raise InputError(shown_path(root), "there is no run yet", remedy)
        return read_run(root / names[-1])
    for folder in (root / name, Path(name)):
        if is_run(folder):
            return read_run(folder)
    raise unknown_name(shown_path(root), "run", name, names)


def find_cell(name: str | None) -> tuple[Run, CellFolder | None]:
    """Return the run given as RUN, RUN/CELL or a path, and the cell if one is given."""
    # Shell completion adds a slash to a folder's name.
    name = name.rstrip("/") if name else None
    run_name, _, cell = (name or "").rpartition("/")
    if name is None or not run_name or name in run_names() or is_run(Path(name)):
        return find_run(name), None
    run = find_run(run_name)
    return run, run.cell(cell)


def run_names() -> list[str]:
    """Return the names of all runs, sorted by their newest job, newest last."""
    files = [(path.stat().st_mtime_ns, path) for path in runs_folder().glob(f"[!.]*/{_FILE}")]
    return [path.parent.name for _, path in sorted(files)]


def note_new_job(folder: Path) -> None:
    """Mark the run as the newest, because one of its cells has a new job."""
    # os.utime's own time lags by milliseconds, so that an older run might look newer.
    now = time.time_ns()
    # Ignore a permission error: the run may belong to a colleague.
    with contextlib.suppress(PermissionError):
        os.utime(folder / _FILE, ns=(now, now))


def commit() -> str | None:
    """Return the cookbook's commit, with `+` if files were changed; None outside git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return None


def code_folder(run: Path, name: str) -> Path:
    """Return the snapshot called `name` in the folder of a run."""
    return run / "code" / name


def snapshot_code(run: Path) -> str:
    """Copy the code that runs now into the run's folder, unless it is there; return its name.

    The name follows from the content, so that jobs with the same code share a snapshot.
    """
    digest = hashlib.sha256(str(ROOT).encode())
    for path in _files():
        digest.update(f"{path.relative_to(CODE)}\n".encode() + path.read_bytes())
    target = code_folder(run, digest.hexdigest()[:12])
    if target.is_dir():
        return target.name
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        for path in _files():
            copy = building / path.relative_to(CODE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        (building / CHECKOUT).write_text(str(ROOT), encoding="utf-8")
        building.chmod(0o755)
        # Another job may have been faster.
        with contextlib.suppress(OSError):
            building.rename(target)
        return target.name
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _files() -> list[Path]:
    found = (path for part in _PARTS for path in (CODE / part, *(CODE / part).rglob("*")))
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def code_of_job(run: Path, job: str) -> Path:
    """Return the link by which the script of a job finds its code after a requeue."""
    return run / "code" / f"job-{job}"


# A submitter locks this file while it works. If it dies, the kernel releases the lock.
_LOCK = "submit.lock"
_held: list[int] = []  # file descriptors of the locks that this process holds


def take_submit_lock(folder: Path) -> None:
    """Lock the run in `folder`; raise InputError if another process is submitting its cells."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 1000).decode(errors="replace").strip()
        os.close(handle)
        found = f"{holder or 'another process'} submits its cells"
        raise InputError(folder.name, found, "wait until it is done") from None
    except OSError as error:
        # Continue unlocked if the file system has no locks; Lustre without `flock` gives ENOSYS.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held.append(handle)


def release_submit_locks() -> None:
    while _held:
        os.close(_held.pop())


def is_submit_locked(folder: Path) -> bool:
    """Whether some process, maybe this one, is submitting cells of the run."""
    try:
        with (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # Without a lock file, or on a file system without locks, the run is not locked.
        return isinstance(error, BlockingIOError)
    return False
