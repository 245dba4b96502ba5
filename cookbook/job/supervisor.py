"""In: the folders of cells. Out: their `train.sh` run in turn, and their status files kept.

What runs in a job: on Slurm the batch step becomes this (one cell), on the local machine one
process runs all cells of a sweep. It imports neither submitit nor torch, and asks Slurm nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cookbook.base.errors import JobError
from cookbook.run.rundir import (
    CANCELLED,
    FAILED,
    FINISHED,
    REFUSED,
    RUNNING,
    Status,
    attempts,
    read_status,
    write_status,
)


class Supervisor:
    """What submitit pickles and a job calls: runs the cells in `folders`, in order.

    A cell that has finished is not run again; one that failed or was cut short is, as the next
    attempt, since a job that Slurm requeues starts from the top.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [str(folder) for folder in folders]
        self.process: subprocess.Popen[bytes] | None = None
        self.signal_number = 0

    def __call__(self) -> None:
        """Run the cells; raises JobError where one failed, so that the job fails as well."""
        # `cancel` and Slurm's end of a job come as SIGTERM.
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        failed = []
        for folder in map(Path, self.folders):
            if read_status(folder).state in (FINISHED, REFUSED):
                continue
            if self.signal_number:
                write_status(folder, Status(CANCELLED, reason="cancelled before it started"))
            elif self._run_cell(folder):
                failed.append(folder.name)
        if failed:
            raise JobError(f"failed: {', '.join(failed)}")

    def _run_cell(self, folder: Path) -> int:
        attempt, started = len(attempts(folder)), time.time()
        write_status(folder, Status(RUNNING, attempt, started=started))
        # A session of its own, so that a signal reaches all that the script started.
        self.process = subprocess.Popen(
            ["bash", str(folder / "train.sh")],
            env={**os.environ, "CELL_DIR": str(folder), "COOKBOOK_SUPERVISED": "1"},
            start_new_session=True,
        )
        if self.signal_number:
            self._stop(self.signal_number, None)
        code = self.process.wait()
        self.process = None
        if self.signal_number:
            state, reason = CANCELLED, signal.Signals(self.signal_number).name
        elif code == 0:
            state, reason = FINISHED, None
        else:
            state = FAILED
            reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        write_status(folder, Status(state, attempt, reason, code, started, time.time()))
        return code

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def __getstate__(self) -> dict[str, object]:
        return {"folders": self.folders, "process": None, "signal_number": 0}
