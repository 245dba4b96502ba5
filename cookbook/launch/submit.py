"""Create a run, submit its cells through submitit (to Slurm or this machine), and resume them.

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
from cookbook.config.options import Options, exported
from cookbook.launch.script import option_word, render_script, sbatch_options
from cookbook.run.excluded import (
    LEFT_OUT_VARIABLE,
    Choice,
    choose,
    excluded_file,
    read_excluded,
)
from cookbook.run.folder import CellFolder
from cookbook.run.record import ONCE, keep_request
from cookbook.run.run import Run, RunRecord, note_new_job, publish_run, release_submit_locks
from cookbook.run.slurm import partition_nodes, sbatch
from cookbook.run.states import RUN_VARIABLE, process_job
from cookbook.run.status import FAILED, QUEUED, REFUSED, Status, write_job, write_status
from cookbook.supervise.supervisor import Supervisor


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
        for cell in cells:
            folder = CellFolder(building / cell.name)
            cell.job_record().write(folder.record)
            write_whole(folder.script, render_script(cell), mode=0o755)
            state = Status(REFUSED, reason=cell.refused) if cell.refused else Status(QUEUED)
            write_status(folder, state)
        return publish_run(building, f"{sweep}-{stamp}", asked)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


_VERSIONS = "1.5."


class CellSlurmExecutor(SlurmExecutor):
    """Run all `cells` in one Slurm job, which has the sbatch options of the first cell."""

    def __init__(self, run: Run, cells: Sequence[Cell]) -> None:
        self.run, self.cells, self.choice = run, cells, leave_out(cells[0])
        alone = run.cell(cells[0].name).job_files
        super().__init__(folder=alone if len(cells) == 1 else run.folder / "job")

    # Always report Slurm as available: if sbatch is missing, calling it gives a more helpful error.
    @classmethod
    def affinity(cls) -> int:
        return 2

    # Write our own batch file, because the one by submitit sets a wckey and a signal and starts an
    # srun. Call sbatch ourselves, because submitit would pass Slurm's environment variables to it.
    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        cell, begin = self.cells[0], self.choice.begin
        title, name = f"{cell.name}/train.sh", cell.name
        if len(self.cells) > 1:
            title = f"the train.sh of {len(self.cells)} cells in turn"
            name = self.run.record.sweep or name
        options = sbatch_options(cell, name, leave_out=self.choice.nodes)
        options["output"] = str(self.folder / "%j.log")
        if begin is not None:
            options["begin"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin))
        # The nodes are tested before train.sh starts, so set up the cluster's environment here too.
        # Skip a missing file silently, because train.sh will report it.
        cluster = cell.cluster
        files = map(shlex.quote, [*cluster.source, *cluster.source_if_exists])
        variables = exported(cluster.environment).items()
        lines = [
            "#!/bin/bash",
            f"# Runs {title} under the cookbook's supervisor.",
            *(f"#SBATCH {option_word(option, value)}" for option, value in options.items()),
            *(f"[[ ! -r {file} ]] || source {file}" for file in files),
            *(f"export {variable}={shlex.quote(value)}" for variable, value in variables),
            "export SUBMITIT_EXECUTOR=slurm",
            f"export PYTHONPATH={shlex.quote(python_path())}",
            f"export VENV={shlex.quote(sys.prefix)}",
            f"export {LEFT_OUT_VARIABLE}={','.join(self.choice.nodes)}",
            # exec, so that Slurm's signals reach the supervisor instead of a shell.
            f"exec {command}\n",
        ]
        # Slurm keeps this path, so `cancel` finds the job even after the run's folder is deleted.
        script = (self.folder / "submission.sh").resolve()
        script.write_text("\n".join(lines), encoding="utf-8")
        job_id = sbatch(script, ROOT)
        return submitit.SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


class RunLocalExecutor(LocalExecutor):
    """Run a whole sweep on this machine, as one job that outlives its terminal."""

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
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        # Unlike submitit, start a new session: neither Ctrl-C nor closing the terminal then stops
        # the training. Detach the standard streams, so that `submit.py ... | tee` does not wait
        # until training ends.
        silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        words = [sys.executable, "-m", "submitit.local._local", str(self.folder)]
        process = subprocess.Popen(words, env=environment, start_new_session=True, **silent)
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


def submit_run(run: Run, cells: Sequence[Cell], one_allocation: bool = False) -> list[str]:
    """Submit all cells except the refused ones; return the job ids.

    Each cell gets a job of its own. With `one_allocation`, or locally, one job runs all cells
    in turn. Raises JobError if submitit has the wrong version or a job cannot be submitted. In the
    latter case, the job's cells and all later ones are marked as failed, and earlier jobs are not
    cancelled.
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
                local = RunLocalExecutor(run.folder / "job") if is_local else None
                executor = local or CellSlurmExecutor(run, together)
                job_id: str = executor.submit(Supervisor(folders)).job_id
            except JobError as error:
                for cell in itertools.chain(*jobs[number:]):
                    write_status(run.cell(cell.name), Status(FAILED, reason=f"not queued: {error}"))
                place = f"{together[0].name}: " if len(together) == 1 else ""
                raise JobError(f"{place}{error}") from None
            for folder in folders:
                write_job(folder, process_job(int(job_id)) if is_local else job_id)
            job_ids.append(job_id)
    finally:
        release_submit_locks()
    return job_ids


def resume_cells(run: Run, cells: Sequence[Cell]) -> list[str]:
    """Prepare the next attempt of each cell, and submit them; return the job ids.

    The caller must hold the submit lock, which is released here. A cell that could not be submitted
    gets its old files back.
    """
    before: dict[CellFolder, dict[Path, bytes]] = {}
    try:
        for cell in cells:
            folder = run.cell(cell.name)
            paths = (folder.status, folder.job, folder.record, folder.script)
            before[folder] = {path: path.read_bytes() for path in paths if path.exists()}
            attempts = folder.attempts()
            # While the submit lock is held, `status` shows a cell without a job as queued.
            folder.job.unlink(missing_ok=True)
            write_status(folder, Status(QUEUED, attempts[-1].number if attempts else 0))
            # Leave the options in ONCE out of the script, so that rerunning it does not apply them.
            settings = cell.options.settings
            kept = {name: settings[name] for name in settings if name not in ONCE}
            script = render_script(replace(cell, options=Options(cell.options.stack, kept)))
            keep_request(folder, cell.job_record(), script)
        job_ids = submit_run(run, cells)
    except BaseException:
        for folder, files in before.items():
            if not folder.job.exists():
                for path, content in files.items():
                    path.write_bytes(content)
        raise
    note_new_job(run.folder)
    return job_ids


def leave_out(cell: Cell) -> Choice:
    """Return which nodes the cell's new job must exclude, and when the job may start.

    Raise JobError if too few nodes are left and the recipe says not to wait for more.
    """
    excluded = read_excluded()
    if not excluded:
        return Choice(())
    needed = cell.nodes + cell.spare_nodes
    nodes = set(partition_nodes(cell.cluster.partition)) - set(cell.cluster.exclude)
    choice = choose(needed, sorted(nodes), excluded)
    if choice.short and cell.recipe.too_few_nodes == "stop":
        remedy = f"see {shown_path(excluded_file())}, or ask for fewer with --nodes"
        raise JobError(f"not enough healthy nodes: {choice.short} of {needed} missing; {remedy}")
    return choice
