"""Ends the processes of an attempt, on all its nodes, and no others.

On Slurm an attempt is one step, which carries its name. On this machine, what a script starts
inherits its environment, which names the cell; torchrun's ranks have sessions of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from cookbook.base.errors import JobError
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.slurm import kill_steps
from cookbook.supervise.ends import own_job

_STEP_S, _TERM_S, _KILL_S = 15.0, 5.0, 5.0


def end_step(process: subprocess.Popen[bytes], attempt: Attempt, job_id: str | None) -> None:
    """End a script and the step that it started; returns when the script is gone.

    Nothing is left to be saved: a rank is dead or stopped, so that no other can go on.
    """
    if job_id and _kill_step(job_id, attempt):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STEP_S)
    for number, seconds in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def end_left_step(cell: CellFolder, job_id: str | None) -> None:
    """End what the newest attempt left, if its supervisor was killed."""
    attempts = cell.attempts()
    if job_id and attempts:
        _kill_step(job_id, attempts[-1])
    end_left_processes(cell)


def end_left_processes(cell: CellFolder) -> None:
    """End the processes on this machine that this job started to train the cell."""
    deadline = time.monotonic() + _TERM_S
    while left := _processes(cell):
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if time.monotonic() > deadline + _KILL_S:
            return
        time.sleep(0.2)


def _kill_step(job_id: str, attempt: Attempt) -> bool:
    try:
        return kill_steps(job_id, attempt.path.name) > 0
    except JobError:
        # Slurm does not answer; srun ends its step by itself when it is told to.
        return False


def _processes(cell: CellFolder) -> list[int]:
    """Processes that the cell's script started in this very job, but for this one."""
    job = own_job()
    marks = {os.fsencode(f"CELL_DIR={cell.path}"), b"COOKBOOK_SUPERVISED=1"}
    jobs = {f"{name}={job}".encode() for name in ("SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID")}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((process / "environ").read_bytes().split(b"\0"))
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        is_of_job = bool(variables & jobs) if job else True
        if marks <= variables and is_of_job and state not in "ZX":
            found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]
