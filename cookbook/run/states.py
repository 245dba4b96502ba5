"""The state of each cell of a run: derived here alone, from its files and from the scheduler.

Neither is enough: a job that was killed wrote no last word, and Slurm forgets a finished job after
minutes where accounting is off. So an end that Slurm tells is kept in the cell's folder.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from cookbook.base.errors import InputError, JobError
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.processes import local_job_lives, run_processes, stop_processes, trains
from cookbook.run.run import Run
from cookbook.run.status import (
    FAILED,
    FINISHED,
    OPEN,
    QUEUED,
    REFUSED,
    RUNNING,
    UNKNOWN,
    End,
    Job,
    Status,
    read_end,
    read_job,
    read_status,
    write_end,
    write_job,
)
from cookbook.run.submit_lock import is_submit_locked
from cookbook.run.verdict import COMPLETING, by_slurm, in_turn


@dataclass(frozen=True)
class CellState:
    """The state of a cell and why; `started` and `ended` in seconds since the epoch.

    Attributes:
        is_known: False where Slurm did not answer, so that this is only the job's own last word.
    """

    cell: str
    state: str
    reason: str | None
    job_id: str | None
    attempt: int
    started: float | None
    ended: float | None
    is_known: bool = True

    @property
    def is_ending(self) -> bool:
        """Whether the job has said how it ended, and Slurm has yet to see it."""
        return self.state == RUNNING and self.reason == COMPLETING

    @property
    def has_ended(self) -> bool:
        """Whether the cell has ended for good, for all that can be known."""
        return self.state not in OPEN and self.is_known


def cell_states(run: Run) -> list[CellState]:
    """The state of every cell of `run`, in its order."""
    if run.scheduler == "slurm":
        return _slurm_states(run)
    return [_local_state(run, cell, *_read(cell)) for cell in run.cells]


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


def _slurm_states(run: Run) -> list[CellState]:
    before = {cell: _read(cell) for cell in run.cells}
    unsettled = [cell for cell, (status, _) in before.items() if status.state not in _SETTLED]
    if not unsettled:
        return [_state(cell, s.state, s.reason, s, job) for cell, (s, job) in before.items()]
    # Asked before it is looked: no submitter at work means that no further job is to come.
    is_open = is_submit_locked(run.folder)
    infos: Mapping[str, slurm.JobInfo] = {}
    silence, lost = None, {}
    try:
        lost = _lost_jobs(run, [cell for cell in unsettled if before[cell][1] is None])
        jobs = [before[cell][1] or lost.get(cell) for cell in unsettled]
        infos = slurm.job_infos(job.job_id for job in jobs if job)
    except JobError as error:
        silence = str(error)
    # Read again: the last word that a job wrote before Slurm saw its end is there now.
    after = {cell: _read(cell) for cell in run.cells}
    jobs_of = {cell: job or before[cell][1] or lost.get(cell) for cell, (_, job) in after.items()}
    shared = _shared(jobs_of.values())
    return [
        _slurm_state(run, cell, after[cell][0], job, infos, silence, is_open, shared)
        for cell, job in jobs_of.items()
    ]


_SETTLED = frozenset({FINISHED, REFUSED})


def _shared(jobs: Iterable[Job | None]) -> frozenset[str]:
    """The ids of the jobs that run several cells in turn."""
    counts = Counter(job.job_id for job in jobs if job)
    return frozenset(job_id for job_id, count in counts.items() if count > 1)


def _lost_jobs(run: Run, cells: list[CellFolder]) -> dict[CellFolder, Job]:
    """The jobs whose submitter was killed before it noted them: Slurm knows their batch files."""
    waiting = [cell for cell in cells if _read(cell)[0].state == QUEUED]
    if not waiting:
        return {}
    # Of cells that share an allocation there is one batch file.
    scripts = {
        cell: cell.submission if cell.submission.exists() else run.submission for cell in waiting
    }
    found = slurm.jobs_by_script(sorted(set(scripts.values())), run.folder.stat().st_uid)
    jobs = {}
    for cell, script in scripts.items():
        if job_id := found.get(script):
            jobs[cell] = Job(job_id, script.stat().st_mtime)
            # In another user's run it can't be noted, and is found again at the next look.
            with contextlib.suppress(OSError):
                write_job(cell, job_id)
    return jobs


def _slurm_state(
    run: Run,
    cell: CellFolder,
    status: Status,
    job: Job | None,
    infos: Mapping[str, slurm.JobInfo],
    silence: str | None,
    is_submitted: bool,
    shared: frozenset[str],
) -> CellState:
    if status.state in _SETTLED:
        return _state(cell, status.state, status.reason, status, job)
    if job is None:
        if status.state == QUEUED and silence is None and not is_submitted:
            return _state(cell, FAILED, _NEVER_SUBMITTED, status, job)
        return _state(cell, status.state, status.reason, status, job)
    info, kept = infos.get(job.job_id), _kept(cell, job, status)
    if kept is not None and (info is None or _is_same_end(info, kept)):
        # Accounting words the reason otherwise than the controller did.
        info = kept
    elif info is not None and info.state not in slurm.WAITING | slurm.ACTIVE:
        # A full disk, or a colleague's run.
        with contextlib.suppress(OSError):
            write_end(cell, End(job.job_id, info.restarts, info.state, info.reason))
    if info is not None:
        judge = in_turn if job.job_id in shared else by_slurm
        return _state(cell, *judge(status, info), status, job)
    if silence is not None:
        words = f"Slurm does not answer ({silence}); this is the job's own last word"
        reason = "; ".join(filter(None, [status.reason, words]))
        return replace(_state(cell, status.state, reason, status, job), is_known=False)
    if status.state not in OPEN:
        return _state(cell, status.state, status.reason, status, job)
    if not slurm.is_own(run.folder):
        # Slurm may hide the jobs of others.
        reason = f"Slurm shows no job {job.job_id} of the run's owner; the job said {status.state}"
        return _state(cell, UNKNOWN, reason, status, job)
    reason = f"job {job.job_id} is gone, and neither Slurm nor the job said how it ended"
    return _state(cell, FAILED, reason, status, job)


_NEVER_SUBMITTED = "never submitted: submit.py was ended before it came to this cell; start it anew"


def _kept(cell: CellFolder, job: Job, status: Status) -> slurm.JobInfo | None:
    """The end of this job that somebody saw; None where the job has written since, requeued."""
    end = read_end(cell)
    if end is None or end.job_id != job.job_id or end.restarts < status.restarts:
        return None
    return slurm.JobInfo(end.state, end.reason, end.restarts)


def _is_same_end(info: slurm.JobInfo, kept: slurm.JobInfo) -> bool:
    return info.state == kept.state and info.restarts <= kept.restarts


def _local_state(run: Run, cell: CellFolder, status: Status, job: Job | None) -> CellState:
    state, reason = status.state, status.reason
    if state in OPEN and job is not None and not local_job_lives(run, job.job_id):
        left = run_processes(run)
        # The last word may have come between the two looks.
        status, _ = _read(cell)
        state, reason = status.state, status.reason
        training = [one for one in left if trains(one, cell)]
        if state in OPEN and any(one.is_supervisor for one in left):
            pass
        elif state in OPEN and training:
            reason = (
                f"process {job.job_id} was killed, {len(training)} of its processes go on; "
                f"stop them: python submit.py cancel {run.name}"
            )
        elif state in OPEN:
            state = FAILED
            reason = f"process {job.job_id} is gone: killed, or the machine was restarted"
    elif state == QUEUED and job is None and not is_submit_locked(run.folder):
        # The mark goes after the last job was noted, which may have been since the look.
        status, job = _read(cell)
        state, reason = status.state, status.reason
        if state == QUEUED and job is None:
            state, reason = FAILED, _NEVER_SUBMITTED
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


def cancel_run(run: Run, say: Callable[[int], None] = lambda num_jobs: None) -> list[str]:
    """Ask the scheduler to stop what still waits or runs; the names of those cells.

    Of a job that is ending Slurm may still make a requeued one, so it is told too.

    Args:
        say: is told how many jobs there are, before any is stopped.

    Raises:
        JobError: Slurm does not answer, so nothing may have been stopped.
    """
    active = [state for state in cell_states(run) if not state.has_ended and state.job_id]
    jobs = sorted({state.job_id for state in active if state.job_id})
    say(len(jobs))
    if run.scheduler == "slurm":
        if jobs:
            slurm.scancel(jobs)
    else:
        for job_id in jobs:
            stop_processes(run, job_id)
    return [state.cell for state in active if not state.is_ending]
