"""The state of each cell of a run: from its status file and from what the scheduler knows.

Neither alone is enough: a job that was killed wrote no last word, and Slurm forgets a finished job
after minutes where accounting is off.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.run import Run
from cookbook.run.status import (
    CANCELLED,
    ENDED,
    FAILED,
    FINISHED,
    OPEN,
    QUEUED,
    REFUSED,
    RUNNING,
    UNKNOWN,
    Job,
    Status,
    read_job,
    read_status,
)


@dataclass(frozen=True)
class CellState:
    """The state of a cell and why; `started` and `ended` in seconds since the epoch."""

    cell: str
    state: str
    reason: str | None
    job_id: str | None
    attempt: int
    started: float | None
    ended: float | None


def cell_states(run: Run) -> list[CellState]:
    """The state of every cell of `run`, in its order."""
    records = {cell: _read(cell) for cell in run.cells}
    open_jobs = [
        job.job_id
        for status, job in records.values()
        if job is not None and status.state not in (FINISHED, REFUSED)
    ]
    if run.scheduler == "slurm":
        infos = slurm.job_infos(open_jobs)
        return [_slurm_state(cell, *record, infos) for cell, record in records.items()]
    return [_local_state(run, cell, *record) for cell, record in records.items()]


def _read(cell: CellFolder) -> tuple[Status, Job | None]:
    """What the cell's files say; one that cannot be read costs nothing but its own words."""
    try:
        status = read_status(cell)
    except InputError as error:
        status = Status(UNKNOWN, reason=str(error))
    try:
        return status, read_job(cell)
    except InputError as error:
        return replace(status, reason=status.reason or str(error)), None


def _slurm_state(
    cell: CellFolder, status: Status, job: Job | None, infos: Mapping[str, slurm.JobInfo]
) -> CellState:
    state, reason = status.state, status.reason
    info = infos.get(job.job_id) if job else None
    if state in (FINISHED, REFUSED) or job is None:
        pass
    elif info is None:
        if state in OPEN:
            state = FAILED
            reason = f"job {job.job_id} is gone, and neither Slurm nor the job said how it ended"
    elif info.state in slurm.WAITING:
        state, reason = QUEUED, info.reason
    elif info.state in slurm.ACTIVE:
        state = state if state in ENDED else RUNNING
    elif info.state in slurm.STOPPED:
        state, reason = CANCELLED, None
    elif info.state in slurm.SUCCEEDED:
        # The script's exit status is the job's: its last word may only not have been written.
        state, reason = FINISHED, None
    else:
        # TIMEOUT, NODE_FAIL, OUT_OF_MEMORY...: Slurm knows better than the job why it was ended.
        known = state == FAILED and info.state == "FAILED"
        reason = reason if known else " ".join(["Slurm:", info.state, info.reason]).strip()
        state = FAILED
    return _state(cell, state, reason, status, job)


def _local_state(run: Run, cell: CellFolder, status: Status, job: Job | None) -> CellState:
    state, reason = status.state, status.reason
    if state in OPEN and job is not None and not local_job_lives(run, job.job_id):
        # The last word may have come between the two looks.
        status, _ = _read(cell)
        state, reason = status.state, status.reason
        if state in OPEN:
            state = FAILED
            reason = f"process {job.job_id} is gone: killed, or the machine was restarted"
    return _state(cell, state, reason, status, job)


def _state(
    cell: CellFolder, state: str, reason: str | None, status: Status, job: Job | None
) -> CellState:
    return CellState(
        cell=cell.name,
        state=state,
        reason=reason or None,
        job_id=job.job_id if job else None,
        attempt=status.attempt,
        started=status.started,
        ended=status.ended,
    )


def local_job_lives(run: Run, job_id: str) -> bool:
    """Whether the process still runs this very run, and not something else under the same id."""
    process = Path("/proc") / job_id
    try:
        command = (process / "cmdline").read_bytes()
        if not command:
            # One that has just been started has no words yet; one that has ended, none any more.
            return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
    return os.fsencode(run.folder.resolve()) in command


def cancel_run(run: Run) -> list[str]:
    """Ask the scheduler to stop what still waits or runs; the names of those cells."""
    active = [state for state in cell_states(run) if state.state not in ENDED and state.job_id]
    jobs = sorted({state.job_id for state in active if state.job_id})
    if run.scheduler == "slurm":
        if jobs:
            slurm.scancel(jobs)
    else:
        for job_id in jobs:
            # It may have ended since the look.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job_id), signal.SIGTERM)
    return [state.cell for state in active]
