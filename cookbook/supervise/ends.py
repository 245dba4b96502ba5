"""Says how an attempt ended: by its log, its exit code, and what Slurm said in the job's log."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

from cookbook.base.errors import InputError
from cookbook.observe.failure import cause_of, find_cause
from cookbook.observe.metrics import read_steps
from cookbook.run.attempts import AttemptEnd, Cause, write_attempt_end
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.status import FAILED, FINISHED, OPEN, QUEUED, read_json, read_status
from cookbook.supervise.stop import saved_step, stopped_as


def slurm_job() -> str | None:
    """The id of the Slurm job whose batch step this process is.

    A local run may have been started in somebody's interactive job, which is not to be touched.
    """
    is_batch = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    return os.environ.get("SLURM_JOB_ID") if is_batch else None


def own_job() -> str | None:
    """The id of the job that this process runs in, Slurm's or that of a local process."""
    local, job = (os.environ.get(f"{name}_JOB_ID") for name in ("SUBMITIT_LOCAL", "SLURM"))
    return slurm_job() or local or job


def ended(
    cell: CellFolder,
    number: int,
    started: float | None,
    code: int | None,
    signal_name: str = "",
    record: CellRecord | None = None,
) -> tuple[AttemptEnd, str]:
    """How an attempt ended, and the state of its cell if nothing is done about it.

    Args:
        code: the script's exit status, negative for a signal; None while it runs.
        signal_name: the signal that it was told to stop with, such as SIGTERM; empty for none.
        record: the cell's, where it has been read.
    """
    attempt = cell.attempt(number)
    end = AttemptEnd(
        number,
        Cause.FINISHED,
        exit_code=code,
        started=started,
        ended=time.time(),
        job_id=own_job(),
        left_out=_left_out(attempt),
    )
    end = _with_steps(end, attempt, record or record_of(cell))
    if signal_name:
        end, state = stopped(end, signal_name)
        # Told to stop, it may end well, at a checkpoint: that is no end of the cell.
        if state != QUEUED:
            return end, state
    else:
        state = FINISHED
    step = saved_step(attempt)
    if step is not None:
        reason = f"asked to stop, it saved step {step} and ended"
        return replace(end, cause=Cause.SAVED, reason=reason), QUEUED if signal_name else FAILED
    if code == 0 or signal_name:
        return end, state
    return _with_reason(end, cell, attempt), FAILED


def stopped(end: AttemptEnd, signal_name: str) -> tuple[AttemptEnd, str]:
    """The end of an attempt that was told to stop, and the state of its cell."""
    state, reason = stopped_as(signal_name, end.started)
    cause = Cause.LOST_NODE if reason == "Slurm: NODE_FAIL" else Cause.STOPPED
    return replace(end, cause=cause, reason=reason), state


def _with_steps(end: AttemptEnd, attempt: Attempt, record: CellRecord) -> AttemptEnd:
    """The end with the first and the last step of the attempt's log, and the last good one."""
    first = last = good = None
    for metrics in read_steps(attempt, record):
        first = first or metrics.step
        last = metrics.step
        values = (metrics.loss, metrics.grad_norm)
        if all(value is None or math.isfinite(value) for value in values):
            good = metrics.step
    return replace(end, first_step=first, last_step=last, last_good_step=good)


def _left_out(attempt: Attempt) -> tuple[str, ...]:
    """The nodes that its look at them before training left out."""
    try:
        found = read_json(attempt.preflight).get("left_out", {})
    except InputError:
        return ()
    return tuple(map(str, found)) if isinstance(found, dict) else ()


def _with_reason(end: AttemptEnd, cell: CellFolder, attempt: Attempt) -> AttemptEnd:
    """The end of an attempt that failed by itself, with its cause and reason."""
    code = end.exit_code or 0
    try:
        noted = read_status(cell)
    except InputError:
        noted = None
    if noted is not None and noted.state == FAILED and noted.reason:
        # What the script's check of its words, or of its nodes, refused.
        cause = cause_of(noted.reason)
        refused = cause in (Cause.MISSING_FILE, Cause.BAD_NODES)
        return replace(end, cause=cause if refused else Cause.WRONG_OPTION, reason=noted.reason)
    failure = find_cause(attempt.path, code)
    cause, reason = (failure.cause, failure.reason) if failure else (Cause.ERROR, None)
    return replace(end, cause=cause, reason=reason)


def close_history(cell: CellFolder, record: CellRecord) -> None:
    """Note how the newest attempt ended, if that was without a word, its supervisor killed."""
    attempts = cell.attempts()
    if not attempts or attempts[-1].end.exists():
        return
    attempt = attempts[-1]
    try:
        status = read_status(cell)
    except InputError:
        return
    if status.attempt != attempt.number or status.state not in OPEN or not status.started:
        # One of a time when no ends were kept.
        return
    end = AttemptEnd(
        attempt.number,
        Cause.CUT_SHORT,
        "its supervisor was killed, or the node of it was lost",
        started=status.started,
        ended=_last_word(attempt),
        job_id=own_job(),
        decision="started again",
    )
    told, _ = stopped(end, "")
    if told.reason:
        end = replace(told, decision="started again by Slurm")
    write_attempt_end(attempt, _with_steps(end, attempt, record))


def _last_word(attempt: Attempt) -> float:
    try:
        return attempt.log.stat().st_mtime
    except OSError:
        return time.time()


def record_of(cell: CellFolder) -> CellRecord:
    """What was asked; nothing where it cannot be read, which its script says."""
    try:
        return read_record(cell.record)
    except InputError:
        return CellRecord()
