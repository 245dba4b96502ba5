"""Slurm's commands, run here and nowhere else: submit, cancel, ask."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.base.errors import JobError

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"})
ACTIVE = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED"})
SUCCEEDED = frozenset({"COMPLETED"})
STOPPED = frozenset({"CANCELLED"})


@dataclass(frozen=True)
class JobInfo:
    """A job's state, in Slurm's words, and why it is in it; `exit_code` where it has ended."""

    state: str
    reason: str
    nodes: str = ""


def submit_environment() -> dict[str, str]:
    """The environment without what an enclosing job left in it, which would change the new job.

    SLURM_CONF says where Slurm is, so it stays.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_")) or name == "SLURM_CONF"
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


def _from_squeue(wanted: set[str]) -> dict[str, JobInfo]:
    # All of the user's jobs at once: an id that squeue forgot is an error for all the others.
    answer = _run(["squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r|%N"])
    if answer.returncode:
        raise JobError(
            f"squeue: {answer.stderr.strip() or 'no answer'}; the cluster's state is not known now"
        )
    infos = {}
    for line in answer.stdout.splitlines():
        job_id, _, rest = line.partition("|")
        if job_id in wanted and rest.count("|") >= 2:
            state, reason, nodes = rest.split("|", 2)
            infos[job_id] = JobInfo(state, "" if reason == "None" else reason, nodes)
    return infos


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


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env=submit_environment(),
        )
    except FileNotFoundError:
        raise JobError(
            f"{command[0]} is not on PATH; log in to the cluster, or use --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        raise JobError(f"{command[0]}: no answer in 60 s; is the Slurm controller up?") from None
