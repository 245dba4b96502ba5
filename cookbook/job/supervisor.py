"""What runs in a job: the `train.sh` of its cells in turn, and their status files.

On Slurm the batch step becomes this (one cell), on the local machine one process runs all cells of
a sweep. It imports neither submitit nor torch, and all it asks of Slurm is to requeue its own job.
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
from cookbook.job.stop import saved_step
from cookbook.run import slurm
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.status import (
    CANCELLED,
    FAILED,
    FINISHED,
    QUEUED,
    REFUSED,
    RUNNING,
    Status,
    read_status,
    write_job,
    write_status,
)

_ENDED_WITHIN_S = 60


class Supervisor:
    """What submitit pickles and a job calls: runs the cells in `folders`, in order.

    A cell that has finished is not run again; one that failed or was cut short is, as the next
    attempt, since a job that Slurm requeues starts from the top.
    """

    def __init__(self, cells: Sequence[CellFolder]) -> None:
        self.folders = [str(cell.path) for cell in cells]
        self.process: subprocess.Popen[bytes] | None = None
        self.attempt: Attempt | None = None
        self.signal_number = 0

    def __call__(self) -> None:
        """Run the cells, then exit with status 0; JobError where one failed: the job fails too."""
        # `cancel` and Slurm's end of a job come as SIGTERM.
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        # Before the time limit, and before preemption where the cluster is set up so.
        signal.signal(signal.SIGUSR1, self._stop_at_checkpoint)
        signal.signal(signal.SIGALRM, self._requeue_late)
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
        self.attempt, started = cell.next_attempt(), time.time()
        attempt = self.attempt.number
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
        step, job_id = saved_step(self.attempt), os.environ.get("SLURM_JOB_ID")
        if step is not None and job_id and not told:
            reason = f"saved step {step}, to go on from there"
            asked = Status(QUEUED, attempt, reason, started=started, restarts=restarts())
            write_status(cell, asked)
            self._requeue(job_id)
            told = signal.Signals(self.signal_number).name if self.signal_number else ""
        last = ended(cell, attempt, started, code, told)
        write_status(cell, last)
        return code or int(last.state == FAILED)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _stop_at_checkpoint(self, number: int, frame: FrameType | None) -> None:
        if self.attempt is None:
            return
        # Before the script has made the folder there is nothing to save.
        with contextlib.suppress(FileNotFoundError):
            self.attempt.stop.touch()
        signal.alarm(int(os.environ.get("COOKBOOK_LATE_S", "0")))

    def _requeue_late(self, number: int, frame: FrameType | None) -> None:
        """The ranks took too long: the newest checkpoint has to do."""
        job_id = os.environ.get("SLURM_JOB_ID")
        if self.process is not None and job_id:
            with contextlib.suppress(JobError):
                slurm.requeue(job_id)

    def _requeue(self, job_id: str) -> None:
        """Have Slurm start this job again, and wait until it ends this process for that."""
        signal.alarm(0)
        try:
            slurm.requeue(job_id)
        except JobError as error:
            print(f"cookbook: {error}", file=sys.stderr)
            return
        deadline = time.monotonic() + _ENDED_WITHIN_S
        while not self.signal_number and time.monotonic() < deadline:
            time.sleep(0.1)

    def __getstate__(self) -> dict[str, object]:
        return {"folders": self.folders, "process": None, "attempt": None, "signal_number": 0}
