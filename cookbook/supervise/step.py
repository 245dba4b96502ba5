"""Starts a short step on nodes of this job, and reads what its tasks print; the only use of srun.

The training's own step is started by its script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cookbook.base.errors import JobError
from cookbook.run import slurm
from cookbook.run.slurm import NoAnswerError
from cookbook.supervise.patience import ask_again

# The first that a task prints: from then on, time is the node's and not Slurm's.
_BEGUN = "cookbook: task begun"
_NOT_LAUNCHED = re.compile(r"Task launch for \S+ failed on node (\S+): (.*)")
# For srun's own messages to the tasks that it ends.
_GRACE_S = 3.0


@dataclass(frozen=True)
class StepEnd:
    """How a step ended.

    Attributes:
        seconds: how long it took from its first task's start.
        not_launched: nodes on which no task could be started, and Slurm's reason.
        errors: what srun and the tasks wrote to standard error.
    """

    seconds: float
    is_late: bool
    not_launched: dict[str, str]
    errors: str


def run_step(
    nodes: Sequence[str],
    command: Sequence[str],
    limit_s: float,
    on_line: Callable[[str, float], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> StepEnd:
    """Run `command` once on each of `nodes`, for `limit_s` at most from its first task's start.

    Slurm has ten minutes to start one: its controller may be busy, and is asked again.

    Args:
        on_line: gets each line of standard output, and the time at which it came.
        is_enough: whether nothing that is still to come matters.

    Raises:
        JobError: Slurm starts no step.
    """
    words = [*_srun(nodes), "sh", "-c", f'echo "{_BEGUN}"; exec "$@"', "sh", *command]
    return ask_again(lambda left: _try_step(words, (limit_s, left), on_line, is_enough))


def _srun(nodes: Sequence[str]) -> list[str]:
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={os.environ.get('SLURM_CPUS_PER_TASK') or _cpus()}",
        # A step that hangs on a bad node must not keep the others from the next.
        "--overlap",
        # One node's failure is to be told from the others' answers.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--quit-on-interrupt",
    ]


def _try_step(
    words: Sequence[str],
    limits_s: tuple[float, float],
    on_line: Callable[[str, float], None],
    is_enough: Callable[[], bool],
) -> StepEnd:
    """Start a step and wait for its end; for its tasks, and for their start, that long at most."""
    limit_s, start_s = limits_s
    started, begun = time.monotonic(), list[float]()
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    errors: list[str] = []

    def read_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            begun.append(time.monotonic())
            if line.strip() != _BEGUN:
                on_line(line, time.time())

    def read_errors() -> None:
        assert process.stderr is not None
        errors.extend(process.stderr)

    readers = [threading.Thread(target=one, daemon=True) for one in (read_output, read_errors)]
    for reader in readers:
        reader.start()
    is_late = False
    try:
        while process.poll() is None and not is_late and not is_enough():
            time.sleep(0.05)
            since = time.monotonic() - (begun[0] if begun else started)
            is_late = since > (limit_s if begun else start_s)
    finally:
        _end(process)
    for reader in readers:
        reader.join(_GRACE_S)
    text = "".join(errors)
    not_launched = {node: why.strip() for node, why in _NOT_LAUNCHED.findall(text)}
    if not begun and not not_launched and process.returncode:
        raise _no_step(text, is_late, start_s)
    return StepEnd(time.monotonic() - (begun or [started])[0], is_late, not_launched, text)


def _no_step(errors: str, is_late: bool, start_s: float) -> JobError:
    """Why Slurm started no task on any node."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # What follows srun's error is advice.
    why = next((line for line in lines if line.startswith("srun: error: ")), "")
    why = why or (lines or ["srun said nothing"])[-1]
    if is_late:
        why = f"none in {start_s:.0f} s ({why})"
    error = NoAnswerError if slurm.is_passing(why) else JobError
    return error(f"Slurm starts no step on the job's nodes: {why}")


def _end(process: subprocess.Popen[str]) -> None:
    # srun tells its tasks to end; killed, it would leave them.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cpus() -> str:
    return os.environ.get("SLURM_CPUS_ON_NODE") or "1"


def python_of_job() -> str:
    """The Python that the job's script has chosen, on every node."""
    venv = os.environ.get("VENV")
    return f"{venv}/bin/python" if venv else sys.executable
