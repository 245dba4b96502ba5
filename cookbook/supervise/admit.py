"""Admit the run of a script: validate its options, note the run, keep the script for its attempts.

Only a script that was started with sbatch or bash needs this; `submit.py run` does it beforehand.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.files import locked, write_whole
from cookbook.base.paths import runs_folder
from cookbook.base.schema import Unchecked
from cookbook.base.yamlfile import shown_path
from cookbook.config import validate as rules
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.finding import ERROR, Finding
from cookbook.config.options import Options, parse_argv
from cookbook.config.overlay import Overlay, load_ep_backend, load_precision
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import published_number
from cookbook.config.stack import load_stack
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import is_run, new_record, note_new_job, read_run, write_run
from cookbook.run.status import (
    OPEN,
    RUNNING,
    Status,
    read_job,
    read_status,
    write_job,
    write_status,
)
from cookbook.supervise.exits import restarts
from cookbook.supervise.resume_point import find_checkpoint

_PLACE = "TorchTitan arguments"


@dataclass(frozen=True)
class Start:
    """The facts that a script hands over.

    Attributes:
        script: the running script; under sbatch a copy in Slurm's spool.
        nodes: of the job; `spare_nodes` of them do not train.
        arguments: all TorchTitan options of the script; `own` stand at the end of its sbatch line.
    """

    folder: CellFolder
    script: Path
    cell: str
    recipe: str
    precision: str
    ep_backend: str
    cluster: str
    nodes: int
    spare_nodes: int
    arguments: Sequence[str]
    own: Sequence[str]


def validate(start: Start) -> Cell:
    """Return the cell that the script would train."""
    if start.nodes <= start.spare_nodes:
        raise InputError(f"--nodes={start.nodes}", "all would be spare", "ask for more")
    stack = load_stack()
    for name in parse_argv(start.own, _PLACE, stack).settings:
        stack.setting(_PLACE, name)
    options = parse_argv([*start.arguments, *start.own], _PLACE, stack)
    cell = Cell(
        name=start.cell,
        recipe=load_recipe(start.recipe),
        precision=_as_rendered(load_precision(start.precision), options),
        ep_backend=_as_rendered(load_ep_backend(start.ep_backend), options),
        cluster=load_cluster(start.cluster),
        nodes=start.nodes - start.spare_nodes,
        options=options,
        hooks=options["experimental.custom_import"],
        emulated=options["cookbook.emulated"],
    )
    is_submitted = not os.environ.get("COOKBOOK_CHECK")
    found = [*_too_few_gpus(cell), *rules.judge(cell, is_submitted=is_submitted).errors]
    if found:
        raise InputError(found[0].option or cell.name, found[0].reason, found[0].remedy)
    _check_folder(start.folder.path, cell)
    find_checkpoint(start.folder, cell.record())
    return replace(cell, published=published_number(cell))


def _as_rendered(overlay: Overlay, options: Options) -> Overlay:
    """Return the overlay as of the script's rendering, should its file have changed since."""
    expect = {name: options.settings.get(name, setting) for name, setting in overlay.expect.items()}
    return replace(overlay, expect=expect)


def _too_few_gpus(cell: Cell) -> list[Finding]:
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    ranks = cell.cluster.ranks_per_node
    if cell.cluster.gpu is None or not granted.isdecimal() or int(granted) >= ranks:
        return []
    reason = f"the job has {granted} GPUs a node, and the script starts {ranks} ranks"
    remedy = f"ask for --gpus-per-node={ranks}, or set gpus_per_node in the cluster's profile"
    return [Finding(ERROR, "gpus", "sbatch --gpus-per-node", reason, remedy)]


def _check_folder(path: Path, cell: Cell) -> None:
    """Refuse a CELL_DIR that holds another cell's record and checkpoints."""
    place = f"CELL_DIR={shown_path(path)}"
    if path == Path("/") or (path.exists() and not path.is_dir()):
        raise InputError(place, "is no folder of a cell", "name one below runs/, or unset CELL_DIR")
    if path.parent == runs_folder().resolve():
        raise InputError(
            place,
            "is the folder of a run, allowed: one of a cell below it",
            f"try CELL_DIR={shown_path(path / cell.name)}",
        )
    first, asked = _read_first(CellFolder(path)), cell.record()
    names = ("recipe", "precision", "ep_backend")
    if first and any(getattr(first, name) != getattr(asked, name) for name in names):
        found, wanted = ([getattr(one, name) for name in names] for one in (first, asked))
        raise InputError(
            place,
            f"holds a cell of {' '.join(map(str, found))}, and this job trains "
            f"{' '.join(map(str, wanted))}",
            "unset CELL_DIR, or set PRECISION and EP_BACKEND as they were",
        )


def _read_first(folder: CellFolder) -> CellRecord | None:
    """Return the folder's record; None where it is missing or unreadable."""
    with contextlib.suppress(InputError):
        return read_record(folder.record)
    return None


def start_run(start: Start) -> None:
    """Validate the script and note its run; a restart by Slurm finds that done."""
    folder, job_id = start.folder, os.environ.get("SLURM_JOB_ID")
    job = read_job(folder)
    if restarts() and folder.record.exists() and job and job.job_id == job_id:
        return
    cell = validate(start)
    with locked(folder.path / ".start.lock"):
        _refuse_another_job(folder)
        number = folder.next_attempt().number
        keep_request(folder, job_record(cell), start.script.read_text(encoding="utf-8"))
        write_status(folder, Status(RUNNING, number, started=time.time(), restarts=restarts()))
        if job_id:
            write_job(folder, job_id)
        else:
            folder.job.unlink(missing_ok=True)
        run = folder.path.parent
        if is_run(run):
            note_new_job(run)
        else:
            record_of_run = new_record(
                run.name,
                cluster=cell.cluster.name,
                scheduler=cell.cluster.scheduler,
                stack=cell.options.stack.name,
                cells=[folder.name],
            )
            write_run(run, record_of_run)


def job_record(cell: Cell) -> CellRecord:
    """Return the cell's record with all that its job needs, so that it reads no recipe again."""
    return replace(
        cell.record(),
        too_few_nodes=cell.recipe.too_few_nodes,
        profile=Unchecked(cell.cluster.content),
    )


def keep_request(folder: CellFolder, asked: CellRecord, script: str) -> None:
    """Write the record and the script of the next attempt; those of the last go to its folder."""
    first, attempts = _read_first(folder), folder.attempts()
    record = asked
    if first and attempts and first.cluster == asked.cluster:
        is_same = (first.nodes, first.asked_options) == (asked.nodes, asked.asked_options)
        published = first.published_tokens_per_second_per_gpu
        record = replace(
            first,
            nodes=asked.nodes,
            options=first.options if is_same else asked.options,
            published_tokens_per_second_per_gpu=published if is_same else None,
            max_restarts=asked.max_restarts,
            too_few_nodes=asked.too_few_nodes,
            profile=asked.profile,
        )
    for name, text in (("record", record.as_yaml()), ("script", script)):
        path: Path = getattr(folder, name)
        before = path.read_text(encoding="utf-8") if attempts and path.exists() else text
        if before != text and not (kept := getattr(attempts[-1], name)).exists():
            write_whole(kept, before, mode=path.stat().st_mode & 0o777)
    record.write(folder.record)
    write_whole(folder.script, script, mode=0o755)


def _refuse_another_job(folder: CellFolder) -> None:
    """Two jobs in one folder would save over one another's checkpoints."""
    own, run = os.environ.get("SLURM_JOB_ID"), folder.path.parent
    if own is None or not is_run(run) or read_run(run).scheduler != "slurm":
        return
    job = read_job(folder)
    if job is None or job.job_id == own or read_status(folder).state not in OPEN:
        return
    info = slurm.job_infos([job.job_id]).get(job.job_id)
    if info is not None and info.state in slurm.WAITING | slurm.ACTIVE:
        raise InputError(
            shown_path(folder.path),
            f"job {job.job_id} trains here ({info.state.lower()})",
            f"wait for its end, or scancel {job.job_id}; for a run of its own: "
            f"CELL_DIR={shown_path(run.with_name('another') / folder.name)}",
        )
