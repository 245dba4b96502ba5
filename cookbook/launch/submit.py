"""Create a run, submit its cells to Slurm or this machine through submitit, and resume them.

submitit pickles the supervisor, names the job's files and reads the job id back. The batch file has
the cell's #SBATCH options, and its last line starts the supervisor.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import submitit
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from cookbook.base.errors import JobError
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT, python_path, runs_folder
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.launch.script import option_word, render_script, sbatch_options
from cookbook.run.excluded import Choice, choose, excluded_file, read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.record import keep_request
from cookbook.run.run import (
    Run,
    RunRecord,
    note_new_job,
    read_run,
    release_submit_lock,
    take_submit_lock,
    write_run,
)
from cookbook.run.slurm import partition_nodes, sbatch
from cookbook.run.states import RUN_VARIABLE, process_job
from cookbook.run.status import FAILED, QUEUED, REFUSED, Status, write_job, write_status
from cookbook.supervise.supervisor import Supervisor


def create_run(sweep: str, cells: Sequence[Cell]) -> Run:
    """Write the run of `cells` under a hidden name, and rename it once it is complete."""
    root, stamp, first = runs_folder(), time.strftime("%Y%m%d-%H%M%S"), cells[0]
    building = root / f".{sweep}-{stamp}-{os.getpid()}"
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
        for cell in cells:
            folder = CellFolder(building / cell.name)
            cell.job_record().write(folder.record)
            write_whole(folder.script, render_script(cell), mode=0o755)
            state = Status(REFUSED, reason=cell.refused) if cell.refused else Status(QUEUED)
            write_status(folder, state)
        # Lock before the run is visible: while it is locked, cells without a job count as queued.
        take_submit_lock(building)
        # The rename reserves the name, so two sweeps in the same second get different names.
        for number in itertools.count(1):
            name = f"{sweep}-{stamp}" if number == 1 else f"{sweep}-{stamp}-{number}"
            write_run(building, replace(asked, run=name))
            try:
                building.rename(root / name)
            except OSError:
                if not (root / name).exists():
                    raise
            else:
                break
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return read_run(root / name)


_VERSIONS = "1.5."


class CellSlurmExecutor(SlurmExecutor):
    """Submit the supervisor in a batch file, `script`, that begins with `lines`."""

    def __init__(self, script: Path, lines: Sequence[str]) -> None:
        super().__init__(folder=script.parent)
        self.script, self.lines = script, lines
        # submitit waits 0.2 s between submissions, which sbatch does not need.
        self._throttling = 0.0

    # Always report as available: a missing sbatch raises an error with its remedy when called.
    @classmethod
    def affinity(cls) -> int:
        return 2

    # submitit's own batch file adds a wckey, a signal and an srun, and its sbatch inherits
    # variables. `cancel` finds the job of a deleted run by the script's path.
    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        # exec, so that Slurm's signals reach the supervisor instead of a shell.
        self.script.write_text("\n".join([*self.lines, f"exec {command}", ""]), encoding="utf-8")
        job_id = sbatch(self.script.resolve(), ROOT)
        return submitit.SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


class RunLocalExecutor(LocalExecutor):
    """Run a whole sweep on this machine, as one job that survives the closing of its terminal."""

    # submitit's own process would end with the terminal, and keep the terminal's output open.
    def _submit_command(self, command: str) -> LocalJob[Any]:
        environment = {
            **os.environ,
            RUN_VARIABLE: str(self.folder.parent.resolve()),
            "PYTHONPATH": python_path(),
            "VENV": sys.prefix,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": "2592000",  # 30 days
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        # Start a new session: Ctrl-C in the terminal must not reach the training. Discard output:
        # a reader of ours (`| tee`, ssh) would wait for the job, and the job logs to a file.
        words = [sys.executable, "-m", "submitit.local._local", str(self.folder)]
        process = subprocess.Popen(
            words,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def submit_run(run: Run, cells: Sequence[Cell], one_allocation: bool = False) -> list[str]:
    """Submit every cell of `run` that is not refused; return the job ids in that order.

    Each cell is one sbatch call. With `one_allocation`, or locally, one job runs the cells in turn.
    If Slurm refuses a cell (JobError), earlier cells stay queued; it and all later cells fail.
    """
    if not submitit.__version__.startswith(_VERSIONS):
        raise JobError(f"submitit is {submitit.__version__}, not {_VERSIONS}x; run: bash setup.sh")
    cells = [cell for cell in cells if not cell.refused]
    is_local, job_ids = run.scheduler == "local", list[str]()
    jobs = [cells] if is_local or one_allocation else [[cell] for cell in cells]
    try:
        for number, together in enumerate(jobs):
            folders = [run.cell(cell.name) for cell in together]
            try:
                job_id: str = _executor(run, together).submit(Supervisor(folders)).job_id
            except JobError as error:
                for cell in itertools.chain(*jobs[number:]):
                    write_status(run.cell(cell.name), Status(FAILED, reason=f"not queued: {error}"))
                place = f"{together[0].name}: " if len(together) == 1 else ""
                raise JobError(f"{place}{error}") from None
            for folder in folders:
                write_job(folder, process_job(int(job_id)) if is_local else job_id)
            job_ids.append(job_id)
    finally:
        release_submit_lock(run.folder)
    return job_ids


def _executor(run: Run, cells: Sequence[Cell]) -> RunLocalExecutor | CellSlurmExecutor:
    """Return the executor of one job for `cells`, with the first cell's sbatch options."""
    if run.scheduler == "local":
        return RunLocalExecutor(run.folder / "job")
    cell, choice = cells[0], leave_out(cells[0])
    # A job of one cell keeps its batch file in the cell's folder.
    script, title, name = run.cell(cell.name).submission, f"{cell.name}/train.sh", cell.name
    if len(cells) > 1:
        script, name = run.folder / "job/submission.sh", run.record.sweep or name
        title = f"the train.sh of {len(cells)} cells in turn"
    options = sbatch_options(cell, name, leave_out=choice.nodes)
    # sbatch's working folder is the checkout, and a run may be named by a relative path.
    options["output"] = str(script.parent.absolute() / "%j.log")
    if choice.begin is not None:
        options["begin"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(choice.begin))
    lines = [
        "#!/bin/bash",
        f"# Runs {title} under the cookbook's supervisor.",
        *(f"#SBATCH {option_word(option, value)}" for option, value in options.items()),
        "export SUBMITIT_EXECUTOR=slurm",
        f"export PYTHONPATH={shlex.quote(python_path())}",
        # The job uses the virtual environment that submitted it.
        f"export VENV={shlex.quote(sys.prefix)}",
    ]
    return CellSlurmExecutor(script, lines)


def resume_cells(run: Run, cells: Sequence[Cell]) -> list[str]:
    """Prepare the next attempt of each cell, and submit them; return the job ids.

    The caller holds the submit lock; this releases it. A cell whose submission fails is restored.
    """
    before: dict[CellFolder, dict[Path, bytes]] = {}
    try:
        for cell in cells:
            folder = run.cell(cell.name)
            paths = (folder.status, folder.job, folder.record, folder.script)
            before[folder] = {path: path.read_bytes() for path in paths if path.exists()}
            attempts = folder.attempts()
            # While the lock is held, a cell without a job counts as queued.
            folder.job.unlink(missing_ok=True)
            write_status(folder, Status(QUEUED, attempts[-1].number if attempts else 0))
            keep_request(folder, cell.job_record(), render_script(cell))
        job_ids = submit_run(run, cells)
    except BaseException:
        for folder, files in before.items():
            # A cell with a job was submitted, so only the others are restored.
            if not folder.job.exists():
                for path, content in files.items():
                    path.write_bytes(content)
        raise
    note_new_job(run.folder)
    return job_ids


def leave_out(cell: Cell) -> Choice:
    """Choose the nodes on the exclusion list that a new job must not get.

    Raise JobError if too few nodes are left and the recipe does not wait for them.
    """
    excluded = read_excluded()
    if not excluded:
        return Choice(())
    needed = cell.nodes + cell.spare_nodes
    nodes = set(partition_nodes(cell.cluster.partition)) - set(cell.cluster.exclude)
    choice = choose(needed, sorted(nodes), excluded)
    if choice.short and cell.recipe.too_few_nodes == "stop":
        remedy = f"see {shown_path(excluded_file())}, or ask for fewer with --nodes"
        missing = f"{choice.short} of {needed} missing"
        raise JobError(f"not enough healthy nodes: {missing}; {remedy}")
    return choice
