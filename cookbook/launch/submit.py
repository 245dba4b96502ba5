"""Create a run, submit its cells through submitit (to Slurm or this machine), and resume them.

submitit writes the batch files and reads the job ids back. A job's command is the supervisor.
"""

import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from submitit import LocalExecutor, SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from cookbook.base.errors import JobError, nearest
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT, python_path, runs_folder
from cookbook.base.yamlfile import shown_path
from cookbook.config.asked import ONCE, keep_request
from cookbook.config.cell import Cell
from cookbook.config.options import Options
from cookbook.launch.script import command_text, render_script, sbatch_options
from cookbook.run import slurm
from cookbook.run.excluded import (
    EXCLUDED_VARIABLE,
    Choice,
    choose,
    excluded_file,
    read_excluded,
)
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import (
    Run,
    RunRecord,
    code_folder,
    commit,
    note_new_job,
    publish_run,
    release_submit_locks,
    snapshot_code,
)
from cookbook.run.states import RUN_VARIABLE, process_job
from cookbook.run.status import (
    FAILED,
    QUEUED,
    REFUSED,
    Status,
    write_job,
    write_status,
)


def create_run(sweep: str, cells: Sequence[Cell]) -> Run:
    """Write the run's folder under a hidden name, and rename it once it is complete."""
    stamp, first = time.strftime("%Y%m%d-%H%M%S"), cells[0]
    building = runs_folder() / f".{sweep}-{stamp}-{os.getpid()}"
    asked = RunRecord(
        first.cluster.scheduler,
        tuple(cell.name for cell in cells),
        sweep=sweep,
        cluster=first.cluster.name,
        stack=first.options.stack.name,
        command=("python", "submit.py", *sys.argv[1:]),
        baseline=next((cell.baseline for cell in cells if cell.baseline), None),
    )
    try:
        code, of_commit = snapshot_code(building), commit()
        for cell in cells:
            folder = CellFolder(building / cell.name)
            _request(cell, code, of_commit).write(folder.record)
            write_whole(folder.script, render_script(cell), mode=0o755)
            state = Status(REFUSED, reason=cell.refused) if cell.refused else Status(QUEUED)
            write_status(folder, state)
        return publish_run(building, f"{sweep}-{stamp}", asked)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _request(cell: Cell, code: str, of_commit: str | None) -> CellRecord:
    return replace(cell.job_record(), command=command_text(cell), code=code, commit=of_commit)


def submit_run(run: Run, cells: Sequence[Cell], one_allocation: bool = False) -> list[str]:
    """Submit all cells except the refused ones; return the job ids.

    Each cell gets a job of its own. With `one_allocation`, or locally, one job runs all cells
    in turn. Raises JobError if a job cannot be submitted. Then the job's cells and all later ones
    are marked as failed, and earlier jobs are not cancelled.
    """
    cells = [cell for cell in cells if not cell.refused]
    is_local, job_ids = run.scheduler == "local", list[str]()
    jobs = [cells] if is_local or one_allocation else [[cell] for cell in cells]
    try:
        for number, together in enumerate(jobs):
            folders = [run.cell(cell.name) for cell in together]
            try:
                job_id = (
                    _submit_locally(run, folders) if is_local else _submit_to_slurm(run, together)
                )
            except (JobError, KeyboardInterrupt) as error:
                why = str(error) or "interrupted"
                for cell in itertools.chain(*jobs[number:]):
                    write_status(run.cell(cell.name), Status(FAILED, reason=f"not queued: {why}"))
                place = f"{together[0].name}: " if len(together) == 1 else ""
                queued = f"; queued before: job {', '.join(job_ids)}" if job_ids else ""
                rest = f"to queue the rest: python submit.py run --resume {run.name}"
                raise JobError(f"{place}{why}{queued}; {rest}") from None
            for folder in folders:
                write_job(folder, process_job(int(job_id)) if is_local else job_id)
            job_ids.append(job_id)
    finally:
        release_submit_locks()
    return job_ids


def _command(folders: Sequence[CellFolder], *before: str) -> tuple[str, list[str]]:
    """Return arguments for `os.execv`, by which submitit's process becomes the supervisor.

    So Slurm's signals reach it, and submitit's pickle holds nothing of the cookbook.
    """
    paths = [str(folder.path.resolve()) for folder in folders]
    words = [*before, sys.executable, "-m", "cookbook.supervise", *paths]
    return words[0], words


def _submit_to_slurm(run: Run, cells: Sequence[Cell]) -> str:
    cell, folders = cells[0], [run.cell(cell.name) for cell in cells]
    choice = nodes_to_exclude(cell)
    logs = folders[0].job_files if len(cells) == 1 else run.folder / "job"
    name = cell.name if len(cells) == 1 else run.record.sweep or cell.name
    options = sbatch_options(cell, name, exclude=choice.nodes)
    options |= {"output": f"{logs.resolve()}/%j.log", "chdir": str(ROOT)}
    if choice.begin is not None:
        options["begin"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(choice.begin))
    for program in ("sbatch", "srun"):  # submitit looks for srun, though it is not used here
        if shutil.which(program) is None:
            remedy = "log in to the cluster, or use --cluster local"
            raise JobError(f"{program} is not on PATH; {remedy}")
    variables = _variables(folders[0]) | {EXCLUDED_VARIABLE: ",".join(choice.nodes)}
    logs.mkdir(parents=True, exist_ok=True)
    # With exec, Slurm's signals reach the supervisor instead of a shell. Slurm keeps the batch
    # file's path, so that `cancel` finds the job even after the run's folder is deleted.
    python = f"exec {shlex.quote(sys.executable)}"
    executor = SlurmExecutor((run.folder / "job").resolve(), python=python)
    executor.update_parameters(
        # Values of submitit's that the profile may not have asked for.
        time=None,
        wckey=None,
        nodes=options.pop("nodes"),
        job_name=options.pop("job-name"),
        stderr_to_stdout=True,
        use_srun=False,
        setup=[f"export {key}={shlex.quote(value)}" for key, value in variables.items()],
        additional_parameters=options,
    )
    try:
        with slurm.hidden_variables():
            job = executor.submit(os.execv, *_command(folders))
    except (FailedJobError, FailedSubmissionError) as error:
        raise JobError(slurm.submission_error(str(error))) from None
    if choice.begin is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(choice.begin))
        kept, listed = ",".join(cell.cluster.exclude), shown_path(excluded_file())
        print(
            f"{cell.name}: {choice.short} healthy node(s) too few, so job {job.job_id} starts at "
            f"{when}; to start it sooner, delete entries in {listed}, then: "
            f"scontrol update JobId={job.job_id} StartTime=now ExcNodeList={kept}",
            file=sys.stderr,
        )
    return str(job.job_id)


def _submit_locally(run: Run, folders: Sequence[CellFolder]) -> str:
    """Start one job that outlives its terminal, and runs all cells of the run on this machine."""
    executor = LocalExecutor((run.folder / "job").resolve())
    executor.update_parameters(timeout_min=60 * 24 * 30, stderr_to_stdout=True)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # submitit hides all GPUs from a job that asks it for none.
    gpus = ["-u", "CUDA_VISIBLE_DEVICES"] if seen is None else [f"CUDA_VISIBLE_DEVICES={seen}"]
    reader, writer = os.pipe()
    # In a session of its own, neither Ctrl-C nor closing the terminal stops the training. Without
    # the standard streams, `submit.py ... | tee` does not wait until training ends.
    if (child := os.fork()) == 0:
        os.setsid()
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.environ |= _variables(folders[0]) | {RUN_VARIABLE: str(run.folder.resolve())}
        words = _command(folders, "/usr/bin/env", *gpus)
        os.write(writer, str(executor.submit(os.execv, *words).job_id).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        job_id = answer.read()
    os.waitpid(child, 0)
    if not job_id:
        raise JobError("submitit could not start the job; is the disk full?")
    return job_id


def _variables(folder: CellFolder) -> dict[str, str]:
    """Return the variables by which a cell's job finds its Python, and the code of its run."""
    name = read_record(folder.record).code
    assert name is not None
    code = code_folder(folder.path.parent.resolve(), name)
    return {"PYTHONPATH": python_path(code), "PYTHONSAFEPATH": "1", "VENV": sys.prefix}


def resume_cells(run: Run, cells: Sequence[Cell]) -> list[str]:
    """Prepare the next attempt of each cell, and submit them; return the job ids.

    The caller must hold the submit lock, which is released here. A cell that could not be submitted
    gets its old files back.
    """
    before: dict[CellFolder, dict[Path, bytes]] = {}
    code, of_commit = snapshot_code(run.folder), commit()
    try:
        for cell in cells:
            folder = run.cell(cell.name)
            paths = (folder.status, folder.job, folder.record, folder.script)
            before[folder] = {path: path.read_bytes() for path in paths if path.exists()}
            attempts, first = folder.attempts(), read_record(folder.record)
            if first.code != code:
                said = f"today's code ({of_commit}), and before it that of {first.commit}"
                print(f"{cell.name}: takes {said}", file=sys.stderr)
            # While the submit lock is held, `status` shows a cell without a job as queued.
            folder.job.unlink(missing_ok=True)
            write_status(folder, Status(QUEUED, attempts[-1].number if attempts else 0))
            # Leave the options in ONCE out of the script, so that rerunning it does not apply them.
            settings = cell.options.settings
            kept = {name: settings[name] for name in settings if name not in ONCE}
            script = render_script(replace(cell, options=Options(cell.options.stack, kept)))
            keep_request(folder, _request(cell, code, of_commit), script)
        job_ids = submit_run(run, cells)
    except BaseException:
        for folder, files in before.items():
            if not folder.job.exists():
                for path, content in files.items():
                    path.write_bytes(content)
        raise
    note_new_job(run.folder)
    return job_ids


def nodes_to_exclude(cell: Cell) -> Choice:
    """Return which nodes the cell's new job must exclude, and when the job may start.

    Raise JobError if too few nodes are left and the recipe says not to wait for more.
    """
    excluded = read_excluded()
    if not excluded:
        return Choice(())
    needed = cell.nodes + cell.spare_nodes
    known = slurm.partition_nodes("*")
    nodes = {*slurm.partition_nodes(cell.cluster.partition)} - {*cell.cluster.exclude}
    for one in excluded:
        if known and one.node not in known:
            close = "".join(f"; did you mean {name}?" for name in nearest(one.node, known))
            place = shown_path(excluded_file())
            print(f"{place}: {one.node} is no node that Slurm has{close}", file=sys.stderr)
    choice = choose(needed, sorted(nodes), excluded)
    if choice.short and cell.recipe.too_few_nodes == "stop":
        remedy = f"see {shown_path(excluded_file())}, or ask for fewer with --nodes"
        raise JobError(f"not enough healthy nodes: {choice.short} of {needed} missing; {remedy}")
    return choice
