"""What a script does before and after training: its words judged, its run noted, its end written.

Where a supervisor runs the script, the run is noted already, and the supervisor notes the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cookbook.base.errors import InputError
from cookbook.base.paths import runs_folder
from cookbook.base.yamlfile import shown_path
from cookbook.config import validate
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.finding import ERROR, Finding
from cookbook.config.options import Options, parse_argv
from cookbook.config.overlay import Overlay, load_ep_backend, load_precision
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import published_number
from cookbook.config.stack import load_stack
from cookbook.run import slurm
from cookbook.run.attempts import Cause, write_attempt_end
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import is_run, new_record, read_run, write_run
from cookbook.run.status import (
    FAILED,
    OPEN,
    QUEUED,
    RUNNING,
    Status,
    read_job,
    read_status,
    write_job,
    write_status,
)
from cookbook.supervise.ends import ended
from cookbook.supervise.resume import find_checkpoint, prepare
from cookbook.supervise.stop import restarts

_PLACE = "TorchTitan arguments"


@dataclass(frozen=True)
class Start:
    """What a script says of itself.

    Attributes:
        words: TorchTitan's arguments; `own_words` are those at the end of the sbatch line.
    """

    folder: CellFolder
    cell: str
    recipe: str
    precision: str
    ep_backend: str
    cluster: str
    nodes: int
    words: Sequence[str]
    own_words: Sequence[str]


def judge(start: Start) -> Cell:
    """The cell that the script is about to train; raises where it cannot."""
    stack = load_stack()
    for name in parse_argv(start.own_words, _PLACE, stack).settings:
        stack.setting(_PLACE, name)
    options = parse_argv([*start.words, *start.own_words], _PLACE, stack)
    cluster = load_cluster(start.cluster)
    cell = Cell(
        name=start.cell,
        recipe=load_recipe(start.recipe),
        precision=_as_declared(load_precision(start.precision), options),
        ep_backend=_as_declared(load_ep_backend(start.ep_backend), options),
        cluster=cluster,
        nodes=start.nodes,
        options=options,
        hooks=options["experimental.custom_import"],
        emulated=options["cookbook.emulated"],
    )
    is_submitted = not os.environ.get("COOKBOOK_CHECK")
    found = [*_too_few_gpus(cell), *validate.judge(cell, is_submitted=is_submitted).errors]
    if found:
        first = found[0]
        raise InputError(first.option or cell.name, first.reason, first.remedy)
    return replace(cell, published=published_number(cell))


def _as_declared(overlay: Overlay, options: Options) -> Overlay:
    """The overlay as the script was rendered with it, should its file have changed since."""
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


def begin(start: Start, supervised: bool) -> str:
    """Judge the script's words and note its run; the answer that the script reads.

    Returns:
        The attempt's number, TorchTitan's LOG_RANK, and the local ranks that the log shows.
    """
    cell = judge(start)
    record = cell.record()
    if not supervised:
        _refuse_a_run(start.folder, cell)
    with _alone(start.folder):
        if not supervised:
            _refuse_another_job(start.folder)
        found = find_checkpoint(start.folder, cell)
        attempt = start.folder.next_attempt()
        if not supervised:
            _note(start.folder, cell, attempt.number)
        attempt.path.mkdir(parents=True, exist_ok=True)
    prepare(start.folder, attempt, cell, found)
    ranks = sorted({0, record.loss_rank})
    local = sorted({rank % record.ranks_per_node for rank in ranks})
    return " ".join([str(attempt.number), _joined(ranks), _joined(local)])


def _refuse_a_run(folder: CellFolder, cell: Cell) -> None:
    if folder.path.parent == runs_folder().resolve():
        raise InputError(
            f"CELL_DIR={shown_path(folder.path)}",
            "is the folder of a run, allowed: one of a cell below it",
            f"try CELL_DIR={shown_path(folder.path / cell.name)}",
        )


@contextlib.contextmanager
def _alone(folder: CellFolder) -> Iterator[None]:
    """Keep other scripts from beginning in this folder at the same moment."""
    folder.path.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.path, os.O_RDONLY)
    try:
        # Not every shared file system has locks.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


def _joined(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _note(folder: CellFolder, cell: Cell, attempt: int) -> None:
    """Make the run's folder where it is not there, and say that the cell runs."""
    run = folder.path.parent
    job_id = os.environ.get("SLURM_JOB_ID")
    _recorded(folder, cell, attempt).write(folder.record)
    write_status(folder, Status(RUNNING, attempt, started=time.time(), restarts=restarts()))
    if job_id and _job_of(folder) != job_id:
        # Requeued, it is no newer run.
        write_job(folder, job_id)
    if not is_run(run):
        record = new_record(
            run.name,
            cluster=cell.cluster.name,
            scheduler=cell.cluster.scheduler,
            stack=cell.options.stack.name,
            cells=[folder.name],
        )
        write_run(run, record)


def _job_of(folder: CellFolder) -> str | None:
    with contextlib.suppress(InputError):
        job = read_job(folder)
        return job.job_id if job else None
    return None


def _recorded(folder: CellFolder, cell: Cell, attempt: int) -> CellRecord:
    """The cell's record, with the first one kept where the cell goes on in its folder."""
    asked = cell.record()
    if attempt == 0:
        return asked
    try:
        first = read_record(folder.record)
    except InputError:
        # It is not there, or nobody can read it.
        return asked
    names = ("recipe", "precision", "ep_backend", "cluster", "ranks_per_node")
    if any(getattr(first, name) != getattr(asked, name) for name in names):
        return asked
    return first.changed(attempt, asked)


def note_refusal(folder: CellFolder, reason: str) -> None:
    """Leave the reason for the supervisor, which sees an exit status alone."""
    status = read_status(folder)
    write_status(folder, replace(status, state=FAILED, reason=reason))


def end(
    folder: CellFolder, exit_code: int, signal_name: str = "", decision: str | None = None
) -> None:
    """Note how an attempt of the script ended.

    Args:
        signal_name: the signal that the script was told to stop with.
        decision: what the script does about it; None where it ends too.
    """
    status = read_status(folder)
    last, state = ended(folder, status.attempt, status.started, exit_code, signal_name)
    last = replace(last, decision="requeued" if state == QUEUED else decision)
    attempt = folder.attempt(status.attempt)
    if attempt.path.is_dir():
        write_attempt_end(attempt, last)
    if decision is not None:
        return
    reason = last.reason
    if last.cause is Cause.SAVED and state == FAILED:
        reason = f"{reason}; submit it again to go on"
    times = {"started": status.started, "ended": last.ended}
    write_status(
        folder, Status(state, status.attempt, reason, exit_code, restarts=restarts(), **times)
    )
