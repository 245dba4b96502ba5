"""Run Slurm's commands for all code but job scripts and `doctor`, which call some directly."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cookbook.base.errors import JobError

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "EXPEDITING"})
WAITING |= {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}  # jobs held until a user releases them
ACTIVE = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"})
# Jobs in these states keep their nodes, but their processes are stopped.
HALTED = frozenset({"SUSPENDED", "STOPPED"})
ACTIVE |= HALTED
# Prefixes of variables that Slurm's commands must not see: SQUEUE_PARTITION would hide jobs.
_OTHERS = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_")
# A trailing `*` marks a node that does not respond.
_LOST = re.compile(r"^(?:down|drain|fail|unknown|error|future)|\*$")
# Transient errors: the controller or munge is busy or restarting. In its first minutes back, the
# controller takes the memory of steps that have ended for used.
_PASSING = re.compile(
    r"contact slurm controller|timed out|zero bytes|temporarily|munge|authentication"
    r"|memory required by task",
    re.IGNORECASE,
)
# squeue truncates fields without a width. The command comes last, since it may have line breaks.
_FIELDS = "JobArrayID:64|,State:64|,Reason:64|,RestartCnt:64|,Command:4096|"
# Timeout in seconds for Slurm's answer while a user waits.
PATIENCE_S = 2.5
_COMMAND_S = 60.0


class NoAnswerError(JobError):
    """An error raised when Slurm's controller does not answer; a retry may succeed."""


@dataclass(frozen=True)
class JobInfo:
    """A job's state and reason in Slurm's words, its number of requeues, and its batch file."""

    state: str
    reason: str
    restarts: int = 0
    job_id: str = ""
    script: str = ""


def submit_environment() -> dict[str, str]:
    """Return the environment without Slurm's variables, except SLURM_CONF."""
    return {
        name: value
        for name, value in os.environ.items()
        # Slurm's commands need SLURM_CONF to find the configuration.
        if not name.startswith(_OTHERS) or name == "SLURM_CONF"
    }


@contextlib.contextmanager
def hidden_variables() -> Iterator[None]:
    """Hide Slurm's variables from what is submitted meanwhile, as `submit_environment` does."""
    before = dict(os.environ)
    kept = submit_environment()
    for name in before.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def submission_error(said: str) -> str:
    """Return the message for what sbatch said when it refused a job."""
    lines = said.strip().splitlines()
    said = "; ".join(line.removeprefix("sbatch: error: ") for line in lines)
    if "onfiguration source" in said:
        said += "; log in to the cluster, or use --cluster local"
    elif _PASSING.search(said):
        said += "; Slurm does not answer now: try again later"
    return f"sbatch refused it: {said}"


def refusal_of(words: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """Return why sbatch would refuse these arguments, or None; nothing is submitted."""
    answer = _run(["sbatch", "--test-only", *words], variables=variables)
    return answer.stderr.strip() if answer.returncode else None


def scancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs; scancel ignores jobs that have already ended."""
    _output_of(["scancel", *job_ids])


def requeue(job_id: str, exclude: Sequence[str] | None, begin: float | None) -> None:
    """Requeue a running job under the same id, which ends its processes.

    `exclude`: nodes to exclude (None: no change); `begin`: earliest start (None: now).

    Slurm changes a job's excluded nodes only while it is pending, so they are set after the
    requeue. A caller inside the job must therefore survive the signal that the requeue sends.
    """
    _output_of(["scontrol", "requeue", job_id])
    changes = [] if exclude is None else [f"ExcNodeList={','.join(exclude)}"]
    if begin is not None:
        changes.append(time.strftime("StartTime=%Y-%m-%dT%H:%M:%S", time.localtime(begin)))
    if changes:
        _output_of(["scontrol", "update", f"JobId={job_id}", *changes])


def lost_nodes(node_list: str) -> list[str]:
    """Return the listed nodes that Slurm cannot use: down, drained or not responding."""
    command = ["sinfo", "--noheader", "--Node", f"--nodes={node_list}", "--format=%N %T"]
    states = dict(line.split() for line in _output_of(command).splitlines())
    return [node for node, state in states.items() if _LOST.search(state)]


def kill_steps(job_id: str, name: str) -> int:
    """Kill a job's steps named `name` on all nodes; return how many there were."""
    answer = _run(["squeue", "--steps", f"--jobs={job_id}", "--noheader", "--format=%i %j"])
    named = [step for step, title in _rows(answer, 2) if title == name]
    if named:
        _run(["scancel", "--signal=KILL", *named])
    return len(named)


def job_infos(job_ids: Iterable[str], patience: float = _COMMAND_S) -> dict[str, JobInfo]:
    """Return what Slurm knows about each job, by job id; unknown jobs are left out.

    Raises JobError if Slurm does not answer within `patience` seconds.
    """
    wanted = set(job_ids)
    if not wanted:
        return {}
    # Query by id, not by user, so that a colleague's run shows too.
    infos = {job.job_id: job for job in _squeue(f"--jobs={','.join(sorted(wanted))}", patience)}
    if (missing := wanted - infos.keys()) and shutil.which("sacct"):
        command = ["sacct", "--noheader", "--parsable2", "--allocations"]
        command += ["--format=JobID,State,ExitCode", f"--jobs={','.join(sorted(missing))}"]
        for job_id, state, code in _rows(_run(command, patience), 3, "|"):
            # The state may be "CANCELLED by 1000".
            reason = f"exit code {code}" if code else ""
            infos[job_id] = JobInfo(state.partition(" ")[0], reason, job_id=job_id)
    return infos


def own_jobs() -> list[JobInfo]:
    found = _squeue(f"--user={os.getuid()}", PATIENCE_S)
    return sorted(found, key=lambda job: [int(number) for number in job.job_id.split("_")])


def _squeue(of: str, patience: float) -> list[JobInfo]:
    command = ["squeue", "--array", "--states=all", "--noheader", of, f"--Format={_FIELDS}"]
    answer = _run(command, patience)
    # squeue fails if it is asked about a single job and no longer knows that job.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise JobError(f"squeue: {answer.stderr.strip() or 'no answer'}")
    infos = []
    for line in answer.stdout.splitlines():
        job_id, *fields = (field.strip() for field in line.split("|"))
        if job_id.replace("_", "", 1).isdecimal() and len(fields) > 3:
            state, reason, restarts, script, *_ = fields
            reason = "" if reason == "None" else reason
            infos.append(JobInfo(state, reason, int(restarts), job_id, script))
    return infos


def partition_nodes(partition: str | None) -> list[str]:
    """Return a partition's nodes, including down and drained ones, which a job may wait for.

    Without a name, use Slurm's default partition; `*` means all. Empty if Slurm does not answer.
    """
    rows = _rows(_run(["sinfo", "--noheader", "--Node", "--format=%N %P"]), 2)
    if not partition:
        partition = ",".join(where.rstrip("*") for _, where in rows if where.endswith("*"))
    wanted = partition.split(",")
    return sorted({name for name, of in rows if of.rstrip("*") in wanted or partition == "*"})


@functools.cache
def node_groups() -> list[tuple[int, str]] | None:
    """Return (number of nodes, generic resources) for each group of identical nodes.

    Empty if Slurm does not answer; None if Slurm is not installed or not configured.
    """
    try:
        # Without --noconvert, sinfo prints 2,048 nodes as 2K.
        answer = _run(["sinfo", "--noheader", "--noconvert", "--format=%D %G"], timeout=5)
    except JobError as error:
        return [] if isinstance(error, NoAnswerError) else None
    if "Could not establish a configuration source" in answer.stderr:
        return None
    return [(int(count), gres) for count, gres in _rows(answer, 2) if count.isdigit()]


def nodes_in(node_list: str) -> list[str]:
    """Expand a node list in Slurm's notation (`worker-[0-3,7]`), keeping its order."""
    return _output_of(["scontrol", "show", "hostnames", node_list]).split()


def node_addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Return each node's address as Slurm knows it; its host name may resolve to loopback."""
    shown = _run(["scontrol", "show", "node", "--oneliner", ",".join(nodes)]).stdout
    found = dict(re.findall(r"^NodeName=(\S+).* NodeAddr=(\S+)", shown, re.MULTILINE))
    return {name: found.get(name, name) for name in nodes}


def drained(nodes: Sequence[str]) -> dict[str, str]:
    """Return the drained nodes among `nodes`, which get no new jobs, with the reasons."""
    answer = _run(["scontrol", "show", "node", "--oneliner", ",".join(nodes)])
    if answer.returncode and _PASSING.search(answer.stderr):
        raise NoAnswerError(f"scontrol show node: {answer.stderr.strip()}")
    found = {}
    shown = re.findall(r"^NodeName=(\S+).*? State=(\S+)(.*)", answer.stdout, re.MULTILINE)
    for name, state, rest in shown:
        # Ignore the suffix `*` (not responding): Slurm marks a node DOWN if it stays silent.
        if re.search("DRAIN|FAIL|DOWN", state):
            reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?(?: Comment=.*)?$", rest)
            found[name] = f"Slurm: {state}" + (f": {reason[1].strip()}" if reason else "")
    return found


def is_preempted(job_id: str) -> bool | None:
    """Whether Slurm is ending this job for another one; None if it does not answer."""
    try:
        shown = _output_of(["scontrol", "show", "job", job_id])
    except JobError as error:
        return None if isinstance(error, NoAnswerError) else False
    return _field_in(shown, "PreemptTime") not in ("", "None", "N/A")


def excluded_by(job_id: str) -> list[str]:
    found = _field_of(job_id, "ExcNodeList")
    return nodes_in(found) if found not in ("", "(null)") else []


def asked_cpus(job_id: str) -> str:
    """Return the CPUs of a task that a job was submitted with; empty if Slurm does not say it."""
    with contextlib.suppress(JobError):
        return _field_of(job_id, "CPUs/Task")
    return ""


def _field_of(job_id: str, name: str) -> str:
    return _field_in(_run(["scontrol", "show", "job", job_id]).stdout, name)


def _field_in(shown: str, name: str) -> str:
    found = re.search(rf"(?<![\w/]){name}=(\S+)", shown)
    return found[1] if found else ""


def _run(
    command: list[str], timeout: float = _COMMAND_S, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout}
    try:
        return subprocess.run(command, env={**submit_environment(), **(variables or {})}, **options)
    except (FileNotFoundError, PermissionError):  # a folder in PATH may be unreadable
        remedy = "log in to the cluster, or use --cluster local"
        raise JobError(f"{command[0]} is not on PATH; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]}: no answer in {timeout:g} s") from None


def _rows(
    answer: subprocess.CompletedProcess[str], columns: int, separator: str | None = None
) -> list[list[str]]:
    lines = [] if answer.returncode else answer.stdout.splitlines()
    rows = [line.strip().split(separator, columns - 1) for line in lines]
    return [row for row in rows if len(row) == columns]


def _output_of(command: list[str]) -> str:
    answer = _run(command)
    if answer.returncode:
        reason = (answer.stderr or answer.stdout).strip() or "no answer"
        raise _error_of(reason)(f"{' '.join(command)}: {reason}")
    return answer.stdout


def _error_of(message: str) -> type[JobError]:
    return NoAnswerError if _PASSING.search(message) else JobError


T = TypeVar("T")
# While its controller restarts or is busy, Slurm may be silent for minutes.
_BUSY_S = 600.0
_PAUSE_S = 5.0
_STARTED = "cookbook: task started"
# A node that does not see the run's folder says so, and not that a module is missing.
_TASK = f"""echo "{_STARTED}"
[ -d "${{COOKBOOK_CODE:-/}}" ] || {{ echo "cannot read ${{COOKBOOK_CODE}}" >&2; exit 1; }}
exec "$@"
"""
_NOT_LAUNCHED = re.compile(r"Task launch for \S+ failed on node (\S+): (.*)")
_GRACE_S = 3.0  # seconds that srun gets to end its tasks after SIGTERM


@dataclass(frozen=True)
class StepEnd:
    seconds: float
    is_late: bool
    not_launched: dict[str, str]
    errors: str


def retry_while_busy(ask: Callable[[float], T]) -> T:
    """Call `ask` until Slurm answers, for up to ten minutes; pass it the seconds that remain."""
    deadline, is_logged = time.monotonic() + _BUSY_S, False
    while True:
        try:
            return ask(deadline - time.monotonic())
        except NoAnswerError as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise
            if not is_logged:
                print(f"cookbook: preflight: waits for Slurm: {error}", file=sys.stderr, flush=True)
            is_logged = True
            time.sleep(_PAUSE_S)


def run_step(
    nodes: Sequence[str],
    module: str,
    question: str,
    limit_s: float,
    on_line: Callable[[str], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> StepEnd:
    """Run `python -m module question` on each of `nodes`, for at most `limit_s` seconds.

    `question` is the module's only argument, a JSON text. The limit counts from the start of the
    first task. Before that, wait for up to ten minutes while Slurm is busy. Raises JobError if
    Slurm starts no task.
    """
    venv = os.environ.get("VENV")
    python = f"{venv}/bin/python" if venv else sys.executable
    cpus = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or "1"
    command = [
        *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", f"--cpus-per-task={cpus}"),
        "--export=ALL",  # without it, `sbatch --export=NONE` would leave the tasks no environment
        "--overlap",  # a step that hangs on a bad node must not block later steps
        # If one node fails, the others must still answer.
        *("--kill-on-bad-exit=0", "--wait=0", "--input=none", "--quit-on-interrupt"),
        *("sh", "-c", _TASK, "sh", python, "-m", module, question),
    ]
    return retry_while_busy(lambda left: _try_step(command, limit_s, left, on_line, is_enough))


def _try_step(
    command: Sequence[str],
    limit_s: float,
    start_limit_s: float,
    on_line: Callable[[str], None],
    is_enough: Callable[[], bool],
) -> StepEnd:
    created, started, is_late = time.monotonic(), list[float](), False

    def read_output() -> None:
        for line in process.stdout or ():
            started.append(time.monotonic())
            if line.strip() != _STARTED:
                on_line(line)

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, text=True, errors="replace", **pipes)
        reader = threading.Thread(target=read_output, daemon=True)
        reader.start()
        try:
            while process.poll() is None and not is_late and not is_enough():
                time.sleep(0.05)
                since = time.monotonic() - (started[0] if started else created)
                is_late = since > (limit_s if started else start_limit_s)
        finally:
            # srun ends its tasks on SIGTERM, but leaves them running on SIGKILL.
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        reader.join(_GRACE_S)
        errors.seek(0)
        text = errors.read()
    not_launched = {node: why.strip() for node, why in _NOT_LAUNCHED.findall(text)}
    if not started and not not_launched and process.returncode:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # srun's first line is the error; drop the advice after it.
        by_srun = [line for line in lines if line.startswith("srun: error: ")]
        why = by_srun[0] if by_srun else (lines or ["no message from srun"])[-1]
        why = f"none in {start_limit_s:.0f} s ({why})" if is_late else why
        raise _error_of(why)(f"Slurm starts no step on the job's nodes: {why}")
    seconds = time.monotonic() - (started[0] if started else created)
    return StepEnd(seconds, is_late, not_launched, text)
