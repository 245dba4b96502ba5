"""The start of a script by hand: make its cell a request in CELL_DIR, or refuse it.

`submit.py` does the same at submission. From the request on, both jobs are the same.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.files import locked
from cookbook.base.paths import ROOT, runs_folder
from cookbook.base.yamlfile import YamlFile, mapping_at, shown_path
from cookbook.check.warnings import ADVICE
from cookbook.config import validate as rules
from cookbook.config.asked import keep_request
from cookbook.config.cell import WARNING, Cell, Finding
from cookbook.config.request import cell_of_script, read_script
from cookbook.config.resolve import keep_schedule
from cookbook.run import own_job, slurm, status
from cookbook.run.folder import CellFolder, saved_steps
from cookbook.run.record import earlier_record
from cookbook.run.run import (
    RunRecord,
    code_folder,
    code_of_job,
    commit,
    is_run,
    note_new_job,
    read_run,
    snapshot_code,
    write_run,
)
from cookbook.run.states import RUN_VARIABLE, is_alive, process_job
from cookbook.supervise.resume_point import find_checkpoint


def chosen_cell(file: YamlFile, words: Sequence[str]) -> tuple[Cell, CellFolder]:
    """Return the cell that a script trains in this job, and its folder, without validating it."""
    script, run = read_script(file), runs_folder()
    profiles = mapping_at(file, "cluster").values()
    scheduler = next((str(one["scheduler"]) for one in profiles if "scheduler" in one), "local")
    os.environ[own_job.SCHEDULER_VARIABLE] = scheduler
    if scheduler == "slurm" and "SLURM_JOB_NUM_NODES" not in os.environ:
        name = file.path.name
        raise InputError(name, "runs inside a Slurm job", f"start it with: sbatch {name}")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) if scheduler == "slurm" else 1
    cell = cell_of_script(file, words, os.environ, nodes)
    if (asked := os.environ.get("NNODES") or str(cell.nodes)) != str(cell.nodes):
        found = f"is not read, and the job has {cell.nodes} node(s)"
        remedy = f"write: sbatch --nodes={asked} {file.path.name}, or unset NNODES"
        raise InputError(f"NNODES={asked}", found, remedy)
    given = os.environ.get("CELL_DIR") or run / script.run / cell.name
    return cell, CellFolder(Path(os.path.realpath(ROOT / given)))


def validated(cell: Cell, folder: CellFolder) -> Cell:
    """Return the cell as it will train in `folder`; raise InputError if it must not."""
    granted, ranks = os.environ.get("SLURM_GPUS_ON_NODE", ""), cell.cluster.ranks_per_node
    if cell.cluster.gpu is not None and granted.isdecimal() and int(granted) < ranks:
        found = f"the job has {granted} GPUs a node, and the script starts {ranks} ranks"
        remedy = f"ask for --gpus-per-node={ranks}, or set gpus_per_node in the cluster's profile"
        raise InputError("sbatch --gpus-per-node", found, remedy)
    # Check the layout first: `find_checkpoint` would blame the checkpoint for an invalid layout.
    _refuse(rules.validation_errors(cell), cell)
    _check_folder(folder.path, cell)
    first, saved = earlier_record(folder), find_checkpoint(folder, cell.record())
    cell = replace(cell, resumes=saved.checkpoint is not None)
    _refuse(rules.judge(cell).errors, cell)
    # When training resumes after step 0, keep the learning-rate schedule that it began with.
    if first is not None and saved.checkpoint is not None and saved.checkpoint.step:
        kept = keep_schedule(cell.options, first, shown_path(folder.record))
        cell = replace(cell, options=kept)
    return cell


def _refuse(errors: Sequence[Finding], cell: Cell) -> None:
    for error in errors:
        raise InputError(error.option or cell.name, error.reason, error.remedy)


def _check_folder(path: Path, cell: Cell) -> None:
    place = f"CELL_DIR={shown_path(path)}"
    is_other = path in (Path("/"), runs_folder().resolve()) or (path.exists() and not path.is_dir())
    inside = {one.name.partition("-")[0] for one in path.glob("[!.]*")}
    ours = {*CellFolder.names, *Path(cell.facts.checkpoint_folder).parts[:1], "attempt"}
    if is_other or (inside and not inside & ours):
        raise InputError(place, "is no folder of a cell", "name one below runs/, or unset CELL_DIR")
    if path.parent == runs_folder().resolve():
        wrong = "is the folder of a run, allowed: one of a cell below it"
        raise InputError(place, wrong, f"try CELL_DIR={shown_path(path / cell.name)}")
    first, asked = earlier_record(CellFolder(path)), cell.record()
    both = (first or asked, asked)
    found, wanted = (f"{one.recipe} {one.precision} {one.ep_backend}" for one in both)
    if found != wanted:
        wrong = f"holds a cell of {found}, and this job trains {wanted}"
        remedy = "unset CELL_DIR, or set PRECISION and EP_BACKEND as they were"
        raise InputError(place, wrong, remedy)
    # Runs of several checkouts may have the same name below an absolute checkpoint.folder.
    folder, is_loaded = CellFolder(path), cell.facts.checkpoints
    saved = folder.checkpoints(asked.options)
    is_foreign = not (folder.record.exists() or saved.is_relative_to(path.resolve()))
    # Step 0 is a seed, which a new run may start from.
    if is_foreign and is_loaded and any(step for step, _ in saved_steps(saved)):
        wrong = "holds checkpoints of another run, and this one is new"
        another = shown_path(path.parent.with_name("another") / path.name)
        remedy = f"for a run of its own: CELL_DIR={another}; or move them away"
        raise InputError(shown_path(saved), wrong, remedy)


def take_over(file: YamlFile, words: Sequence[str], script: str) -> tuple[CellFolder, Path]:
    """Make the script's cell the request in its folder; return the folder, and the code to run.

    A job that Slurm has restarted keeps its request and its code.
    """
    cell, folder = chosen_cell(file, words)
    run, job, own = folder.path.parent, status.read_job(folder), own_job.job_id()
    first = earlier_record(folder)
    is_restart = own_job.restarts() and job and job.job_id == own
    if is_restart and first is not None and first.code:
        return folder, code_folder(run, first.code)
    cell = validated(cell, folder)
    with locked(folder.path / ".start.lock"):
        _refuse_another_job(folder)
        number, scheduler = folder.next_attempt().number, cell.cluster.scheduler
        code, command = snapshot_code(run), read_script(file).command
        asked = replace(cell.job_record(), command=command, commit=commit(), code=code)
        keep_request(folder, asked, script)
        now = status.Status(
            status.RUNNING, number, started=time.time(), restarts=own_job.restarts()
        )
        status.write_status(folder, now)
        of_run = read_run(run).scheduler if is_run(run) else scheduler
        # Record a process id only in a local run: in a Slurm run, `cancel` would take it for the
        # id of a Slurm job.
        if scheduler == of_run == "local":
            status.write_job(folder, process_job(os.getpid()))
            os.environ[RUN_VARIABLE] = str(run.resolve())
        elif own_job.slurm_job():
            status.write_job(folder, own)
            link = code_of_job(run, os.environ["SLURM_JOB_ID"])
            with contextlib.suppress(OSError):  # some file systems have no links
                link.unlink(missing_ok=True)
                link.symlink_to(code)
        else:
            folder.job.unlink(missing_ok=True)
        if is_run(run):
            note_new_job(run)
        else:
            cluster, stack = cell.cluster.name, cell.options.stack.name
            asked_run = RunRecord(scheduler, (folder.name,), run.name, cluster=cluster, stack=stack)
            write_run(run, asked_run)
    return folder, code_folder(run, code)


def _refuse_another_job(folder: CellFolder) -> None:
    run, job = folder.path.parent, status.read_job(folder)
    if job is None or not is_run(run) or status.read_status(folder).state not in status.OPEN:
        return
    if read_run(run).scheduler == "local":
        if job.job_id == str(os.getpid()) or not is_alive(job):
            return
        wrong, end = f"process {job.job_id} trains here", "cancel it with submit.py cancel"
    elif own_job.slurm_job() in (None, job.job_id):
        return
    else:
        info = slurm.job_infos([job.job_id]).get(job.job_id)
        if info is None or info.state not in slurm.WAITING | slurm.ACTIVE:
            return
        wrong, end = f"job {job.job_id} trains here ({info.state.lower()})", f"scancel {job.job_id}"
    another = f"CELL_DIR={shown_path(run.with_name('another') / folder.name)}"
    remedy = f"wait for its end, or {end}; for a run of its own: {another}"
    raise InputError(shown_path(folder.path), wrong, remedy)


def check(file: YamlFile, words: Sequence[str]) -> None:
    """Validate what a script would train, without a trace; raise InputError if it must not."""
    cell, folder = chosen_cell(file, words)
    cell = validated(cell, folder)
    for finding in (one for rule in ADVICE for one in rule(cell) if one.level == WARNING):
        print(f"warning: {finding}", file=sys.stderr)
    print(f"{cell.name} may run: {cell.nodes} node(s) x {cell.cluster.ranks}", file=sys.stderr)
