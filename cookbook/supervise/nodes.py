"""The nodes of a job that is about to train: what is known against them, and what follows."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cookbook.base.errors import InputError, JobError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.config.cluster import Cluster
from cookbook.config.recipe import Recipe
from cookbook.run import slurm
from cookbook.run.excluded import (
    Choice,
    Excluded,
    choose,
    exclude_nodes,
    excluded_file,
    read_excluded,
)
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.status import read_json
from cookbook.supervise.compare import Faults, all_of
from cookbook.supervise.leave import leave_for_queue
from cookbook.supervise.patience import ask_again
from cookbook.supervise.stop import restarts_after_failure


class CannotStartError(JobError):
    """Training cannot start, and starting the job again would not help."""


@dataclass
class JobNodes:
    """What is known of the job and of its nodes."""

    cell: CellFolder
    attempt: Attempt
    record: CellRecord
    cluster: Cluster
    recipe: Recipe
    cluster_name: str
    nodes: list[str]
    faults: Faults = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)

    @property
    def well(self) -> list[str]:
        """The nodes that nothing is known against."""
        return [node for node in self.nodes if node not in self.faults]

    def say(self, words: str) -> None:
        """Write a line to the job's log and to the attempt's."""
        line = f"cookbook: preflight: {words}"
        print(line, file=sys.stderr, flush=True)
        # The job's log has it too, on another disk perhaps.
        with contextlib.suppress(OSError), self.attempt.log.open("a", encoding="utf-8") as log:
            print(line, file=log)


def remember(job: JobNodes) -> None:
    """Put the nodes that failed on the list, for this and all later jobs."""
    by_hours: dict[float, dict[str, str]] = {}
    for node, faults in job.faults.items():
        hours = max(fault.hours for fault in faults)
        if hours:
            by_hours.setdefault(hours, {})[node] = all_of(faults)
    for hours, reasons in by_hours.items():
        remember_nodes(job, reasons, hours)


def remember_nodes(job: JobNodes, reasons: dict[str, str], hours: float) -> None:
    """Put these nodes on the list, and say so."""
    place = shown_path(excluded_file())
    try:
        exclude_nodes(reasons, hours)
    except (InputError, OSError) as error:
        job.say(f"not noted for later jobs: {error}")
        place = "by this job"
    for node, reason in reasons.items():
        job.say(f"{node}: {reason}; left out for {hours:.0f} h ({place})")


def go_on_without(job: JobNodes) -> None:
    """Put the job back into the queue without its bad nodes; does not return."""
    missing = job.record.nodes - len(job.well)
    why = "; ".join(f"{node}: {all_of(faults)}" for node, faults in job.faults.items())
    restarts = restarts_after_failure(job.cell)
    if restarts >= job.record.max_restarts:
        allowed = f"the job was started again {restarts} times already (max_restarts)"
        raise CannotStartError(f"{missing} node(s) too few, and {allowed}; {why}")
    job_id = os.environ["SLURM_JOB_ID"]
    of_user = _left_out_by_user(job, job_id)
    choice = slurm_choice(job, of_user)
    if choice.short and job.recipe.too_few_nodes == "stop":
        raise CannotStartError(
            f"too few nodes are left, {choice.short} missing (too_few_nodes: stop); "
            f"{why}; have them repaired and delete their entries in {shown_path(excluded_file())}"
        )
    if choice.begin is not None:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(choice.begin))
        job.say(
            f"too few nodes are left, {choice.short} missing; waits in the queue until {until} "
            "(too_few_nodes: wait); to start sooner, delete entries in "
            f"{shown_path(excluded_file())}, then: "
            f"scontrol update JobId={job_id} StartTime=now ExcNodeList={','.join(of_user)}"
        )
    else:
        job.say(f"back to the queue, to start without {', '.join(job.faults)}")
    write_found(job, [], 0.0, told=choice.nodes)
    leave_for_queue(job_id, [*of_user, *choice.nodes], choice.begin)


def _left_out_by_user(job: JobNodes, job_id: str) -> list[str]:
    """The nodes that this job leaves out for good; those that the list brought in are not."""
    of_list = {one.node for one in _listed()}
    for attempt in job.cell.attempts():
        with contextlib.suppress(InputError):
            of_list.update(read_json(attempt.preflight).get("told_slurm") or [])
    of_list -= set(job.cluster.exclude)
    return [node for node in slurm.left_out_by(job_id) if node not in of_list]


def _listed() -> list[Excluded]:
    try:
        return read_excluded()
    except InputError:
        return []


def slurm_choice(job: JobNodes, of_user: Sequence[str]) -> Choice:
    """What Slurm is told to leave out beside `of_user`, of all nodes that this job could get."""
    needed = len(job.nodes)
    known = slurm.partition_nodes(os.environ.get("SLURM_JOB_PARTITION"))
    known = [node for node in known if node not in of_user]
    listed = {one.node: one for one in _listed()}
    now = time.time()
    for node, faults in job.faults.items():
        hours = max(fault.hours for fault in faults)
        # What could not be put on the list is left out all the same.
        if hours and node not in listed:
            listed[node] = Excluded(node, now + hours * 3600, all_of(faults))
    choice = choose(needed, known, list(listed.values()))
    if job.recipe.too_few_nodes == "stop":
        # Slurm waits for those that it has drained itself; this recipe does not.
        gone = ask_again(lambda _: slurm.drained(known))
        usable = [node for node in known if node not in gone]
        choice = choose(needed, usable, list(listed.values()))
        left = len(usable) - len(choice.nodes)
        if left < needed:
            choice = replace(choice, short=max(choice.short, needed - left))
    return choice


def write_found(
    job: JobNodes, chosen: Sequence[str], seconds: float, told: Sequence[str] = ()
) -> None:
    """Leave what was found in the attempt's folder.

    Args:
        told: nodes that Slurm is told to leave out.
    """
    content = {
        "nodes": list(chosen),
        "left_out": {node: all_of(faults) for node, faults in job.faults.items()},
        "told_slurm": list(told),
        "seconds": round(seconds, 1),
        "gb_per_s": {name: round(speed, 3) for name, speed in job.speeds.items()},
    }
    with contextlib.suppress(OSError):
        write_whole(job.attempt.preflight, json.dumps(content, indent=1) + "\n")
