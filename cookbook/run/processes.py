"""The processes of this machine that run a run which was started with `--cluster local`."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from cookbook.run.folder import CellFolder
from cookbook.run.run import Run

# Set in the job's environment, which all that it starts inherits. A command line that names the
# run's folder may be somebody's editor.
RUN_VARIABLE = "COOKBOOK_RUN"
_CELL_VARIABLE = "CELL_DIR"
_SUPERVISOR = b"submitit.core._submit"
# Linux, include/linux/sched.h.
_PF_EXITING = 0x4


@dataclass(frozen=True)
class RunProcess:
    """A process of a run; `cell` is the folder of the cell that it trains, if it does."""

    pid: int
    cell: str | None
    is_supervisor: bool


def run_processes(run: Run) -> list[RunProcess]:
    """The processes that belong to `run`; another user's can't be seen."""
    mark = os.fsencode(f"{RUN_VARIABLE}={run.folder.resolve()}")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            if mark not in variables:
                continue
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        prefix = os.fsencode(f"{_CELL_VARIABLE}=")
        cells = [word.removeprefix(prefix) for word in variables if word.startswith(prefix)]
        cell = os.fsdecode(cells[0]) if cells else None
        found.append(RunProcess(int(process.name), cell, _SUPERVISOR in command))
    return found


def trains(process: RunProcess, cell: CellFolder) -> bool:
    """Whether the process is one of the cell's training."""
    return process.cell is not None and Path(process.cell).resolve() == cell.path.resolve()


def stop_processes(run: Run, job_id: str) -> None:
    """Tell a local job to end: the printed process, else the supervisor, else all that is left."""
    if local_job_lives(run, job_id):
        pids = [int(job_id)]
    else:
        left = run_processes(run)
        pids = [one.pid for one in left if one.is_supervisor] or [one.pid for one in left]
    for pid in pids:
        # It may have ended since the look.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def local_job_lives(run: Run, job_id: str) -> bool:
    """Whether the process still runs this very run, and not something else under the same id."""
    process = Path("/proc") / job_id
    try:
        command = (process / "cmdline").read_bytes()
        if not command:
            # One that has just been started has no words yet; one that ends, none any more.
            return not _ends(_stat(process))
    except OSError:
        return False
    return os.fsencode(run.folder.resolve()) in command


def start_time(pid: int) -> str | None:
    """When the process was started, in ticks since the machine's own start; None if it is gone."""
    try:
        fields = _stat(Path("/proc") / str(pid))
    except OSError:
        return None
    return None if _ends(fields) else fields[19]


def _stat(process: Path) -> list[str]:
    """The fields of proc(5)'s stat from the third on: state, ppid, pgrp, session..."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _ends(fields: list[str]) -> bool:
    # A killed process gives its memory back first, and is a zombie only then.
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
