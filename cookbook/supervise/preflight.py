"""Check the job's nodes before training: exclude the bad ones, and choose the nodes to train on.

A bad node is put on the exclusion list (`run.excluded`), and a spare node of the allocation
replaces it. Without a spare node, the job is requeued and starts without the bad node.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cookbook.base.errors import InputError, JobError
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT
from cookbook.base.yamlfile import shown_path
from cookbook.config.cluster import Cluster, cluster_from_record
from cookbook.config.dialect.argv import argv_of
from cookbook.config.dialect.names import PACKAGE
from cookbook.config.facts import facts_of
from cookbook.config.options import options_of
from cookbook.config.validate import may_read_texts
from cookbook.doctor.check import HARDWARE_H, PASSING_H, Fault
from cookbook.run import excluded, own_job, slurm
from cookbook.run.excluded import Choice, Excluded, excluded_file
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord
from cookbook.run.slurm import StepEnd, retry_while_busy, run_step
from cookbook.run.status import read_json
from cookbook.supervise.exits import RULES, Action, Decision, job_ends
from cookbook.supervise.network_test import check_links
from cookbook.supervise.node_report import Report, ReportReader

# Time limit for a node's report, in seconds. Each command that it runs has half of that.
REPORT_S = 30.0
_MOST_DIFFERENCES = 3
# Jobs list at most one in so many nodes of a partition: more have a common cause.
_SHARE = 2
_RESOLVE_S = 60.0
# The last line of a rehearsal, before what it raised.
REHEARSED, _REHEARSAL_S = "cookbook-rehearsed ", 120.0


class RequeueNeededError(JobError):
    """The job must be requeued, as `decision` says."""

    def __init__(self, why: str, decision: Decision) -> None:
        super().__init__(why)
        self.decision = decision


Faults = dict[str, list[Fault]]


@dataclass
class JobNodes:
    """The nodes of the job, and their faults so far."""

    cell: CellFolder
    attempt: Attempt
    record: CellRecord
    cluster: Cluster
    nodes: list[str]
    faults: Faults = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> list[str]:
        return [node for node in self.nodes if node not in self.faults]

    @property
    def reasons(self) -> dict[str, str]:
        return {node: "; ".join(one.reason for one in self.faults[node]) for node in self.faults}

    def listed(self) -> dict[str, Excluded]:
        """Return the exclusion list's entries by node; if malformed, log that and return {}."""
        try:
            return {one.node: one for one in excluded.read_excluded()}
        except InputError as error:
            self.log(f"the exclusion list is ignored: {error}")
            return {}

    def exclude(self, found: Faults) -> None:
        """Record these faults, and put their nodes on the exclusion list for later jobs."""
        if found and slurm.is_preempted(own_job.slurm_job() or ""):
            # It gives the checks' steps SIGTERM, too.
            raise JobError("Slurm preempts this job; none of its nodes is excluded")
        self.faults |= found
        for node, faults in found.items():
            hours, place = max(fault.hours for fault in faults), shown_path(excluded_file())
            try:
                self._refuse_too_many(node)
                excluded.exclude_nodes({node: self.reasons[node]}, hours)
            except (InputError, OSError) as error:
                self.log(f"not noted for later jobs: {error}")
                place = "by this job"
            self.log(f"{node}: {self.reasons[node]}; excluded for {hours:.0f} h ({place})")

    def _refuse_too_many(self, node: str) -> None:
        known = slurm.partition_nodes(os.environ.get("SLURM_JOB_PARTITION"))
        listed = [one for one in self.listed() if one in known and one != node]
        if known and len(listed) + 1 > max(1, len(known) // _SHARE):
            found = f"has {len(listed)} of {len(known)} nodes, at most one in {_SHARE} is listed"
            raise InputError(
                shown_path(excluded_file()), found, "look whether the profile is right"
            )

    def log(self, words: str) -> None:
        own_job.log(f"preflight: {words}", self.attempt)


def preflight(cell: CellFolder, attempt: Attempt, record: CellRecord) -> list[str]:
    """Check the nodes of this job; return the nodes to train on.

    Raises:
        JobError: too few nodes are healthy, or a fault cannot be traced to nodes.
        RequeueNeededError: the job must be requeued to replace its bad nodes.
    """
    nodes = slurm.nodes_in(os.environ["SLURM_JOB_NODELIST"])
    mode = os.environ.get("COOKBOOK_PREFLIGHT") or "full"
    if mode == "off":
        return nodes[: record.nodes]
    job = JobNodes(cell, attempt, record, cluster_from_record(record), nodes)
    started = time.monotonic()
    with rehearsed(job) if mode == "full" else contextlib.nullcontext():
        _check_nodes(job, mode)
    chosen = job.healthy[: record.nodes]
    spare, seconds = len(job.healthy) - len(chosen), time.monotonic() - started
    job.log(
        f"{len(chosen)} healthy node(s)"
        + (f", {spare} spare" if spare else "")
        + "".join(f", {name} {speed:.3g} GB/s" for name, speed in job.speeds.items())
        + f" ({seconds:.1f} s)"
    )
    _write_findings(job, chosen, seconds)
    return chosen


@contextlib.contextmanager
def rehearsed(job: JobNodes) -> Iterator[None]:
    """Rehearse the job beside the block, as `check` does, but without the model.

    Raises InputError for what would end the ranks. Only a job's first attempt is rehearsed.
    """
    # Training in a container has torch only in its image.
    if job.cluster.container or job_ends(job.cell):
        yield
        return
    started, facts, options = time.monotonic(), facts_of(job.record), options_of(job.record)
    question = {
        "argv": argv_of(options.stack, options.settings),
        "readers": facts.layout.replicas,
        "reads_texts": may_read_texts(facts),
    }
    python = f"{os.environ.get('VENV') or sys.prefix}/bin/python"
    process = subprocess.Popen(
        [python, "-m", f"{PACKAGE}.rehearsal", json.dumps(question)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        yield
        said, _ = process.communicate(timeout=_REHEARSAL_S)
    except subprocess.TimeoutExpired:
        said = f"no answer in {_REHEARSAL_S:.0f} s"
    finally:
        process.kill()
        process.wait()
    answers, refusals = (
        [line.partition(mark)[2] for line in said.splitlines() if mark in line]
        for mark in (REHEARSED, "cookbook refuses: ")
    )
    if fault := "".join(answers[-1:]):
        where, fault = job.record.name or job.cell.name, (refusals or [fault])[-1]
        raise InputError(where, f"its rehearsal failed: {fault}", "correct its options or files")
    seconds, last = time.monotonic() - started, said.strip().rpartition("\n")[2]
    job.log(f"rehearsed ({seconds:.1f} s)" if answers else f"not rehearsed: {last}")


def _check_nodes(job: JobNodes, mode: str) -> None:
    listed = job.listed()
    for node, why in retry_while_busy(lambda _: slurm.drained(job.nodes)).items():
        job.faults[node] = [Fault("Slurm", why, 0.0)]
        job.log(f"{node}: {why}; excluded")
    for node in filter(listed.get, job.nodes):
        job.faults[node] = [Fault("list", listed[node].reason, 0.0)]
        job.log(str(listed[node]))
    ask_nodes(job)
    require_nodes(job)
    while mode == "full" and not check_network(job):
        require_nodes(job)


def ask_nodes(job: JobNodes) -> None:
    """Ask nodes without known faults to report; exclude those that are faulty or do not answer."""
    asked, reports = job.healthy, dict[str, Report]()
    if not asked:
        return
    reader = ReportReader()

    def on_line(line: str) -> None:
        if (report := reader.read(line)) is not None:
            reports[report.node] = report

    facts, record = facts_of(job.record), job.record
    paths, texts = {"tokenizer": facts.assets}, dict[str, list[str]]()
    for kind, read in zip(("", "validation "), facts.readers, strict=False):
        paths[f"{kind}data"], texts[f"{kind}texts"] = read.path, read.files
    question = {
        "cluster": job.cluster.name,
        "profile": dict(record.profile),
        "folder": str(job.cell.path),
        "needs_ibgda": facts.exchange.needs_ibgda and facts.layout.ep > record.ranks_per_node,
        "files": {name: path for name, path in paths.items() if path},
        "texts": {name: files for name, files in texts.items() if files},
    }
    module, text = "cookbook.supervise.node_report", json.dumps(question)
    left, waiting, silent = REPORT_S, list(asked), dict[str, str]()
    # If one node cannot start its task, Slurm ends all unfinished tasks: run those again.
    for _ in range(2):
        if not waiting or left < 1:
            break
        end = run_step(waiting, module, text, left, on_line)
        left -= end.seconds
        for node in waiting:
            silent[node] = end.not_launched.get(node) or _last_words(node, end)
        waiting = [node for node in waiting if node not in reports | end.not_launched]
        if not end.not_launched:
            break
    different = differing([reports[node] for node in asked if node in reports])
    found = dict[str, list[Fault]]()
    for node in asked:
        known = reports.get(node)
        faults = known.faults if known else [Fault("answer", silent[node], PASSING_H)]
        faults += [different[node]] if node in different else []
        if faults:
            found[node] = faults
    # A job of few nodes shows a common fault only over its attempts, each on other nodes.
    before, others = _earlier(job)
    nodes = dict.fromkeys([*others, *asked])
    if found and (common := common_fault({**before, **found}, [*nodes])):
        raise JobError(f"{common}; no fault of single nodes, none is excluded")
    job.exclude(found)


def _earlier(job: JobNodes) -> tuple[Faults, list[str]]:
    """Return the faults that this job's earlier attempts found, and the nodes that they asked."""
    found, asked = dict[str, list[Fault]](), list[str]()
    for end in job_ends(job.cell):
        findings = read_json(job.cell.attempt(end.attempt).preflight)
        asked += findings.get("asked", ())
        for node, faults in findings.get("faults", {}).items():
            found[node] = [Fault(*one) for one in faults]
    return found, asked


def _last_words(node: str, end: StepEnd) -> str:
    if end.is_late:
        return f"no answer in {REPORT_S:.0f} s"
    lines = end.errors.splitlines()
    told = [line for line in lines if f"srun: error: {node}: " in line or "srun: " not in line]
    return "; ".join(["no answer", *filter(None, told[-2:])])


def differing(reports: Sequence[Report]) -> dict[str, Fault]:
    """Return a fault for each node whose software, files or hardware differ from the majority's."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        # A node without GPUs reports no driver version; another check covers that.
        values = {report.node: report.facts[name] for report in reports if name in report.facts}
        ((usual, _),) = Counter(values.values()).most_common(1)
        for node, value in values.items():
            if value != usual:
                found.setdefault(node, []).append(f"{name} is {value}, elsewhere {usual}")
    faults = {}
    for node, different in found.items():
        shown = different[:_MOST_DIFFERENCES]
        if more := different[_MOST_DIFFERENCES:]:
            shown.append(f"and {len(more)} more")
        faults[node] = Fault("same software", "; ".join(shown), PASSING_H)
    return faults


def common_fault(faults: Faults, nodes: Sequence[str]) -> str | None:
    """Return a fault that more than half of the nodes, and at least two, share; else None.

    Such a fault comes from the cluster or the job, so excluding the nodes would not help.
    """
    found = [(one.check, f"{node}: {one.reason}") for node in faults for one in faults[node]]
    for check, count in Counter(check for check, _ in found).items():
        if count > 1 and 2 * count > len(nodes):
            return f"{check}: {count} of {len(nodes)} nodes, {dict(reversed(found))[check]}"
    return None


def check_network(job: JobNodes) -> bool:
    """Test the network and exclude bad nodes; return False if there were any."""
    record, cluster = job.record, job.cluster
    # Skip the test if training uses a container: torch is only in its image, which starts slowly.
    if cluster.bandwidth is None or cluster.container or record.world < 2:
        return True
    nodes = job.healthy[: record.nodes]
    verdict = check_links(nodes, cluster.device, record.ranks_per_node, cluster.bandwidth)
    job.speeds = dict(sorted(verdict.slowest.items()))
    if verdict.error:
        raise JobError(f"{verdict.error}; no fault of single nodes")
    if verdict.warning:
        job.log(f"{verdict.warning}; training starts all the same")
    bad = {node: [Fault("network test", why, HARDWARE_H)] for node, why in verdict.bad.items()}
    job.exclude(bad)
    return not bad


def require_nodes(job: JobNodes) -> None:
    """Check that the job has enough healthy nodes.

    Raises:
        RequeueNeededError: too few nodes are healthy, and a requeue can replace the others.
        JobError: too few nodes are healthy, and the job must not be requeued.
    """
    missing = job.record.nodes - len(job.healthy)
    if missing <= 0:
        return
    why = "; ".join(f"{node}: {reason}" for node, reason in job.reasons.items())
    failures = sum(RULES[end.cause].is_counted for end in job_ends(job.cell))
    if failures >= job.record.max_restarts:
        allowed = f"restarted {failures} times already, as max_restarts allows"
        raise JobError(f"{missing} node(s) too few, and {allowed}; {why}")
    job_id = own_job.slurm_job() or ""
    # Go on excluding the nodes that the user or the profile excludes. Those that the submission or
    # an earlier check excluded are judged anew, because their exclusion may have expired.
    of_list = {*job.listed(), *os.environ.get(excluded.EXCLUDED_VARIABLE, "").split(",")}
    for end in job_ends(job.cell):
        of_list.update(read_json(job.cell.attempt(end.attempt).preflight).get("for_slurm", ()))
    of_list -= set(job.cluster.exclude)
    of_user = [node for node in slurm.excluded_by(job_id) if node not in of_list]
    choice = _slurm_choice(job, of_user)
    if choice.short and job.record.too_few_nodes == "stop":
        raise JobError(
            f"not enough healthy nodes, {choice.short} missing (too_few_nodes: stop); "
            f"{why}; have them repaired and delete their entries in {shown_path(excluded_file())}"
        )
    words = f"requeued without {', '.join(job.faults)}"
    if choice.begin is None:
        job.log(words)
    else:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(choice.begin))
        words = f"{words}; waits in the queue until {until}"
        job.log(
            f"not enough healthy nodes, {choice.short} missing; waits in the queue until {until} "
            "(too_few_nodes: wait); to start sooner, delete entries in "
            f"{shown_path(excluded_file())}, then: "
            f"scontrol update JobId={job_id} StartTime=now ExcNodeList={','.join(of_user)}"
        )
    _write_findings(job, [], 0.0, for_slurm=choice.nodes)
    exclude = [*of_user, *choice.nodes]
    raise RequeueNeededError(why, Decision(Action.REQUEUE, words, exclude, choice.begin))


def _slurm_choice(job: JobNodes, of_user: Sequence[str]) -> Choice:
    listed, now = job.listed(), time.time()
    known = slurm.partition_nodes(os.environ.get("SLURM_JOB_PARTITION"))
    known = [node for node in known if node not in of_user]
    for node, faults in job.faults.items():
        hours = max(fault.hours for fault in faults)
        # Also exclude faulty nodes that could not be written to the exclusion list.
        if hours and node not in listed:
            listed[node] = Excluded(node, now + hours * 3600, job.reasons[node])
    return excluded.choose(len(job.nodes), known, list(listed.values()))


def _write_findings(
    job: JobNodes, chosen: Sequence[str], seconds: float, for_slurm: Sequence[str] = ()
) -> None:
    content = {
        "nodes": list(chosen),
        "asked": job.nodes,
        "excluded": job.reasons,
        # Those of the list and of Slurm (0 hours) were found by others.
        "faults": {
            node: [list(one) for one in faults if one.hours] for node, faults in job.faults.items()
        },
        "for_slurm": list(for_slurm),
        "seconds": round(seconds, 1),
        "gb_per_s": {name: round(speed, 3) for name, speed in job.speeds.items()},
    }
    with contextlib.suppress(OSError):
        write_whole(job.attempt.preflight, json.dumps(content, indent=1) + "\n")


def head_address(node: str) -> str:
    """Return the head node's address, resolved once so that all nodes use the same address.

    Raises:
        JobError: neither Slurm nor DNS returns an address within a minute.
    """
    deadline = time.monotonic() + _RESOLVE_S
    while True:
        # A node may resolve its own name to loopback, so Slurm's address comes first.
        address = slurm.node_addresses([node])[node]
        with contextlib.suppress(OSError):
            resolved = str(socket.getaddrinfo(address, None, socket.AF_INET)[0][4][0])
            return address if resolved.startswith("127.") else resolved
        if time.monotonic() > deadline:
            wrong = "neither Slurm nor DNS has its address"
            raise JobError(f"cannot resolve the head node {node}: {wrong}")
        time.sleep(2)
