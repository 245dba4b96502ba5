"""In: cells to run, or the folder of a run. Out: the run directory, written whole and read back.

    runs/<sweep>-<time>/run.json
                        <cell>/cell.yaml, train.sh, status.json, job.json, attempt-<k>/, checkpoint/

`status.json` is written by the job, `job.json` by the one who submits it: two writers, two files.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, JobError, unknown_name
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT
from cookbook.cells.cell import Cell
from cookbook.script.render import render_script

RUNS = Path(os.environ.get("COOKBOOK_RUNS") or ROOT / "runs")

QUEUED, RUNNING, FINISHED = "queued", "running", "finished"
FAILED, CANCELLED, REFUSED = "failed", "cancelled", "refused"
ENDED = frozenset({FINISHED, FAILED, CANCELLED, REFUSED})


@dataclass(frozen=True)
class Status:
    """What a cell's status file says; times in seconds since the epoch, unknown values None."""

    state: str
    attempt: int = 0
    reason: str | None = None
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Job:
    """The job that a cell was submitted as: Slurm's id, or the id of a process on this machine."""

    job_id: str
    queued: float


@dataclass(frozen=True)
class Run:
    """One execution of a sweep or a cell: its folder and what `run.json` says."""

    folder: Path
    name: str
    scheduler: str
    cells: tuple[str, ...]

    def cell_folder(self, cell: str) -> Path:
        """The folder of `cell`, by its whole name."""
        return self.folder / cell


def create_run(sweep: str, cells: Sequence[Cell], command: Sequence[str], root: Path = RUNS) -> Run:
    """Make the folder of a new run with all that its jobs will read, before any is submitted.

    It is built under a hidden name and renamed when it is complete.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    root.mkdir(parents=True, exist_ok=True)
    building = root / f".{sweep}-{stamp}-{os.getpid()}"
    record = run_record(
        cluster=cells[0].cluster.name,
        scheduler=cells[0].cluster.scheduler,
        stack=cells[0].stack.name,
        cells=[cell.name for cell in cells],
        sweep=sweep,
        command=command,
        baseline=next((cell.baseline for cell in cells if cell.baseline), None),
    )
    try:
        for cell in cells:
            folder = building / cell.name
            write_whole(folder / "cell.yaml", cell.as_yaml())
            write_whole(folder / "train.sh", render_script(cell), mode=0o755)
            state = Status(REFUSED, reason=cell.refused) if cell.refused else Status(QUEUED)
            write_status(folder, state)
        # The name is taken when the folder is: two sweeps in one second get two names.
        for suffix in ["", *(f"-{number}" for number in range(2, 100))]:
            name = f"{sweep}-{stamp}{suffix}"
            write_run_record(building, {**record, "run": name})
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


def run_record(
    *,
    cluster: str,
    scheduler: str,
    stack: str,
    cells: Sequence[str],
    sweep: str | None = None,
    command: Sequence[str] = (),
    baseline: str | None = None,
) -> dict[str, Any]:
    """The content of `run.json`, without the run's name: what was asked, by whom, from where."""
    return {
        "sweep": sweep,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "user": getpass.getuser(),
        "commit": commit(),
        "cluster": cluster,
        "scheduler": scheduler,
        "stack": stack,
        "command": list(command),
        "baseline": baseline,
        "cells": list(cells),
    }


def write_run_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `run.json`, the run's name first."""
    name = record.get("run", folder.name)
    write_whole(folder / "run.json", json.dumps({"run": name, **record}, indent=1) + "\n")


def cell_names(folder: Path, listed: Sequence[str]) -> list[str]:
    """The cells of a run: those that `run.json` lists, then those that were added by hand.

    Scripts that are started with one `CELL_DIR=runs/mine/...` each join one run. They may start in
    the same second, so none of them writes the list of the others.
    """
    found = sorted(path.parent.name for path in folder.glob("[!.]*/cell.yaml"))
    return [*listed, *(name for name in found if name not in listed)]


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


def read_run(folder: Path) -> Run:
    """Read the run in `folder`."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        cells = tuple(cell_names(folder, record["cells"]))
        return Run(folder, record["run"], record["scheduler"], cells)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(str(folder), f"is not the folder of a run ({error})") from None


def find_run(name: str | None, root: Path = RUNS) -> Run:
    """The run called `name` (or at the path `name`); the newest where none is named."""
    names = run_names(root)
    if name is None:
        if not names:
            raise InputError(
                "runs", "there is no run yet", "start one: python submit.py sweep smoke"
            )
        return read_run(root / names[-1])
    if (root / name / "run.json").is_file():
        return read_run(root / name)
    if (Path(name) / "run.json").is_file():
        return read_run(Path(name))
    raise unknown_name("runs", "run", name, names)


def run_names(root: Path = RUNS) -> list[str]:
    """The names of all runs, the newest last."""
    folders = [path.parent for path in root.glob("[!.]*/run.json")]
    return [path.name for path in sorted(folders, key=lambda path: (_time_of(path), path.name))]


def _time_of(folder: Path) -> str:
    match = re.search(r"-(\d{8}-\d{6}(?:-\d+)?)$", folder.name)
    return match[1] if match else ""


def read_status(folder: Path) -> Status:
    """The status of the cell in `folder`."""
    try:
        return Status(**json.loads((folder / "status.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(str(folder / "status.json"), f"cannot be read: {error}") from None


def write_status(folder: Path, status: Status) -> None:
    """Write the status of the cell in `folder`."""
    write_whole(folder / "status.json", json.dumps(asdict(status), indent=1) + "\n")


def read_job(folder: Path) -> Job | None:
    """The job of the cell in `folder`; None where it was not submitted."""
    try:
        return Job(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(str(folder / "job.json"), f"cannot be read: {error}") from None


def write_job(folder: Path, job_id: str) -> None:
    """Note that the cell in `folder` was submitted as `job_id`, now."""
    write_whole(folder / "job.json", json.dumps(asdict(Job(job_id, time.time()))) + "\n")


def attempts(folder: Path) -> list[Path]:
    """The attempt folders of a cell, in order."""
    found = [path for path in folder.glob("attempt-*") if path.name[8:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[8:]))


def shown_command() -> list[str]:
    """The command line, for `run.json`."""
    return ["python", "submit.py", *sys.argv[1:]]
