"""Slurm's commands, run here and nowhere else: submit, cancel, ask, go back to the queue.

`job.step` alone starts steps of a job.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.errors import JobError

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED"})
# Requeued or left without its reservation, such a job waits for somebody to release it.
WAITING |= {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
# On its way back to the queue: by a federation, or at once (Slurm 25.11).
WAITING |= {"REQUEUE_FED", "EXPEDITING"}
ACTIVE = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"})
# These keep their nodes, and their processes are stopped.
HALTED = frozenset({"SUSPENDED", "STOPPED"})
ACTIVE |= HALTED
SUCCEEDED = frozenset({"COMPLETED"})
STOPPED = frozenset({"CANCELLED"})
# Of an enclosing job, and a user's own defaults: SQUEUE_PARTITION would hide jobs.
_OTHERS = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_")
# A `*` stands for a node that does not answer.
_LOST = re.compile(r"^(?:down|drain|fail|unknown|error|future)|\*$")
# What its commands say of a controller that is busy, or away for a while.
_PASSING = re.compile(r"contact slurm controller|timed out|zero bytes|temporarily", re.IGNORECASE)
# Without a width, squeue cuts fields.
_WIDTH = 64


class NoAnswerError(JobError):
    """The controller does not answer now, and may do so later."""


def is_passing(errors: str) -> bool:
    """Whether what a command of Slurm said is that the controller is busy, or away."""
    return bool(_PASSING.search(errors))


@dataclass(frozen=True)
class JobInfo:
    """A job's state and why it is in it, in Slurm's words, and how often it was requeued."""

    state: str
    reason: str
    restarts: int = 0


def submit_environment() -> dict[str, str]:
    """The environment without what would change a new job, or what is seen of one.

    SLURM_CONF says where Slurm is, so it stays.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHERS) or name == "SLURM_CONF"
    }


def sbatch(script: Path, folder: Path) -> str:
    """Queue `script` with `folder` as its working directory; the job's id."""
    answer = _run(["sbatch", "--parsable", f"--chdir={folder}", str(script)])
    if answer.returncode:
        lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
        said = "; ".join(line.removeprefix("sbatch: error: ") for line in lines)
        if "onfiguration source" in said or "contact slurm controller" in said:
            said += "; log in to the cluster, or use --cluster local"
        raise JobError(f"sbatch refused it: {said}")
    # With federations: `id;cluster`. Warnings go to stderr.
    job_id = answer.stdout.strip().partition(";")[0]
    if not job_id.isdigit():
        raise JobError(f"sbatch {script}: no job id in its answer {answer.stdout.strip()!r}")
    return job_id


def scancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs; one that has ended already is none of scancel's errors."""
    answer = _run(["scancel", *job_ids])
    if answer.returncode:
        raise JobError(f"scancel: {answer.stderr.strip()}")


def requeue(
    job_id: str, leave_out: Sequence[str] | None = None, begin: float | None = None
) -> None:
    """Put a running job back into the queue, under its id; Slurm ends what it runs.

    A running job cannot be told what to leave out, so that comes second: a caller that wants it
    must outlast Slurm's signal.

    Args:
        leave_out: these nodes and no others; None for those that it leaves out already.
        begin: the earliest start, in seconds since the epoch.
    """
    changes = []
    if leave_out is not None:
        changes.append(f"ExcNodeList={','.join(leave_out)}")
    if begin is not None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin))
        changes.append(f"StartTime={moment}")
    commands = [["scontrol", "requeue", job_id]]
    if changes:
        commands.append(["scontrol", "update", f"JobId={job_id}", *changes])
    for command in commands:
        answer = _run(command)
        if answer.returncode:
            raise JobError(f"{' '.join(command)}: {(answer.stderr or answer.stdout).strip()}")


def lost_nodes(node_list: str) -> list[str]:
    """Those of these nodes that Slurm gives no work to: down, drained, or not answering."""
    answer = _run(["sinfo", "--noheader", "--Node", f"--nodes={node_list}", "--format=%N %T"])
    if answer.returncode:
        raise JobError(f"sinfo: {answer.stderr.strip() or 'no answer'}")
    states = dict(line.split() for line in answer.stdout.splitlines())
    return [node for node, state in states.items() if _LOST.search(state)]


def kill_steps(job_id: str, name: str) -> int:
    """End the steps of this name in a job, all their processes on all nodes; how many there were.

    Other steps of the job, such as a user's own shell in it, go on.
    """
    answer = _run(["squeue", "--steps", f"--jobs={job_id}", "--noheader", "--format=%i %j"])
    steps = [line.split(maxsplit=1) for line in answer.stdout.splitlines()]
    named = [step for step, *rest in steps if rest == [name]]
    if named:
        _run(["scancel", "--signal=KILL", *named])
    return len(named)


def job_infos(job_ids: Iterable[str]) -> dict[str, JobInfo]:
    """What is known of the jobs, from the controller and, for older ones, from accounting.

    The controller forgets a finished job after MinJobAge, and accounting may be off: a job that is
    missing from the answer is one that nobody knows any more.
    """
    wanted = set(job_ids)
    if not wanted:
        return {}
    infos = _from_squeue(wanted)
    if missing := wanted - infos.keys():
        infos.update(_from_sacct(missing))
    return infos


def jobs_by_script(scripts: Iterable[Path], uid: int) -> dict[Path, str]:
    """The newest job of each of these batch files, among the jobs of the user `uid`."""
    named = {str(script.resolve()): script for script in scripts}
    lines = _squeue(f"--user={uid}", f"--Format=JobID:{_WIDTH}|,Command:4096|")
    # Other jobs have commands of any kind, of several lines as well.
    rows = [line for line in lines if len(line) == 2 and line[0].isdecimal()]
    found: dict[Path, str] = {}
    for job_id, command in sorted(rows, key=lambda row: int(row[0])):
        if command in named:
            found[named[command]] = job_id
    return found


def partition_nodes(partition: str | None) -> list[str]:
    """The nodes of the partition, by default Slurm's default one; empty where Slurm says nothing.

    Nodes that are down or drained are among them: a job may wait for those.
    """
    answer = _run(["sinfo", "--noheader", "--Node", "--format=%N %P"])
    if answer.returncode:
        return []
    rows = [line.split() for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 2]
    if partition:
        # A job may name several, of which it gets one.
        wanted = partition.split(",")
        return sorted({name for name, where in rows if where.rstrip("*") in wanted})
    return sorted({name for name, where in rows if where.endswith("*")})


@functools.cache
def node_groups() -> list[tuple[int, str]] | None:
    """The nodes that Slurm reports: how many have which generic resources.

    Empty where it does not answer; None where its commands are not configured, so there is none.
    """
    try:
        answer = _run(["sinfo", "--noheader", "--format=%D %G"], timeout=5)
    except JobError as error:
        return [] if isinstance(error, NoAnswerError) else None
    if "Could not establish a configuration source" in answer.stderr:
        return None
    rows = [line.split(maxsplit=1) for line in answer.stdout.splitlines()]
    return [(int(row[0]), row[1]) for row in rows if len(row) == 2 and row[0].isdigit()]


def nodes_in(node_list: str) -> list[str]:
    """The nodes of a list in Slurm's notation (`worker-[0-3,7]`), in its order."""
    answer = _run(["scontrol", "show", "hostnames", node_list])
    if answer.returncode:
        raise JobError(f"scontrol show hostnames {node_list}: {answer.stderr.strip()}")
    return answer.stdout.split()


def node_addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Where each node is reached: as Slurm has it, since a node's own name may lead to loopback."""
    answer = _run(["scontrol", "show", "node", "--oneliner", ",".join(nodes)])
    found = dict.fromkeys(nodes, "")
    for line in answer.stdout.splitlines():
        name, address = re.match(r"NodeName=(\S+)", line), re.search(r" NodeAddr=(\S+)", line)
        if name and address and name[1] in found:
            found[name[1]] = address[1]
    return {name: address or name for name, address in found.items()}


def drained(nodes: Sequence[str]) -> dict[str, str]:
    """Those of `nodes` that Slurm gives to no further job, and the reason that it was told."""
    answer = _run(["scontrol", "show", "node", "--oneliner", ",".join(nodes)])
    if answer.returncode and is_passing(answer.stderr):
        raise NoAnswerError(f"scontrol show node: {answer.stderr.strip()}")
    found = {}
    for line in answer.stdout.splitlines():
        name = re.match(r"NodeName=(\S+)", line)
        state = re.search(r" State=(\S+)", line)
        # Of a node that answers no more, Slurm says DOWN, with a star before.
        if name and state and re.search("DRAIN|FAIL|DOWN", state[1]):
            reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?(?: Comment=.*)?$", line)
            found[name[1]] = f"Slurm: {state[1]}" + (f": {reason[1].strip()}" if reason else "")
    return found


def left_out_by(job_id: str) -> list[str]:
    """The nodes that the job was told to leave out."""
    shown = _run(["scontrol", "show", "job", job_id]).stdout
    found = re.search(r"\bExcNodeList=(\S+)", shown)
    return nodes_in(found[1]) if found and found[1] != "(null)" else []


def is_own(folder: Path) -> bool:
    """Whether jobs that this user may always see belong to the run in `folder`."""
    return os.getuid() in (0, folder.stat().st_uid)


def _from_squeue(wanted: set[str]) -> dict[str, JobInfo]:
    # By id and not by user: a colleague's run is to be seen as well.
    fields = ",".join(f"{name}:{_WIDTH}|" for name in ("JobID", "State", "Reason", "RestartCnt"))
    lines = _squeue(f"--jobs={','.join(sorted(wanted))}", f"--Format={fields}")
    return {
        job_id: JobInfo(state, "" if reason == "None" else reason, int(restarts))
        for job_id, state, reason, restarts in lines
        if job_id in wanted
    }


def _squeue(*options: str) -> list[list[str]]:
    """The fields of each job that squeue shows."""
    answer = _run(["squeue", "--states=all", "--noheader", *options])
    # Of one id that it forgot, squeue makes an error; of one among several, nothing.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise JobError(
            f"squeue: {answer.stderr.strip() or 'no answer'}; the cluster's state is not known now"
        )
    return [
        [field.strip() for field in line.split("|")[:-1]] for line in answer.stdout.splitlines()
    ]


def _from_sacct(wanted: set[str]) -> dict[str, JobInfo]:
    if shutil.which("sacct") is None:
        return {}
    answer = _run(
        [
            *("sacct", "--noheader", "--parsable2", "--allocations"),
            *("--format=JobIDRaw,State,ExitCode", f"--jobs={','.join(sorted(wanted))}"),
        ]
    )
    if answer.returncode:
        return {}
    infos = {}
    for line in answer.stdout.splitlines():
        job_id, _, rest = line.partition("|")
        if job_id in wanted:
            state, _, code = rest.partition("|")
            # "CANCELLED by 1000"
            infos[job_id] = JobInfo(state.partition(" ")[0], f"exit code {code}" if code else "")
    return infos


def _run(command: list[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=submit_environment(),
        )
    except FileNotFoundError:
        raise JobError(
            f"{command[0]} is not on PATH; log in to the cluster, or use --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        words = f"{command[0]}: no answer in {timeout:g} s; is the Slurm controller up?"
        raise NoAnswerError(words) from None
