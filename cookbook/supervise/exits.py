"""Classify why an attempt ended, and decide what to do next: one table from cause to action."""

import contextlib
import enum
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cookbook.observe.failure import cause_of, find_cause
from cookbook.observe.metrics import read_steps
from cookbook.run import own_job, status
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.status import OPEN, QUEUED, AttemptEnd, Cause

GO_ON = "python submit.py run --resume RUN"


class Action(enum.Enum):
    """What to do after an attempt; RESTART starts a new Slurm step in the same allocation."""

    RESTART = "restart"
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class Rule:
    """What to do after an attempt that ended for a certain cause.

    Attributes:
        remedy: what the user should do before continuing the run; None if nothing.
        is_counted: whether the attempt counts towards the recipe's max_restarts.
        most_idle: how many failed attempts in a row may make no progress.
    """

    action: Action
    remedy: str | None = None
    is_counted: bool = True
    most_idle: int = 2


RULES = {
    Cause.FINISHED: Rule(Action.STOP, is_counted=False),
    Cause.STOPPED: Rule(Action.STOP, is_counted=False),
    Cause.SAVED: Rule(Action.REQUEUE, is_counted=False),
    Cause.LOST_NODE: Rule(Action.REQUEUE),
    Cause.DEAD_RANK: Rule(Action.RESTART),
    Cause.HANG: Rule(Action.RESTART),
    Cause.NAN_LOSS: Rule(
        Action.RESTART, "lower the learning rate, or look at the texts of that step"
    ),
    Cause.DISK_FULL: Rule(Action.RESTART, "free some space, or lower checkpoint.keep_latest_k"),
    Cause.TOO_LATE: Rule(Action.RESTART),
    Cause.CUT_SHORT: Rule(Action.RESTART),
    # Usually a Python exception, which often recurs: allow fewer attempts without progress.
    Cause.ERROR: Rule(Action.RESTART, "read its log", most_idle=1),
    Cause.OUT_OF_MEMORY: Rule(
        Action.STOP,
        "lower training.local_batch_size or recompute more; `submit.py check` predicts what fits",
    ),
    Cause.MISSING_FILE: Rule(Action.STOP, "put the file there"),
    Cause.MISSING_MODULE: Rule(Action.STOP, "install it into the job's environment (./setup.sh)"),
    Cause.WRONG_OPTION: Rule(Action.STOP, "correct it"),
    Cause.BAD_NODES: Rule(Action.STOP, "have the nodes repaired"),
}


@dataclass(frozen=True)
class Decision:
    """The action, and its description for the history.

    When requeued, the job excludes the nodes in `exclude` (None: no change) and starts no earlier
    than `begin` (seconds since the epoch).
    """

    action: Action
    words: str
    exclude: Sequence[str] | None = None
    begin: float | None = None


def decide(
    ends: Sequence[AttemptEnd],
    most: int,
    lost_nodes: Sequence[str] = (),
    is_time_over: bool = False,
) -> Decision:
    """Decide what to do after an attempt that did not finish training.

    Args:
        ends: how the job's attempts ended, in order; at least one.
        most: how many restarts the recipe allows.
        lost_nodes: nodes of the allocation that Slurm can no longer use.
        is_time_over: whether Slurm has warned that it will soon end the job.
    """
    cause, rule = ends[-1].cause, RULES[ends[-1].cause]
    if cause is Cause.SAVED:
        return Decision(rule.action, "requeued, to go on from there")
    failures = furthest = idle = 0
    for end in ends:
        step = end.last_step or 0
        if RULES[end.cause].is_counted:
            failures += 1
            idle = idle + 1 if step <= furthest else 0
        furthest = max(furthest, step)
    why = ""
    if rule.action is Action.STOP:
        why = f"{cause} would come again"
    elif failures > most:
        why = f"restarted {most} times, as max_restarts allows"
    elif idle > rule.most_idle:
        why = f"{idle} attempts in a row came no further"
    if why:
        more = f"; {rule.remedy}, then: {GO_ON}" if rule.remedy else ""
        return Decision(Action.STOP, f"stopped: {why}{more}")
    if lost_nodes or rule.action is Action.REQUEUE:
        nodes = ", ".join(lost_nodes) or "a node"
        return Decision(Action.REQUEUE, f"requeued without {nodes}, which Slurm cannot use")
    count = f"({failures} of {most})"
    if is_time_over:
        return Decision(Action.REQUEUE, f"requeued, since its time was almost over {count}")
    return Decision(Action.RESTART, f"restarted {count}")


# With less free space than this, assume that a full disk ended the attempt, whatever the log says.
_FULL_DISK_BYTES = 8 << 20


def classify_exit(
    cell: CellFolder, attempt: Attempt, started: float, code: int | None
) -> AttemptEnd:
    """Return how and why an attempt ended."""
    end = _with_steps(_end(attempt, Cause.FINISHED, None, code, started), attempt)
    if (step := _read_stopped(attempt)).isdecimal():
        reason = f"asked to stop, it saved step {step} and ended"
        return replace(end, cause=Cause.SAVED, reason=reason)
    if not code:
        return end
    if (free := shutil.disk_usage(cell.path).free) < _FULL_DISK_BYTES:
        reason = f"{free >> 20} MiB are free at {cell.path}"
        return replace(end, cause=Cause.DISK_FULL, reason=reason)
    cause, reason = find_cause(attempt.path, code)
    return replace(end, cause=cause, reason=reason)


def refused_end(attempt: Attempt, reason: str) -> AttemptEnd:
    """Return an AttemptEnd for an attempt whose script was never started."""
    cause = cause_of(reason)
    if cause not in (Cause.MISSING_FILE, Cause.BAD_NODES, Cause.DISK_FULL):
        cause = Cause.WRONG_OPTION
    now, is_input = time.time(), cause in (Cause.MISSING_FILE, Cause.WRONG_OPTION)
    return replace(_end(attempt, cause, reason, 2 if is_input else 1, now), seen=now)


def _end(
    attempt: Attempt, cause: Cause, reason: str | None, code: int | None, started: float
) -> AttemptEnd:
    end = AttemptEnd(attempt.number, cause, reason, code, started, ended=time.time())
    excluded = tuple(status.read_json(attempt.preflight).get("excluded", ()))
    return replace(end, job_id=own_job.job_id(), excluded=excluded)


def _with_steps(end: AttemptEnd, attempt: Attempt) -> AttemptEnd:
    first = last = good = None
    for metrics in read_steps(attempt):
        first = first or metrics.step
        last = metrics.step
        values = (metrics.loss, metrics.grad_norm)
        if all(value is None or math.isfinite(value) for value in values):
            good = metrics.step
    return replace(end, first_step=first, last_step=last, last_good_step=good)


def _read_stopped(attempt: Attempt) -> str:
    with contextlib.suppress(OSError, ValueError):
        _, step = attempt.stopped.read_text(encoding="utf-8").split()
        return step
    return ""


def job_ends(cell: CellFolder) -> list[AttemptEnd]:
    """Return how the cell's attempts in this job ended, those before a requeue included."""
    history = status.read_history(cell.attempts())
    return [end for end in history if end.job_id == own_job.job_id()]


def stopped_end(end: AttemptEnd, signal_name: str) -> tuple[AttemptEnd, str]:
    """Return a pair: `end` with the cause and reason of the stop, and the cell's new state."""
    state, reason = own_job.stop_reason(signal_name, end.started)
    if end.cause is Cause.SAVED and state == QUEUED:
        return end, state
    cause = Cause.LOST_NODE if reason == "Slurm: NODE_FAIL" else Cause.STOPPED
    return replace(end, cause=cause, reason=reason), state


def note_killed_attempt(cell: CellFolder) -> None:
    """Record the newest attempt's end if its supervisor was killed before recording it."""
    attempts, now = cell.attempts(), status.read_status(cell)
    if not attempts or attempts[-1].end.exists():
        return
    attempt = attempts[-1]
    if now.attempt != attempt.number or now.state not in OPEN or not now.started:
        return
    ended = attempt.log.stat().st_mtime if attempt.log.exists() else time.time()
    why = "its supervisor was killed, or its node was lost"
    end = AttemptEnd(attempt.number, Cause.CUT_SHORT, why, started=now.started, ended=ended)
    end = replace(end, job_id=own_job.job_id(), decision="started again")
    by_slurm, _ = stopped_end(end, "")
    if by_slurm.reason:
        end = replace(by_slurm, decision="started again by Slurm")
    status.write_attempt_end(attempt, _with_steps(end, attempt))
