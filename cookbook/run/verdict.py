"""What a cell's state is, from the job's own last word and what Slurm says of the job."""

from __future__ import annotations

from dataclasses import replace

from cookbook.run import slurm
from cookbook.run.status import CANCELLED, ENDED, FAILED, FINISHED, QUEUED, RUNNING, Status

COMPLETING = "Slurm: COMPLETING"


def by_slurm(status: Status, info: slurm.JobInfo) -> tuple[str, str | None]:
    """The state and its reason; what the job wrote before it was requeued is of no account."""
    said = _word(status, info)
    if info.state in slurm.WAITING:
        return QUEUED, info.reason
    if info.state == "COMPLETING" and said is not status:
        return QUEUED, "requeued"
    if info.state in slurm.ACTIVE:
        # An end is one when Slurm has seen it too: until then the job may be requeued.
        if info.state in slurm.HALTED:
            return RUNNING, f"suspended (Slurm: {info.state}): its processes stand still"
        return RUNNING, COMPLETING if said.state in ENDED else None
    if info.state in slurm.STOPPED:
        return CANCELLED, None
    if info.state in slurm.SUCCEEDED:
        # The script's exit status is the job's: its last word may only not have been written.
        return FINISHED, None
    if said.state == FAILED and info.state == "FAILED" and said.reason:
        return FAILED, said.reason
    # TIMEOUT, NODE_FAIL, OUT_OF_MEMORY...: Slurm knows better than the job why it was ended.
    return FAILED, _in_slurms_words(info)


def in_turn(status: Status, info: slurm.JobInfo) -> tuple[str, str | None]:
    """The state of a cell whose job also runs others: what the job wrote of it, if it is over."""
    said = _word(status, info)
    if said.state in ENDED:
        if info.state == "COMPLETING" and _with_the_job(said):
            # The job may come back, and with it this cell.
            return QUEUED if said.started is None else RUNNING, COMPLETING
        return said.state, said.reason
    if said.state == QUEUED and info.state in slurm.ACTIVE:
        return QUEUED, "waits for its turn in the allocation"
    if said.state == QUEUED and info.state not in slurm.WAITING | slurm.STOPPED:
        # The job's exit status is that of the cells which had their turn.
        return CANCELLED, f"the allocation ended before its turn ({_in_slurms_words(info)})"
    return by_slurm(status, info)


def _word(status: Status, info: slurm.JobInfo) -> Status:
    """What the job wrote since Slurm started it the last time."""
    return status if info.restarts <= status.restarts else replace(status, state=QUEUED)


def _with_the_job(said: Status) -> bool:
    """Whether the cell ended because its job did, and not by itself."""
    return said.state == CANCELLED or (said.reason or "").startswith("Slurm: ")


def _in_slurms_words(info: slurm.JobInfo) -> str:
    return " ".join(["Slurm:", info.state, info.reason]).strip()
