"""Run a short step on nodes of this job and read its output; the training step is its script's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cookbook.base.errors import JobError
from cookbook.run import slurm
from cookbook.run.slurm import NoAnswerError

T = TypeVar("T")
# Slurm may not answer for minutes: its controller restarts, or is busy with other jobs.
_BUSY_S = 600.0
_PAUSE_S = 5.0
# Each task prints it first: from then on, time is the node's and not Slurm's.
_STARTED = "cookbook: task started"
_NOT_LAUNCHED = re.compile(r"Task launch for \S+ failed on node (\S+): (.*)")
# For srun's messages to the tasks that it ends.
_GRACE_S = 3.0


@dataclass(frozen=True)
class StepEnd:
    """How a step ended."""

    seconds: float
    is_late: bool
    not_launched: dict[str, str]
    errors: str


def retry_while_busy(ask: Callable[[float], T]) -> T:
    """Return the answer of `ask`, which gets the seconds left; retry it for ten minutes.

    Raises:
        NoAnswerError: the last one, when the time is over.
    """
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
    on_line: Callable[[str, float], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> StepEnd:
    """Run `python -m module question` on each node, for `limit_s` from its first task's start.

    Raises:
        JobError: Slurm starts no step.
    """
    venv = os.environ.get("VENV")
    python = f"{venv}/bin/python" if venv else sys.executable
    cpus = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or "1"
    command = [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={cpus}",
        # `sbatch --export=NONE` would leave the tasks without an environment.
        "--export=ALL",
        # A step that hangs on a bad node must not keep the others from the next.
        "--overlap",
        # The other nodes still answer when one fails.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--quit-on-interrupt",
        *("sh", "-c", f'echo "{_STARTED}"; exec "$@"', "sh", python, "-m", module, question),
    ]
    return retry_while_busy(lambda left: _try_step(command, limit_s, left, on_line, is_enough))


def _try_step(
    command: Sequence[str],
    limit_s: float,
    start_limit_s: float,
    on_line: Callable[[str, float], None],
    is_enough: Callable[[], bool],
) -> StepEnd:
    created, started = time.monotonic(), list[float]()
    process = subprocess.Popen(
        command,
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
            started.append(time.monotonic())
            if line.strip() != _STARTED:
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
            since = time.monotonic() - (started[0] if started else created)
            is_late = since > (limit_s if started else start_limit_s)
    finally:
        # srun ends its tasks on SIGTERM; killed, it would leave them.
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    for reader in readers:
        reader.join(_GRACE_S)
    text = "".join(errors)
    not_launched = {node: why.strip() for node, why in _NOT_LAUNCHED.findall(text)}
    if not started and not not_launched and process.returncode:
        raise _no_step(text, start_limit_s if is_late else None)
    return StepEnd(time.monotonic() - (started or [created])[0], is_late, not_launched, text)


def _no_step(errors: str, late_after_s: float | None) -> JobError:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # The first line is the error; the advice that follows is dropped.
    why = next((line for line in lines if line.startswith("srun: error: ")), "")
    why = why or (lines or ["no message from srun"])[-1]
    if late_after_s is not None:
        why = f"none in {late_after_s:.0f} s ({why})"
    error = NoAnswerError if slurm.is_passing(why) else JobError
    return error(f"Slurm starts no step on the job's nodes: {why}")
