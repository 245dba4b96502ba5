"""A run: one execution of a sweep or a cell, in a folder below `runs/`, and its `run.json`.

runs/<sweep>-<time>/run.json
                    <cell>/...          (run/folder.py)
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT, runs_folder
from cookbook.base.yamlfile import shown_path
from cookbook.run.folder import CellFolder
from cookbook.run.status import read_job, read_json, read_status

_FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` says: what was asked, by whom, from which commit, on which cluster."""

    run: str
    scheduler: str
    cells: tuple[str, ...]
    sweep: str | None = None
    created: str | None = None
    user: str | None = None
    commit: str | None = None
    cluster: str | None = None
    stack: str | None = None
    command: tuple[str, ...] = ()
    baseline: str | None = None


@dataclass(frozen=True)
class Run:
    """A run's folder and what it says of itself.

    Attributes:
        cells: the folders of the cells that `run.json` lists, then of those that scripts started
            by hand have added since.
    """

    folder: Path
    record: RunRecord
    cells: tuple[CellFolder, ...]

    @property
    def name(self) -> str:
        return self.record.run

    @property
    def scheduler(self) -> str:
        """`slurm` or `local`."""
        return self.record.scheduler

    @property
    def job_files(self) -> Path:
        """submitit's files of a job that runs all cells."""
        return self.folder / "job"

    @property
    def submission(self) -> Path:
        """Its batch file in Slurm, by which it is known where its id was not noted."""
        return self.job_files / "submission.sh"

    def cell(self, name: str) -> CellFolder:
        """The folder of the cell called `name`."""
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise unknown_name(self.name, "cell", name, [cell.name for cell in self.cells])


def new_record(
    name: str,
    *,
    cluster: str,
    scheduler: str,
    stack: str,
    cells: Sequence[str],
    sweep: str | None = None,
    command: Sequence[str] = (),
    baseline: str | None = None,
) -> RunRecord:
    """The record of a run that starts now."""
    return RunRecord(
        run=name,
        scheduler=scheduler,
        cells=tuple(cells),
        sweep=sweep,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        user=getpass.getuser(),
        commit=commit(),
        cluster=cluster,
        stack=stack,
        command=tuple(command),
        baseline=baseline,
    )


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`."""
    write_whole(folder / _FILE, json.dumps(asdict(record), indent=1) + "\n")


def is_run(folder: Path) -> bool:
    """Whether `folder` is the folder of a run."""
    return (folder / _FILE).is_file()


def read_run(folder: Path) -> Run:
    """Read the run in `folder`."""
    path = folder / _FILE
    content = read_json(path)
    listed = content.get("cells")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise InputError(f"{shown_path(path)}: cells", "is not a list of names", "restore the file")
    if content.get("scheduler") not in ("slurm", "local"):
        raise InputError(
            f"{shown_path(path)}: scheduler",
            f"found {content.get('scheduler')!r}, allowed: local, slurm",
            "restore the file",
        )
    record = RunRecord(
        run=_text(content.get("run")) or folder.name,
        scheduler=content["scheduler"],
        cells=tuple(listed),
        sweep=_text(content.get("sweep")),
        created=_text(content.get("created")),
        user=_text(content.get("user")),
        commit=_text(content.get("commit")),
        cluster=_text(content.get("cluster")),
        stack=_text(content.get("stack")),
        baseline=_text(content.get("baseline")),
    )
    # Scripts that are started with one CELL_DIR=runs/mine/... each join one run. They may start in
    # the same second, so none of them writes the list of the others.
    found = sorted(path.parent.name for path in folder.glob("[!.]*/cell.yaml"))
    names = [*listed, *(name for name in found if name not in listed)]
    return Run(folder, record, tuple(CellFolder(folder / name) for name in names))


def find_run(name: str | None) -> Run:
    """The run called `name` (or at the path `name`); the newest where none is named."""
    root, names = runs_folder(), run_names()
    if name is None:
        if not names:
            raise InputError(
                shown_path(root),
                "there is no run yet",
                "start one: python submit.py sweep smoke",
            )
        return read_run(root / names[-1])
    for folder in (root / name, Path(name)):
        if is_run(folder):
            return read_run(folder)
    raise unknown_name(shown_path(root), "run", name, names)


def run_names() -> list[str]:
    """The names of all runs, the newest last."""
    folders = [path.parent for path in runs_folder().glob(f"[!.]*/{_FILE}")]
    return [path.name for path in sorted(folders, key=lambda path: (*_time_of(path), path.name))]


def _time_of(folder: Path) -> tuple[float, str]:
    """When a run was made, in seconds since the epoch, and the stamp in its name."""
    match = re.search(r"-(([0-9]{8}-[0-9]{6})(?:-[0-9]+)?)$", folder.name)
    # A number that is no date names a folder of one's own.
    with contextlib.suppress(ValueError, OverflowError):
        if match:
            return time.mktime(time.strptime(match[2], "%Y%m%d-%H%M%S")), match[1]
    return _began(folder), ""


def _began(folder: Path) -> float:
    """When the newest job began in a folder that scripts by hand share, such as `runs/16b`."""
    times = []
    for path in folder.glob("[!.]*/cell.yaml"):
        cell = CellFolder(path.parent)
        with contextlib.suppress(InputError):
            job = read_job(cell)
            times.append(job.queued if job else read_status(cell).started or 0.0)
    return max(times, default=0.0) or (folder / _FILE).stat().st_mtime


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def commit() -> str | None:
    """The cookbook's commit, with `+` where files differ from it; None outside git."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
