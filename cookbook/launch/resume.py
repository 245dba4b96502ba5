"""Queues cells of an ended run again, in their folders, as their next attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cookbook.base.files import write_whole
from cookbook.config.cell import Cell
from cookbook.launch.executor import submit_run
from cookbook.launch.render import render_script
from cookbook.run.folder import CellFolder
from cookbook.run.record import read_record
from cookbook.run.run import Run
from cookbook.run.status import QUEUED, Status, write_status
from cookbook.run.submit_lock import release_submit_lock, take_submit_lock


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
    attempts, script = folder.attempts(), render_script(cell)
    if attempts and folder.script.exists():
        ran = folder.script.read_text(encoding="utf-8")
        if ran != script and not attempts[-1].script.exists():
            write_whole(attempts[-1].script, ran, mode=0o755)
    number = folder.next_attempt().number
    # Without a job, `queued` is believed.
    folder.job.unlink(missing_ok=True)
    write_status(folder, Status(QUEUED, attempts[-1].number if attempts else 0))
    read_record(folder.record).changed(number, cell.record()).write(folder.record)
    write_whole(folder.script, script, mode=0o755)
