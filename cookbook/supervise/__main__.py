"""Entry point of the supervisor for scripts that were started with sbatch or bash.

python -m cookbook.supervise CELL_DIR --script=FILE --cell=NAME ... -- ARGS -- SBATCH ARGS
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.base.errors import InputError, run_command
from cookbook.base.files import locked
from cookbook.base.paths import runs_folder
from cookbook.base.yamlfile import shown_path
from cookbook.config import validate as rules
from cookbook.config.cell import Cell, Finding
from cookbook.config.cluster import load_cluster
from cookbook.config.dialect.argv import parse_argv
from cookbook.config.options import Options
from cookbook.config.recipe import Overlay, load_ep_backend, load_precision, load_recipe
from cookbook.config.resolve import keep_schedule, published_number
from cookbook.config.stack import load_stack
from cookbook.run import slurm, status
from cookbook.run.folder import CellFolder, saved_steps
from cookbook.run.record import TOTAL_STEPS, earlier_record, keep_request, read_record
from cookbook.run.run import RunRecord, is_run, note_new_job, read_run, write_run
from cookbook.run.states import RUN_VARIABLE, is_alive, process_job
from cookbook.supervise.exits import restarts
from cookbook.supervise.resume_point import find_checkpoint
from cookbook.supervise.supervisor import Supervisor

_PLACE = "TorchTitan arguments"


@dataclass(frozen=True)
class Start:
    """Arguments that the script passes to the supervisor.

    Attributes:
        script: the running script; under sbatch a copy in Slurm's spool.
        nodes: the job's number of nodes, including `spare_nodes`, which do not train.
        arguments: the TorchTitan options in the script.
        own: the TorchTitan options that the user put after the script's name on the sbatch line.
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
    nproc_per_node: int
    arguments: Sequence[str]
    own: Sequence[str]


def validate(start: Start) -> Cell:
    """Return the cell that the script would train; raise InputError if it is invalid."""
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
        emulated=options["cookbook.emulated"],
    )
    for name, own in (("PRECISION", start.precision), ("EP_BACKEND", start.ep_backend)):
        if (found := os.environ.get(name) or own) != own:
            raise InputError(f"{name}={found}", f"this script trains {own}", "render another one")
    granted, ranks = os.environ.get("SLURM_GPUS_ON_NODE", ""), cell.cluster.ranks_per_node
    if start.nproc_per_node != ranks:
        found = f"found {start.nproc_per_node}, and {cell.cluster.name} has {ranks} here"
        raise InputError("--nproc-per-node", found, "render the script again")
    if cell.cluster.gpu is not None and granted.isdecimal() and int(granted) < ranks:
        found = f"the job has {granted} GPUs a node, and the script starts {ranks} ranks"
        remedy = f"ask for --gpus-per-node={ranks}, or set gpus_per_node in the cluster's profile"
        raise InputError("sbatch --gpus-per-node", found, remedy)
    # Check the layout first: `find_checkpoint` would blame the checkpoint for an invalid layout.
    _refuse(rules.validation_errors(cell), cell)
    _check_folder(start.folder.path, cell)
    first, saved = earlier_record(start.folder), find_checkpoint(start.folder, cell.record())
    cell = replace(cell, resumes=saved.checkpoint is not None)
    is_submitted = not os.environ.get("COOKBOOK_CHECK")
    _refuse(rules.judge(cell, is_submitted=is_submitted).errors, cell)
    # When training resumes after step 0, keep the learning-rate schedule that it began with.
    if first is not None and saved.checkpoint is not None and saved.checkpoint.step:
        kept = keep_schedule(cell.options, first, shown_path(start.folder.record))
        cell = replace(cell, options=kept)
    return replace(cell, published=published_number(cell))


def _refuse(errors: Sequence[Finding], cell: Cell) -> None:
    for error in errors:
        raise InputError(error.option or cell.name, error.reason, error.remedy)


def _as_rendered(overlay: Overlay, options: Options) -> Overlay:
    # The YAML file of this precision or EP backend may have changed since the script was written.
    expect = {name: options.settings.get(name, setting) for name, setting in overlay.expect.items()}
    return replace(overlay, expect=expect)


def _check_folder(path: Path, cell: Cell) -> None:
    place = f"CELL_DIR={shown_path(path)}"
    if path == Path("/") or (path.exists() and not path.is_dir()):
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
    folder, is_loaded = CellFolder(path), cell.options["checkpoint.enable"]
    saved = folder.checkpoints(asked.options)
    is_foreign = not (folder.record.exists() or saved.is_relative_to(path.resolve()))
    # Step 0 is a seed, which a new run may start from.
    if is_foreign and is_loaded and any(step for step, _ in saved_steps(saved)):
        wrong = "holds checkpoints of another run, and this one is new"
        another = shown_path(path.parent.with_name("another") / path.name)
        remedy = f"for a run of its own: CELL_DIR={another}; or move them away"
        raise InputError(shown_path(saved), wrong, remedy)


def start_run(start: Start) -> None:
    """Validate the script and record its run; skip both if Slurm has restarted the job."""
    folder, job_id = start.folder, os.environ.get("SLURM_JOB_ID")
    job = status.read_job(folder)
    if restarts() and folder.record.exists() and job and job.job_id == job_id:
        return
    cell = validate(start)
    with locked(folder.path / ".start.lock"):
        _refuse_another_job(folder)
        number = folder.next_attempt().number
        keep_request(folder, cell.job_record(), start.script.read_text(encoding="utf-8"))
        now = status.Status(status.RUNNING, number, started=time.time(), restarts=restarts())
        status.write_status(folder, now)
        run, scheduler = folder.path.parent, cell.cluster.scheduler
        of_run = read_run(run).scheduler if is_run(run) else scheduler
        # Record a process id only in a local run: in a Slurm run, `cancel` would take it for the
        # id of a Slurm job.
        if scheduler == of_run == "local":
            status.write_job(folder, process_job(os.getpid()))
            os.environ[RUN_VARIABLE] = str(run.resolve())
        elif job_id:
            status.write_job(folder, job_id)
        else:
            folder.job.unlink(missing_ok=True)
        if is_run(run):
            note_new_job(run)
        else:
            cluster, stack = cell.cluster.name, cell.options.stack.name
            asked = RunRecord(scheduler, (folder.name,), run.name, cluster=cluster, stack=stack)
            write_run(run, asked)


def _refuse_another_job(folder: CellFolder) -> None:
    own, run, job = os.environ.get("SLURM_JOB_ID"), folder.path.parent, status.read_job(folder)
    if job is None or not is_run(run) or status.read_status(folder).state not in status.OPEN:
        return
    if read_run(run).scheduler == "local":
        if job.job_id == str(os.getpid()) or not is_alive(job):
            return
        wrong, end = f"process {job.job_id} trains here", "cancel it with submit.py cancel"
    elif own in (None, job.job_id):
        return
    else:
        info = slurm.job_infos([job.job_id]).get(job.job_id)
        if info is None or info.state not in slurm.WAITING | slurm.ACTIVE:
            return
        wrong, end = f"job {job.job_id} trains here ({info.state.lower()})", f"scancel {job.job_id}"
    another = f"CELL_DIR={shown_path(run.with_name('another') / folder.name)}"
    remedy = f"wait for its end, or {end}; for a run of its own: {another}"
    raise InputError(shown_path(folder.path), wrong, remedy)


# Exit status if COOKBOOK_CHECK is set and the script is valid.
CHECKED = 3


def parse(words: Sequence[str]) -> Start:
    parser = argparse.ArgumentParser(prog="python -m cookbook.supervise")
    parser.add_argument("folder", type=lambda path: CellFolder(Path(path)))
    parser.add_argument("--script", type=Path, required=True)
    for name in ("cell", "recipe", "precision", "ep-backend", "cluster"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--spare-nodes", type=int, default=0)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    # Split by hand: argparse would parse TorchTitan's options as its own.
    marked = [*words, "--", "--"]
    first = marked.index("--")
    second = marked.index("--", first + 1)
    given = vars(parser.parse_args(words[:first]))
    return Start(arguments=words[first + 1 : second], own=words[second + 1 :], **given)


def main(words: Sequence[str]) -> int:
    """Train the script's cell; if COOKBOOK_CHECK is set, only validate the script."""
    start = parse(words)
    if os.environ.get("COOKBOOK_CHECK"):
        cell = validate(start)
        print(f"{cell.name} may run: {cell.nodes} node(s) x {cell.cluster.ranks}", file=sys.stderr)
        return CHECKED
    start_run(start)
    # submitit sets this variable only in its own jobs, but `slurm_job` needs it here too.
    record = read_record(start.folder.record)
    os.environ["SUBMITIT_EXECUTOR"] = str(record.profile["scheduler"])
    # Pass the recorded length of the learning-rate schedule: resuming must not change the schedule.
    total = record.options.get(TOTAL_STEPS)
    kept = [] if total is None else [f"--{TOTAL_STEPS}={total}"]
    return Supervisor([start.folder], [*start.own, *kept])()


if __name__ == "__main__":
    sys.exit(run_command("cookbook.supervise", lambda: main(sys.argv[1:])))
