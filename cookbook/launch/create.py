"""Makes the folder of a new run, with all that its jobs will read, before any is submitted."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from cookbook.base.errors import JobError
from cookbook.base.files import write_whole
from cookbook.base.paths import runs_folder
from cookbook.config.cell import Cell
from cookbook.launch.script import render_script
from cookbook.run.folder import CellFolder
from cookbook.run.run import Run, new_record, read_run, write_run
from cookbook.run.status import QUEUED, REFUSED, Status, write_status
from cookbook.run.submit_lock import take_submit_lock
from cookbook.supervise.admit import job_record


def create_run(sweep: str, cells: Sequence[Cell]) -> Run:
    """Write the run of `cells`; it is built under a hidden name and renamed when it is complete."""
    root, stamp = runs_folder(), time.strftime("%Y%m%d-%H%M%S")
    building = root / f".{sweep}-{stamp}-{os.getpid()}"
    first = cells[0]
    record = new_record(
        "",
        cluster=first.cluster.name,
        scheduler=first.cluster.scheduler,
        stack=first.options.stack.name,
        cells=[cell.name for cell in cells],
        sweep=sweep,
        command=["python", "submit.py", *sys.argv[1:]],
        baseline=next((cell.baseline for cell in cells if cell.baseline), None),
    )
    try:
        for cell in cells:
            folder = CellFolder(building / cell.name)
            job_record(cell).write(folder.record)
            write_whole(folder.script, render_script(cell), mode=0o755)
            state = Status(REFUSED, reason=cell.refused) if cell.refused else Status(QUEUED)
            write_status(folder, state)
        # Written before the run can be seen: until it goes, cells without a job are waited for.
        take_submit_lock(building)
        # The rename reserves the name: two sweeps in one second get two names.
        for suffix in ["", *(f"-{number}" for number in range(2, 100))]:
            name = f"{sweep}-{stamp}{suffix}"
            write_run(building, replace(record, run=name))
            try:
                building.rename(root / name)
            except OSError:
                if not (root / name).exists():
                    raise
                continue
            return read_run(root / name)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(building, ignore_errors=True)
    raise JobError(f"{root}: no free name for a run of {sweep}")
