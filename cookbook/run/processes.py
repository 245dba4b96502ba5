"""The processes of this machine that run a run which was started with `--cluster local`."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from cookbook.run.folder import CellFolder
from cookbook.run.status import Job

# Set to the run's folder in the job's environment, which all its processes inherit. A command line
# that names the folder may be somebody's editor.
RUN_VARIABLE = "COOKBOOK_RUN"
_CELL_VARIABLE = "CELL_DIR"


@dataclass(frozen=True)
class RunProcess:
    """A process of a run; `cell` is the folder of the cell that it trains, None for supervisors."""

    process: psutil.Process
    cell: Path | None


def process_job(pid: int) -> Job:
    """Return the identity of a process that has just been started on this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Job(str(pid), host=socket.gethostname(), boot=boot, started=_start_ticks(pid))


def is_elsewhere(job: Job) -> bool:
    """Whether the job is a process of another machine, which is out of sight here."""
    return job.host is not None and job.host != socket.gethostname()


def is_alive(job: Job) -> bool:
    """Whether the job's process still runs on this machine, and not another one under its id."""
    now = process_job(int(job.job_id))
    return now.started is not None and (now.boot, now.started) == (job.boot, job.started)


def run_processes(folder: Path) -> list[RunProcess]:
    """Return this user's processes that belong to the run in `folder`, which may be deleted."""
    mark = str(folder.resolve())
    found = []
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}
        if variables.get(RUN_VARIABLE) == mark:
            cell = variables.get(_CELL_VARIABLE)
            found.append(RunProcess(process, Path(cell).resolve() if cell else None))
    return found


def trains(process: RunProcess, cell: CellFolder) -> bool:
    """Whether the process is one of the cell's training."""
    return process.cell == cell.path.resolve()


def stop_processes(folder: Path, job: Job | None = None) -> int:
    """Tell a local job to end: its process, else its supervisor, else all its processes."""
    if job is not None and is_alive(job):
        targets = [psutil.Process(int(job.job_id))]
    else:
        left = run_processes(folder)
        supervisors = [one for one in left if one.cell is None]
        targets = [one.process for one in supervisors or left]
    for process in targets:
        # It may have ended since the look.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    return len(targets)


def _start_ticks(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if it has ended."""
    try:
        # proc(5), from the third field on. psutil's times shift with the clock.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
