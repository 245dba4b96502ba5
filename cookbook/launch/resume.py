"""Queues cells of an ended run again, in their folders, as their next attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cookbook.config.cell import Cell
from cookbook.launch.submit import submit_run
from cookbook.launch.script import render_script
from cookbook.run.folder import CellFolder
from cookbook.run.run import Run
from cookbook.run.status import QUEUED, Status, write_status
from cookbook.run.submit_lock import release_submit_lock, take_submit_lock
from cookbook.supervise.start import job_record, keep_script, note_change


def resume_cells(run: Run, cells: Sequence[Cell]) -> list[str]:
    """Write what the next attempt of each cell reads, and submit them; the job ids.

    A cell whose submission fails is as it was before.
    """
    before: dict[CellFolder, dict[Path, bytes]] = {}
    folders = [run.cell(cell.name) for cell in cells]
    try:
        # Cells that are queued and have no job yet are waited for; `submit_run` ends that.
        take_submit_lock(run.folder)
        for folder, cell in zip(folders, cells, strict=True):
            paths = (folder.status, folder.job, folder.record, folder.script)
            before[folder] = {path: path.read_bytes() for path in paths if path.exists()}
            _prepare(folder, cell)
        return submit_run(run, cells)
    except BaseException:
        release_submit_lock(run.folder)
        for folder, files in before.items():
            # Who has a job by now is queued.
            if not folder.job.exists():
                for path, content in files.items():
                    path.write_bytes(content)
        raise


def _prepare(folder: CellFolder, cell: Cell) -> None:
    attempts = folder.attempts()
    # Without a job, `queued` is believed.
    folder.job.unlink(missing_ok=True)
    write_status(folder, Status(QUEUED, attempts[-1].number if attempts else 0))
    note_change(folder, job_record(cell)).write(folder.record)
    keep_script(folder, render_script(cell))
