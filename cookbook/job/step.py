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

_NOT_LAUNCHED = re.compile(r"Task launch for \S+ failed on node (\S+): (.*)")
# For srun's own messages to the tasks that it ends.
_GRACE_S = 3.0


@dataclass(frozen=True)
class StepEnd:
    """How a step ended.

    Attributes:
        seconds: how long it took.
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
    """Run `command` once on each of `nodes`, for `limit_s` at most.

    Args:
        on_line: gets each line of standard output, and the time at which it came.
        is_enough: whether nothing that is still to come matters.
    """
    srun = [
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
    started = time.monotonic()
    process = subprocess.Popen(
        [*srun, *command],
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
            is_late = time.monotonic() - started > limit_s
    finally:
        _end(process)
    for reader in readers:
        reader.join(_GRACE_S)
    text = "".join(errors)
    not_launched = {node: why.strip() for node, why in _NOT_LAUNCHED.findall(text)}
    return StepEnd(time.monotonic() - started, is_late, not_launched, text)


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
