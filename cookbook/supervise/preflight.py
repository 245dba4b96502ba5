"""Before training: every node of the allocation is looked at, at once, and bad ones are left out.

A bad node is named with its reason and put on the list of `run.excluded`. Where spare nodes are in
the allocation, one takes its place. Where there is none, the job goes back to the queue and starts
without it.
"""

from __future__ import annotations

import os
import time

from cookbook.base.errors import InputError
from cookbook.config.cluster import load_cluster
from cookbook.config.recipe import load_recipe
from cookbook.run import slurm
from cookbook.run.excluded import HARDWARE_H, read_excluded
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.supervise.ask import ask_nodes
from cookbook.supervise.compare import Fault
from cookbook.supervise.links import Links, check_links
from cookbook.supervise.nodes import (
    CannotStartError,
    JobNodes,
    go_on_without,
    remember,
    remember_nodes,
    write_found,
)
from cookbook.supervise.patience import ask_again

_MODES = ("full", "nodes", "off")


def preflight(cell: CellFolder, number: int) -> list[str]:
    """Look at the nodes of this job; the nodes that attempt `number` trains on.

    Raises:
        CannotStartError: too few nodes are well, or what is wrong is no fault of a node.
    """
    record = read_record(cell.record).as_of(number)
    job = JobNodes(
        cell=cell,
        attempt=Attempt(cell.path / f"attempt-{number}", number),
        record=record,
        cluster=load_cluster(_file(record, "cluster")),
        cluster_name=_file(record, "cluster"),
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
    if mode == "full":
        look_at_links(job)
    seconds = time.monotonic() - started
    chosen = job.well[: record.nodes]
    spare = len(job.well) - len(chosen)
    job.say(
        f"{len(chosen)} node(s) are well"
        + (f", {spare} spare" if spare else "")
        + "".join(f", {name} {speed:.3g} GB/s" for name, speed in job.speeds.items())
        + f" ({seconds:.1f} s)"
    )
    write_found(job, chosen, seconds)
    return chosen


def _file(record: CellRecord, part: str) -> str:
    """By what the part of the cell is found: its name, or the path of the user's own file."""
    return str(record.files.get(part) or getattr(record, part))


def leave_out_known(job: JobNodes) -> None:
    """Leave out what is on the list, and what Slurm's own health checks have drained meanwhile."""
    try:
        listed = {one.node: one for one in read_excluded()}
    except InputError as error:
        # Somebody's slip in the list is no reason to stop a job at night.
        job.say(f"the list of nodes to leave out is not used: {error}")
        listed = {}
    for node, why in ask_again(lambda _: slurm.drained(job.nodes)).items():
        job.faults[node] = [Fault("Slurm", why, 0.0)]
        job.say(f"{node}: {why}; left out")
    for node in job.nodes:
        if node in listed:
            job.faults[node] = [Fault("list", listed[node].reason, 0.0)]
            job.say(str(listed[node]))


def look_at_links(job: JobNodes) -> None:
    """Test the network among the nodes that would train, until no bad one is among them."""
    record, cluster = job.record, job.cluster
    # In a container torch is in the image, and its start alone would take longer than the test.
    if cluster.bandwidth is None or cluster.container or record.world < 2:
        return
    degrees = [
        record.options.get(f"parallelism.{name}_parallel_degree") or 1
        for name in ("expert", "expert_tensor")
    ]
    links = Links(record.ranks_per_node, cluster.device, cluster.bandwidth, *degrees)
    while True:
        verdict = check_links(job.well[: record.nodes], links)
        job.speeds = verdict.slowest
        if verdict.error:
            raise CannotStartError(f"{verdict.error}; no fault of single nodes")
        if verdict.warning:
            job.say(f"{verdict.warning}; training starts all the same")
        if not verdict.bad:
            return
        job.faults |= {
            node: [Fault("network test", said, HARDWARE_H)] for node, said in verdict.bad.items()
        }
        remember_nodes(job, verdict.bad, HARDWARE_H)
        if len(job.well) < record.nodes:
            go_on_without(job)
