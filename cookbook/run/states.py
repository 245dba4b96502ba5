"""The state of each cell of a run, from its files and from the scheduler.

Neither is enough: a job that was killed wrote no last word, and Slurm forgets a finished job after
minutes if accounting is off. So an end that Slurm reports is kept in the cell's folder.
"""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cookbook.base.errors import InputError, JobError
from cookbook.base.gpus import has_slurm
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.run import Run, is_submit_locked
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
    End,
    Job,
    Status,
    read_job,
    read_json_as,
    read_status,
    write_json,
)

# Set to the run's folder in the job's environment, which all its processes inherit. A command line
# that names the folder may be somebody's editor.
RUN_VARIABLE = "COOKBOOK_RUN"


def process_job(pid: int) -> Job:
    """Return the identity of a process of this machine; `started` is None if it has ended."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = None
    with contextlib.suppress(OSError):
        # proc(5), from the third field on. psutil's times shift with the clock.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A process that is freeing its memory (PF_EXITING) is no zombie yet.
        is_exiting = fields[0] in "ZX" or int(fields[6]) & 0x4
        started = None if is_exiting else fields[19]
    return Job(str(pid), host=socket.gethostname(), boot=boot, started=started)


def is_alive(job: Job) -> bool:
    """Whether the job's process still runs on this machine, and not another one under its id."""
    now = process_job(int(job.job_id))
    return now.started is not None and (now.boot, now.started) == (job.boot, job.started)


def run_processes(folder: Path) -> dict[psutil.Process, Path | None]:
    """Return this user's processes of the run in `folder`, which may be deleted.

    Each has the folder of the cell that it trains, None for supervisors.
    """
    mark, found = str(folder.resolve()), dict[psutil.Process, Path | None]()
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}
        if variables.get(RUN_VARIABLE) == mark:
            cell = variables.get("CELL_DIR")
            found[process] = Path(cell).resolve() if cell else None
    return found


def stop_processes(folder: Path, job: Job | None = None) -> int:
    """Tell a local job to end: its process, else its supervisor, else all its processes."""
    if job is not None and is_alive(job):
        targets = [psutil.Process(int(job.job_id))]
    else:
        left = run_processes(folder)
        targets = [process for process, cell in left.items() if cell is None] or [*left]
    for process in targets:
        # It may have ended since the look.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    return len(targets)


COMPLETING = "Slurm: COMPLETING"
SETTLED = frozenset({FINISHED, REFUSED})
_NEVER_SUBMITTED = "never submitted: submit.py ended before it reached this cell; start it anew"


@dataclass(frozen=True)
class CellState:
    """The state of a cell and its reason; `started` and `ended` in seconds since the epoch.

    `is_known` is False if Slurm did not answer, or the processes are another machine's: this is
    then only the job's own last word.
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
        """Whether the job has written how it ended, and Slurm has yet to see it."""
        return self.state == RUNNING and self.reason == COMPLETING

    @property
    def has_ended(self) -> bool:
        """Whether the cell has ended for good, for all that can be known."""
        return self.state not in OPEN and self.is_known


def cell_states(run: Run, patience: float = slurm.PATIENCE_S) -> list[CellState]:
    """Return the state of every cell of `run`, in its order.

    Slurm is given `patience` seconds to answer; after that the files alone count.
    """
    if run.scheduler == "slurm":
        return _slurm_states(run, patience)
    return [_local_state(run, cell) for cell in run.cells]


def _read(cell: CellFolder) -> tuple[Status, Job | None]:
    """Read the cell's files; a damaged one loses only its own content."""
    try:
        status = read_status(cell)
    except InputError as error:
        status = Status(UNKNOWN, reason=str(error))
    try:
        return status, read_job(cell)
    except InputError as error:
        return replace(status, reason=status.reason or str(error)), None


def _slurm_states(run: Run, patience: float) -> list[CellState]:
    before = {cell: _read(cell) for cell in run.cells}
    # Before the second look: without a submitter at work no further job is to come.
    is_open = is_submit_locked(run.folder)
    infos, silence = dict[str, slurm.JobInfo](), None
    asked = [job for status, job in before.values() if job and status.state not in SETTLED]
    try:
        infos = slurm.job_infos((job.job_id for job in asked), patience)
    except JobError as error:
        silence = str(error)
    # Read again: the last word that a job wrote before Slurm saw its end is there now.
    after = {cell: _read(cell) for cell in run.cells}
    jobs_of = {cell: job or before[cell][1] for cell, (_, job) in after.items()}
    num_cells = Counter(job.job_id for job in jobs_of.values() if job)
    states = []
    for cell, job in jobs_of.items():
        status, is_known = after[cell][0], True
        found: tuple[str, str | None] | None = None
        if job is None and status.state == QUEUED and not (silence or is_open):
            found = FAILED, f"{_NEVER_SUBMITTED} unless squeue --me shows its job"
        elif job is not None and status.state not in SETTLED:
            info = _settle_end(cell, job, status, infos.get(job.job_id))
            if info is not None:
                merge = merge_shared_job_state if num_cells[job.job_id] > 1 else merge_slurm_state
                found = merge(status, info)
            elif silence is not None:
                words = f"Slurm does not answer ({silence}); this is the job's own last word"
                reason, is_known = "; ".join(filter(None, [status.reason, words])), False
                found = status.state, reason
            elif status.state in OPEN and os.getuid() not in (0, run.folder.stat().st_uid):
                # Slurm may hide the jobs of others.
                words = f"Slurm shows no job {job.job_id} of the run's owner; the job said "
                found = UNKNOWN, words + status.state
            elif status.state in OPEN:
                words = f"job {job.job_id} is gone, and neither Slurm nor the job said how it ended"
                found = FAILED, words
        states.append(_state(cell, status, job, found, is_known))
    return states


def _settle_end(
    cell: CellFolder, job: Job, status: Status, info: slurm.JobInfo | None
) -> slurm.JobInfo | None:
    """Return Slurm's answer, or the end that was kept of it; keep an end that is new."""
    end = None
    with contextlib.suppress(InputError):
        end = read_json_as(End, cell.end)
    # The job has written since if it was requeued.
    if end is not None and end.job_id == job.job_id and end.restarts >= status.restarts:
        kept = slurm.JobInfo(end.state, end.reason, end.restarts)
        # Accounting words the reason differently from the controller.
        if info is None or (info.state == kept.state and info.restarts <= kept.restarts):
            return kept
    if info is not None and info.state not in slurm.WAITING | slurm.ACTIVE:
        # A full disk, or a colleague's run.
        with contextlib.suppress(OSError):
            write_json(cell.end, End(job.job_id, info.restarts, info.state, info.reason))
    return info


def merge_slurm_state(status: Status, info: slurm.JobInfo) -> tuple[str, str | None]:
    """Return state and reason from the job's last word, if Slurm has not requeued it since."""
    said = _since_start(status, info)
    if info.state in slurm.WAITING:
        return QUEUED, info.reason
    if info.state == "COMPLETING" and said is not status:
        return QUEUED, "requeued"
    if info.state in slurm.HALTED:
        return RUNNING, f"suspended (Slurm: {info.state}): its processes stand still"
    if info.state in slurm.ACTIVE:
        # An end counts once Slurm has seen it: until then the job may be requeued.
        return RUNNING, COMPLETING if said.state in ENDED else None
    if info.state == "CANCELLED":
        return CANCELLED, None
    if info.state == "COMPLETED":
        # The script's exit status is the job's, even if its last word could not be written.
        return FINISHED, None
    if said.state == FAILED and info.state == "FAILED" and said.reason:
        return FAILED, said.reason
    # TIMEOUT, NODE_FAIL, OUT_OF_MEMORY...: Slurm knows better than the job why it was ended.
    return FAILED, _in_slurms_words(info)


def merge_shared_job_state(status: Status, info: slurm.JobInfo) -> tuple[str, str | None]:
    """Return state and reason of a cell whose job runs others too."""
    said = _since_start(status, info)
    if said.state in ENDED:
        ended_with_job = said.state == CANCELLED or (said.reason or "").startswith("Slurm: ")
        if info.state == "COMPLETING" and ended_with_job:
            # The job may come back, and with it this cell.
            return QUEUED if said.started is None else RUNNING, COMPLETING
        return said.state, said.reason
    if said.state == QUEUED and info.state in slurm.ACTIVE:
        return QUEUED, "waits for its turn in the allocation"
    if said.state == QUEUED and info.state not in slurm.WAITING | {"CANCELLED"}:
        # The job's exit status is that of the cells which had their turn.
        return CANCELLED, f"the allocation ended before its turn ({_in_slurms_words(info)})"
    return merge_slurm_state(status, info)


def _since_start(status: Status, info: slurm.JobInfo) -> Status:
    """Return what the job wrote since Slurm started it the last time."""
    return status if info.restarts <= status.restarts else replace(status, state=QUEUED)


def _in_slurms_words(info: slurm.JobInfo) -> str:
    return " ".join(["Slurm:", info.state, info.reason]).strip()


def _local_state(run: Run, cell: CellFolder) -> CellState:
    (status, job), found, is_known = _read(cell), None, True
    if status.state in OPEN and job is not None:
        if job.host not in (None, socket.gethostname()):
            words = f"runs on {job.host}, and can be followed and stopped only there"
            found, is_known = (status.state, words), False
        elif not is_alive(job):
            left = list(run_processes(run.folder).values())
            # The last word may have come between the two looks.
            status, _ = _read(cell)
            num_training = left.count(cell.path.resolve())
            if status.state in OPEN and None not in left:
                words = f"process {job.job_id} is gone: killed, or the machine was restarted"
                if num_training:
                    words = f"process {job.job_id} was killed, {num_training} of its processes go "
                    words += f"on; stop them: python submit.py cancel {run.name}"
                found = status.state if num_training else FAILED, words
    elif status.state == QUEUED and not is_submit_locked(run.folder):
        # The lock is released after the last job is recorded: read again to avoid a race.
        status, job = _read(cell)
        if status.state == QUEUED and job is None:
            found = FAILED, _NEVER_SUBMITTED
    return _state(cell, status, job, found, is_known)


def _state(
    cell: CellFolder,
    status: Status,
    job: Job | None,
    found: tuple[str, str | None] | None = None,
    is_known: bool = True,
) -> CellState:
    state, reason = found or (status.state, status.reason)
    job_id, times = job.job_id if job else None, (status.started, status.ended)
    return CellState(cell.name, state, reason or None, job_id, status.attempt, *times, is_known)


def cancel_run(run: Run, report: Callable[[int], None] = lambda num_jobs: None) -> list[str]:
    """Ask the scheduler to stop what still waits or runs; return the names of those cells.

    A job that is ending is cancelled too, since Slurm may requeue it.

    Raises:
        JobError: Slurm does not answer, or the processes are another machine's.
    """
    active = [state for state in cell_states(run) if not state.has_ended and state.job_id]
    for state in active:
        if not state.is_known:
            raise JobError(f"{run.name}: nothing was cancelled: {state.cell} {state.reason}")
    ids = sorted({state.job_id for state in active if state.job_id})
    report(len(ids))
    if run.scheduler == "local":
        for job in {read_job(run.cell(state.cell)) for state in active}:
            stop_processes(run.folder, job)
    elif ids:
        slurm.scancel(ids)
    return [state.cell for state in active if not state.is_ending]


def cancel_deleted(folder: Path) -> int:
    """Stop the jobs of a run whose folder was deleted; return how many jobs or processes."""
    found, root = stop_processes(folder), folder.resolve()
    if not has_slurm():
        return found
    # Slurm may be installed here without a configuration.
    with contextlib.suppress(JobError):
        ids = [
            job_id
            for job_id, job in slurm.user_jobs(os.getuid()).items()
            if job.state in slurm.WAITING | slurm.ACTIVE and job.script.is_relative_to(root)
        ]
        if ids:
            slurm.scancel(ids)
        found += len(ids)
    return found
