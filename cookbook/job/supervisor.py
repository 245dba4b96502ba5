"""What runs in a job: the `train.sh` of its cells in turn, and their status files.

On Slurm the batch step becomes this (one cell), on the local machine one process runs all cells of
a sweep. It imports neither submitit nor torch, and asks Slurm nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cookbook.base.errors import JobError
from cookbook.job.begin import ended, restarts
from cookbook.run.folder import CellFolder
from cookbook.run.status import (
    CANCELLED,
    FINISHED,
    REFUSED,
    RUNNING,
    Status,
    read_status,
    write_job,
    write_status,
)


class Supervisor:
    """What submitit pickles and a job calls: runs the cells in `folders`, in order.

    A cell that has finished is not run again; one that failed or was cut short is, as the next
    attempt, since a job that Slurm requeues starts from the top.
    """

    def __init__(self, cells: Sequence[CellFolder]) -> None:
        self.folders = [str(cell.path) for cell in cells]
        self.process: subprocess.Popen[bytes] | None = None
        self.signal_number = 0

    def __call__(self) -> None:
        """Run the cells, then exit with status 0; JobError where one failed: the job fails too."""
        # `cancel` and Slurm's end of a job come as SIGTERM.
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self._note_job()
        failed = []
        for cell in [CellFolder(Path(folder)) for folder in self.folders]:
            if read_status(cell).state in (FINISHED, REFUSED):
                continue
            if self.signal_number:
                write_status(cell, Status(CANCELLED, reason="cancelled before it started"))
            elif self._run_cell(cell):
                failed.append(cell.name)
        if failed:
            raise JobError(f"failed: {', '.join(failed)}")
        # Returning, submitit would write down that nothing was returned. Nobody reads it, and on a
        # full disk the job would fail of it.
        sys.exit(0)

    def _note_job(self) -> None:
        """Note the job where its submitter was killed before it could."""
        job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")
        for cell in [CellFolder(Path(folder)) for folder in self.folders]:
            if job_id and not cell.job.exists():
                write_job(cell, job_id)

    def _run_cell(self, cell: CellFolder) -> int:
        attempt, started = cell.next_attempt().number, time.time()
        write_status(cell, Status(RUNNING, attempt, started=started, restarts=restarts()))
        # A session of its own, so that a signal reaches all that the script started.
        self.process = subprocess.Popen(
            ["bash", str(cell.script)],
            env={**os.environ, "CELL_DIR": str(cell.path), "COOKBOOK_SUPERVISED": "1"},
            start_new_session=True,
        )
        if self.signal_number:
            self._stop(self.signal_number, None)
        code = self.process.wait()
        self.process = None
        # Told to stop, it may end well, at a checkpoint: that is no end of the cell.
        told = signal.Signals(self.signal_number).name if self.signal_number else ""
        write_status(cell, ended(cell, attempt, started, code, told))
        return code

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def __getstate__(self) -> dict[str, object]:
        return {"folders": self.folders, "process": None, "signal_number": 0}
