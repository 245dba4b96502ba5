"""Slurm's commands, run here and nowhere else: submit, cancel, requeue, ask."""

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
# Of an enclosing job, and a user's own defaults: SQUEUE_PARTITION would hide jobs.
_OTHERS = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_")
# Without a width, squeue cuts fields.
_WIDTH = 64


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


def requeue(job_id: str) -> None:
    """Put a running job back into the queue; Slurm then ends it, and starts it again."""
    answer = _run(["scontrol", "requeue", job_id])
    if answer.returncode:
        raise JobError(f"scontrol requeue: {answer.stderr.strip() or answer.stdout.strip()}")


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
    found: dict[Path, str] = {}
    for job_id, command in sorted(lines, key=lambda line: int(line[0])):
        if command in named:
            found[named[command]] = job_id
    return found


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
