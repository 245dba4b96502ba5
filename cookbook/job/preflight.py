"""Before training: every node of the allocation is looked at, at once, and bad ones are left out.

A bad node is named with its reason and put on the list of `run.excluded`. Where spare nodes are in
the allocation, one takes its place. Where there is none, the job goes back to the queue and starts
without it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from cookbook.base.errors import InputError, JobError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.cells.cluster import Cluster, load_cluster
from cookbook.cells.recipe import Recipe, load_recipe
from cookbook.job.compare import Fault, Faults, common_fault, differing, skewed, told
from cookbook.job.leave import leave_for_queue
from cookbook.job.node import Question, Reader, Report
from cookbook.job.step import run_step
from cookbook.run import slurm
from cookbook.run.excluded import (
    PASSING_H,
    Choice,
    Excluded,
    choose,
    exclude_nodes,
    excluded_file,
    read_excluded,
)
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record

# What a node must answer in: its own commands take up to half of it.
LIMIT_S = 30.0
_MODES = ("full", "nodes", "off")


class CannotStartError(JobError):
    """Training cannot start, and starting the job again would not help."""


@dataclass
class Preflight:
    """What is known of the job and of its nodes."""

    cell: CellFolder
    attempt: Attempt
    record: CellRecord
    cluster: Cluster
    recipe: Recipe
    nodes: list[str]
    faults: Faults = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def well(self) -> list[str]:
        """The nodes that nothing is known against."""
        return [node for node in self.nodes if node not in self.faults]

    def say(self, words: str) -> None:
        """Write a line to the job's log and to the attempt's."""
        line = f"cookbook: preflight: {words}"
        print(line, file=sys.stderr, flush=True)
        with self.attempt.log.open("a", encoding="utf-8") as log:
            print(line, file=log)


def preflight(cell: CellFolder, number: int) -> list[str]:
    """Look at the nodes of this job; the nodes that attempt `number` trains on.

    Raises:
        CannotStartError: too few nodes are well, or what is wrong is no fault of a node.
    """
    record = read_record(cell.record).as_of(number)
    job = Preflight(
        cell=cell,
        attempt=Attempt(cell.path / f"attempt-{number}", number),
        record=record,
        cluster=load_cluster(_file(record, "cluster")),
        recipe=load_recipe(_file(record, "recipe")),
        nodes=slurm.nodes_in(os.environ["SLURM_JOB_NODELIST"]),
    )
    mode = os.environ.get("COOKBOOK_PREFLIGHT") or "full"
    if mode not in _MODES:
        raise InputError("COOKBOOK_PREFLIGHT", f"found {mode!r}, allowed: {', '.join(_MODES)}")
    if mode == "off":
        return job.nodes[: record.nodes]
    started = time.monotonic()
    leave_out_known(job)
    ask_nodes(job)
    remember(job)
    if len(job.well) < record.nodes:
        go_on_without(job)
    seconds = time.monotonic() - started
    chosen = job.well[: record.nodes]
    spare = len(job.well) - len(chosen)
    job.say(
        f"{len(chosen)} node(s) are well"
        + (f", {spare} spare" if spare else "")
        + f" ({seconds:.1f} s)"
    )
    _write(job, chosen, seconds)
    return chosen


def _file(record: CellRecord, part: str) -> str:
    """By what the part of the cell is found: its name, or the path of the user's own file."""
    return str(record.files.get(part) or getattr(record, part))


def leave_out_known(job: Preflight) -> None:
    """Leave out what is on the list, and what Slurm's own health checks have drained meanwhile."""
    try:
        listed = {one.node: one for one in read_excluded()}
    except InputError as error:
        # Somebody's slip in the list is no reason to stop a job at night.
        job.say(f"the list of nodes to leave out is not used: {error}")
        listed = {}
    for node, why in slurm.drained(job.nodes).items():
        job.faults[node] = [Fault("Slurm", why, 0.0)]
        job.say(f"{node}: {why}; left out")
    for node in job.nodes:
        if node in listed:
            job.faults[node] = [Fault("list", listed[node].reason, 0.0)]
            job.say(str(listed[node]))


def ask_nodes(job: Preflight) -> None:
    """Have all nodes look at themselves, and compare what they found."""
    asked, reports, received, errors = job.well, dict[str, Report](), dict[str, float](), ""
    if not asked:
        return
    reader = Reader()

    def on_line(line: str, moment: float) -> None:
        report = reader.read(line)
        if report is not None:
            reports[report.node], received[report.node] = report, moment

    question = _question(job)
    command = [sys.executable, "-m", "cookbook.job.node", json.dumps(asdict(question))]
    deadline, waiting, broken = time.monotonic() + LIMIT_S, list(asked), dict[str, str]()
    # Where a node cannot start its task, Slurm ends the others' too, those that answer late.
    for _ in range(2):
        left = deadline - time.monotonic()
        if not waiting or left < 1:
            break
        end = run_step(waiting, command, left, on_line)
        errors = end.errors
        broken |= end.not_launched
        waiting = [node for node in waiting if node not in reports and node not in broken]
        if not end.not_launched:
            break
    answers = [reports[node] for node in asked if node in reports]
    found: Faults = {}
    for node in asked:
        if node in reports:
            for check, (text, hours) in reports[node].problems.items():
                found.setdefault(node, []).append(Fault(check, text, hours))
        else:
            why = broken.get(node) or f"no answer in {LIMIT_S:.0f} s"
            found[node] = [Fault("answer", why + _words_of(node, errors), PASSING_H)]
    for faults in (differing(answers), skewed(answers, received)):
        for node, of_node in faults.items():
            found.setdefault(node, []).extend(of_node)
    if common := common_fault(found, asked):
        raise CannotStartError(f"preflight: {common}; no fault of single nodes, none is left out")
    job.faults |= found


def _question(job: Preflight) -> Question:
    options, record = job.record.options, job.record
    deepep = options.get("parallelism.expert_parallel_comm_backend") == "deepep"
    degree = options.get("parallelism.expert_parallel_degree") or 1
    paths = {
        "tokenizer": options.get("model.hf_assets_path"),
        "data": options.get("training.dataset_path"),
    }
    return Question(
        cluster=_file(record, "cluster"),
        folder=str(job.cell.path),
        deepep_between_nodes=deepep and degree > record.ranks_per_node,
        files={what: str(path) for what, path in paths.items() if path},
    )


def _words_of(node: str, errors: str) -> str:
    """The last of a node's own words among those of all tasks: srun's name the node."""
    words = [line for line in errors.splitlines() if f"{node}:" in line and "srun:" in line]
    return f" ({words[-1]})" if words else ""


def remember(job: Preflight) -> None:
    """Put the nodes that failed on the list, for this and all later jobs."""
    by_hours: dict[float, dict[str, str]] = {}
    for node, faults in job.faults.items():
        hours = max(fault.hours for fault in faults)
        if hours:
            by_hours.setdefault(hours, {})[node] = told(faults)
    for hours, reasons in by_hours.items():
        remember_nodes(job, reasons, hours)


def remember_nodes(job: Preflight, reasons: dict[str, str], hours: float) -> None:
    """Put these nodes on the list, and say so."""
    place = shown_path(excluded_file())
    try:
        exclude_nodes(reasons, hours)
    except (InputError, OSError) as error:
        job.say(f"not noted for later jobs: {error}")
        place = "by this job"
    for node, reason in reasons.items():
        job.say(f"{node}: {reason}; left out for {hours:.0f} h ({place})")


def go_on_without(job: Preflight) -> None:
    """Put the job back into the queue without its bad nodes; does not return."""
    missing = job.record.nodes - len(job.well)
    why = "; ".join(f"{node}: {told(faults)}" for node, faults in job.faults.items())
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts >= job.cluster.max_restarts:
        allowed = f"the job was started again {restarts} times already (max_restarts)"
        raise CannotStartError(f"preflight: {missing} node(s) too few, and {allowed}; {why}")
    choice = slurm_choice(job)
    if choice.short and job.recipe.too_few_nodes == "stop":
        raise CannotStartError(
            f"preflight: too few nodes are left, {choice.short} missing (too_few_nodes: stop); "
            f"{why}; have them repaired and delete their entries in {shown_path(excluded_file())}"
        )
    job_id = os.environ["SLURM_JOB_ID"]
    if choice.begin is not None:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(choice.begin))
        job.say(
            f"too few nodes are left, {choice.short} missing; waits in the queue until {until} "
            "(too_few_nodes: wait); to start sooner, delete entries in "
            f"{shown_path(excluded_file())}, then: "
            f"scontrol update JobId={job_id} StartTime=now ExcNodeList="
        )
    else:
        job.say(f"back to the queue, to start without {', '.join(job.faults)}")
    _write(job, [], 0.0)
    leave_for_queue(job_id, choice.nodes, choice.begin)


def slurm_choice(job: Preflight) -> Choice:
    """What Slurm is told to leave out, of all nodes that this job could get."""
    needed = len(job.nodes)
    known = slurm.partition_nodes(os.environ.get("SLURM_JOB_PARTITION"))
    try:
        listed = {one.node: one for one in read_excluded()}
    except InputError:
        listed = {}
    now = time.time()
    for node, faults in job.faults.items():
        hours = max(fault.hours for fault in faults)
        # What could not be put on the list is left out all the same.
        if hours and node not in listed:
            listed[node] = Excluded(node, now + hours * 3600, told(faults))
    choice = choose(needed, known, list(listed.values()))
    if job.recipe.too_few_nodes == "stop":
        # Slurm waits for those that it has drained itself; this recipe does not.
        usable = [node for node in known if node not in slurm.drained(known)]
        choice = choose(needed, usable, list(listed.values()))
        left = len(usable) - len(choice.nodes)
        if left < needed:
            choice = replace(choice, short=max(choice.short, needed - left))
    return choice


def _write(job: Preflight, chosen: Sequence[str], seconds: float) -> None:
    content = {
        "nodes": list(chosen),
        "left_out": {node: told(faults) for node, faults in job.faults.items()},
        "seconds": round(seconds, 1),
        **job.notes,
    }
    write_whole(job.attempt.preflight, json.dumps(content, indent=1) + "\n")
