"""Determine the state of each cell of a run from its files and the scheduler.

Both are needed: a killed job could not record its end, and without accounting Slurm forgets a
finished job after minutes. So an end that Slurm reports is saved in the cell's folder.
"""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cookbook.base.errors import InputError, JobError
from cookbook.run import slurm, status
from cookbook.run.folder import CellFolder
from cookbook.run.run import Run, is_submit_locked
from cookbook.run.status import Job, Status, read_job, read_json_as, write_json

# Environment variable that marks all processes of a local job with the run's folder.
RUN_VARIABLE = "COOKBOOK_RUN"


def process_job(pid: int) -> Job:
    """Return the local process `pid` as a job; its `started` is None if the process has ended."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = None
    with contextlib.suppress(OSError):
        # Do not use psutil: the start times that it returns change when the clock is set.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = None if fields[0] in "ZX" else fields[19]
    return Job(str(pid), host=socket.gethostname(), boot=boot, started=started)


def is_alive(job: Job) -> bool:
    """Return whether the job's process still runs on this machine."""
    now = process_job(int(job.job_id))
    return now.started is not None and (now.boot, now.started) == (job.boot, job.started)


def processes_with(variable: str, value: str) -> dict[psutil.Process, Mapping[str, str]]:
    """Map this user's processes with this environment variable to their environments."""
    # psutil gives no environment for a zombie or another user's process.
    found = {one: one.info["environ"] or {} for one in psutil.process_iter(["environ"])}
    return {one: own for one, own in found.items() if own.get(variable) == value}


def _cells_trained(folder: Path) -> dict[psutil.Process, str]:
    """Map this user's processes of the run to their cells' folders; a supervisor's is empty."""
    found = processes_with(RUN_VARIABLE, str(folder.resolve()))
    return {one: own.get("CELL_DIR", "") for one, own in found.items()}


def stop_processes(folder: Path, job: Job | None = None) -> int:
    """Send SIGTERM to the job's process; return how many processes were signalled.

    Without a job, or if its process is gone, signal the run's supervisors. If there are none,
    signal all processes of the run.
    """
    if job is not None and is_alive(job):
        targets = [psutil.Process(int(job.job_id))]
    else:
        left = _cells_trained(folder)
        targets = [process for process, cell in left.items() if not cell] or [*left]
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    return len(targets)


COMPLETING = "Slurm: COMPLETING"
SETTLED = frozenset({status.FINISHED, status.REFUSED})
_NEVER_SUBMITTED = "never submitted: submit.py ended before it reached this cell; start it again"


@dataclass(frozen=True)
class CellState(Status):
    """The state of a cell, from its job's file and the scheduler's answer."""

    cell: str = ""
    job_id: str | None = None
    # False if Slurm did not answer, or the job runs on another machine. `state` is then whatever
    # the job wrote last, which may be out of date.
    is_known: bool = True

    @property
    def is_ending(self) -> bool:
        """Whether the job has recorded its end, but Slurm has not noticed it yet."""
        return self.state == status.RUNNING and self.reason == COMPLETING

    @property
    def has_ended(self) -> bool:
        """Whether the cell is known to be neither queued nor running."""
        return self.state not in status.OPEN and self.is_known


def cell_states(run: Run, patience: float = slurm.PATIENCE_S) -> list[CellState]:
    """Return the cells' states; use only their files if Slurm is silent for `patience` seconds."""
    if run.scheduler == "local":
        return [_local_state(run, cell) for cell in run.cells]
    before = {cell: _read(cell)[0] for cell in run.cells}
    # If no submitter holds the lock now, the second read below sees every job that was submitted.
    is_open = is_submit_locked(run.folder)
    infos, silence = dict[str, slurm.JobInfo](), None
    asked = (one.job_id for one in before.values() if one.job_id and one.state not in SETTLED)
    try:
        infos = slurm.job_infos(asked, patience)
    except JobError as error:
        silence = str(error)
    # Read again: a job may write its last state just before Slurm reports its end.
    after = {cell: _read(cell)[0] for cell in run.cells}
    jobs = {cell: state.job_id or before[cell].job_id for cell, state in after.items()}
    num_cells = Counter(jobs.values())
    states = []
    for cell, job in jobs.items():
        state = replace(after[cell], job_id=job)
        if job is None and state.state == status.QUEUED and not (silence or is_open):
            words = f"{_NEVER_SUBMITTED} unless squeue --me shows its job"
            state = replace(state, state=status.FAILED, reason=words)
        elif job is not None and state.state not in SETTLED:
            if info := _settle_end(cell, job, state, infos.get(job)):
                found, reason = merge_slurm_state(state, info, num_cells[job] > 1)
                state = replace(state, state=found, reason=reason or None)
            elif silence is not None:
                words = f"Slurm does not answer ({silence}); this is what the job wrote last"
                reason = "; ".join(filter(None, [state.reason, words]))
                state = replace(state, reason=reason, is_known=False)
            elif state.state in status.OPEN and os.getuid() not in (0, run.folder.stat().st_uid):
                # Slurm may hide other users' jobs, so this one may still be running.
                words = f"Slurm shows no job {job} of the run's owner; the job said {state.state}"
                state = replace(state, state=status.UNKNOWN, reason=words)
            elif state.state in status.OPEN:
                words = f"job {job} is gone, and neither Slurm nor the job said how it ended"
                state = replace(state, state=status.FAILED, reason=words)
        states.append(state)
    return states


def _read(cell: CellFolder) -> tuple[CellState, Job | None]:
    job = None
    try:
        written = status.read_status(cell)
    except InputError as error:
        written = Status(status.UNKNOWN, reason=str(error))
    try:
        job = read_job(cell)
    except InputError as error:
        written = replace(written, reason=written.reason or str(error))
    return CellState(**vars(written), cell=cell.name, job_id=job.job_id if job else None), job


def _settle_end(
    cell: CellFolder, job: str, written: Status, info: slurm.JobInfo | None
) -> slurm.JobInfo | None:
    with contextlib.suppress(InputError):
        kept = read_json_as(slurm.JobInfo, cell.end)
        # If `written` has a higher restart count, `kept` is from before a requeue.
        is_newest = kept.job_id == job and kept.restarts >= written.restarts
        # Compare states, not reasons: accounting and slurmctld phrase the same reason differently.
        is_same = info is None or (info.state == kept.state and info.restarts <= kept.restarts)
        if is_newest and is_same:
            return kept
    if info is not None and info.state not in slurm.WAITING | slurm.ACTIVE:
        # Saving may fail: the disk is full, or the run belongs to a colleague.
        with contextlib.suppress(OSError):
            write_json(cell.end, info)
    return info


def merge_slurm_state(
    written: Status, info: slurm.JobInfo, is_shared: bool = False
) -> tuple[str, str | None]:
    """Combine what Slurm and the job say into a state and a reason.

    `is_shared`: the job trains several cells, of which some end, or wait, while it runs.
    """
    said = written
    if info.restarts > written.restarts:  # Slurm has requeued the job since
        said = replace(written, state=status.QUEUED)
    with_job = said.state == status.CANCELLED or (said.reason or "").startswith("Slurm: ")
    # Slurm may still requeue a job that is ending, and with it what ended for that.
    if is_shared and said.state in status.ENDED and not (with_job and info.state == "COMPLETING"):
        return said.state, said.reason
    if is_shared and said.state == status.QUEUED and info.state in slurm.ACTIVE:
        return status.QUEUED, "waits for its turn in the allocation"
    if info.state in slurm.WAITING:
        return status.QUEUED, info.reason
    if info.state == "COMPLETING" and said is not written:
        return status.QUEUED, "requeued"
    if info.state in slurm.HALTED:
        return status.RUNNING, f"suspended (Slurm: {info.state}): its processes are stopped"
    if info.state in slurm.ACTIVE:
        # Until Slurm itself says that the job has ended, it may still requeue the job.
        return status.RUNNING, COMPLETING if said.state in status.ENDED else None
    if info.state == "CANCELLED":
        return status.CANCELLED, None
    if info.state == "COMPLETED":
        return status.FINISHED, None
    if said.state == status.FAILED and info.state == "FAILED" and said.reason:
        return status.FAILED, said.reason
    # TIMEOUT, NODE_FAIL, OUT_OF_MEMORY...: Slurm knows the reason better than the job.
    return status.FAILED, " ".join(["Slurm:", info.state, info.reason]).strip()


def _local_state(run: Run, cell: CellFolder) -> CellState:
    state, job = _read(cell)
    if state.state in status.OPEN and job is not None:
        if job.host not in (None, socket.gethostname()):
            words = f"runs on {job.host}, and can be followed and stopped only there"
            return replace(state, reason=words, is_known=False)
        if not is_alive(job):
            left = list(_cells_trained(run.folder).values())
            state, _ = _read(cell)  # the job may have recorded its end since the first read
            if state.state in status.OPEN and "" not in left:
                if num_training := left.count(str(cell.path.resolve())):
                    words = (
                        f"process {job.job_id} was killed, and {num_training} of its processes "
                        f"still run; stop them: python submit.py cancel {run.name}"
                    )
                    return replace(state, reason=words)
                words = f"process {job.job_id} is gone: killed, or the machine was restarted"
                return replace(state, state=status.FAILED, reason=words)
    elif state.state == status.QUEUED and not is_submit_locked(run.folder):
        # Read again: a submitter may have recorded the job and released the lock in the meantime.
        state, job = _read(cell)
        if state.state == status.QUEUED and job is None:
            return replace(state, state=status.FAILED, reason=_NEVER_SUBMITTED)
    return state


def cancel_run(run: Run) -> list[str]:
    """Cancel the run's waiting and running cells; return their names.

    A job that is ending is cancelled too, since Slurm may requeue it, but its cell is not returned.
    Raises JobError if Slurm does not answer, or if a local run is on another machine.
    """
    active = [state for state in cell_states(run) if not state.has_ended and state.job_id]
    for state in active:
        if not state.is_known:
            raise JobError(f"{run.name}: nothing was cancelled: {state.cell} {state.reason}")
    if run.scheduler == "local":
        for job in {read_job(run.cell(state.cell)) for state in active}:
            stop_processes(run.folder, job)
    elif active:
        slurm.scancel(sorted({str(state.job_id) for state in active}))
    return [state.cell for state in active if not state.is_ending]


def cancel_deleted(folder: Path) -> int:
    """Stop the jobs of a run whose folder was deleted; return how many jobs or processes it had."""
    found, root = stop_processes(folder), folder.resolve()
    with contextlib.suppress(JobError):
        ids = [
            job.job_id
            for job in slurm.own_jobs()
            if job.state in slurm.WAITING | slurm.ACTIVE and Path(job.script).is_relative_to(root)
        ]
        if ids:
            slurm.scancel(ids)
        found += len(ids)
    return found
