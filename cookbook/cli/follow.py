"""The commands for existing runs: `status`, `logs`, `cancel`, `report` and `compare`."""

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cookbook.base.errors import InputError, JobError
from cookbook.base.paths import runs_folder
from cookbook.base.tables import fitted, terminal_width, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.cli.display import CellProgress, Progress
from cookbook.config.request import HANDED_OVER
from cookbook.observe.history import collect_history
from cookbook.observe.metrics import Phase, Tail
from cookbook.results import compare
from cookbook.results.collect import collect_results
from cookbook.results.columns import render_json
from cookbook.results.result import RunResults
from cookbook.run import slurm
from cookbook.run.excluded import read_excluded
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, earlier_record
from cookbook.run.run import Run, find_cell, find_run, is_run, run_names
from cookbook.run.states import SETTLED, CellState, cancel_deleted, cancel_run, cell_states
from cookbook.run.status import FAILED, OPEN, RUNNING, read_resumptions

_LEAST_STEPS = 4  # logged steps needed to estimate the time left
POLL_S = {"local": 1.0, "slurm": 5.0}
_SILENT_S = 60.0
_PATIENCE_S = 20.0  # seconds that `status --watch` waits for Slurm; plain `status` waits less


def show_status(arguments: argparse.Namespace) -> int:
    """Print each cell's state, job, step and reason; with --watch, show progress as `run` does."""
    if arguments.run is None and not run_names() and (pending := _pending_scripts()):
        print("\n".join(pending))
        return 0
    run = find_run(arguments.run)
    if arguments.watch:
        return wait_for(run)
    print(f"{run.name} ({run.scheduler})")
    looks = Watcher(run).look()
    rows = []
    for state, progress in looks:
        step = f"step {progress.step}/{progress.total_steps or '?'}" if progress.step else ""
        if progress.validation_loss is not None:
            step += f", validation loss {progress.validation_loss:.4f}"
        job = f"job {state.job_id}" if state.job_id else ""
        step = ", ".join(filter(None, [step, progress.phase]))
        rows.append([state.cell, state.state, job, step, state.reason or ""])
    if rows:
        print(text_table(rows, width=terminal_width()))
    for cell in run.cells:
        lines = [line for one in read_resumptions(cell.attempts()) for line in one.lines]
        lines += collect_history(cell, earlier_record(cell) or CellRecord()).lines
        for line in lines:
            print(f"{cell.name}: {line}")
    if run.scheduler == "slurm":
        try:
            for node in read_excluded():
                print(f"excluded from new jobs: {node}")
        except InputError as error:
            print(error, file=sys.stderr)
    # Do not ask Slurm again if it has not answered.
    if arguments.run is None and all(state.is_known for state, _ in looks):
        for line in _pending_scripts():
            print(line)
    return 0


def _pending_scripts() -> list[str]:
    jobs, lines = list[slurm.JobInfo](), []
    with contextlib.suppress(JobError):
        jobs = slurm.own_jobs()
    for job in jobs:
        # Slurm's text is the script's path and then the arguments; both may hold spaces.
        words = job.script.split(" ")
        paths = (Path(" ".join(words[:end])) for end in range(1, len(words) + 1))
        script = next((path for path in paths if path.is_file()), None)
        if job.state in slurm.WAITING and script and HANDED_OVER in script.read_text():
            why = f": {job.reason}" if job.reason else ""
            lines.append(f"pending, submitted by sbatch {job.script}: job {job.job_id}{why}")
    return lines


def show_logs(arguments: argparse.Namespace) -> int:
    """Print the log of a cell's last attempt; with -f, follow it until the cell has ended."""
    run, cell = named_cell(arguments.cell)
    log, offset, asked, ended = cell.newest_log(), 0, 0.0, not arguments.follow
    while True:
        # Read the log every second, but ask the scheduler less often.
        if not ended and time.monotonic() - asked >= POLL_S[run.scheduler]:
            asked = time.monotonic()
            ended = _state(run, cell).has_ended
        # Look for a newer log before printing: once there is one, the current log is complete.
        newest = cell.newest_log()
        if log is not None:
            with log.open("rb") as file:
                file.seek(offset)
                shutil.copyfileobj(file, sys.stdout.buffer)
                offset = file.tell()
            sys.stdout.buffer.flush()
        if newest != log:
            log, offset = newest, 0
        elif ended:
            break
        else:
            time.sleep(1.0)
    if log is None:
        state = _state(run, cell)
        unsaid = "nothing is written yet" if state.state == RUNNING else "not started"
        found = f"has no log: {state.state}, {state.reason or unsaid}"
        raise InputError(f"{run.name}/{cell.name}", found)
    return 0


def named_cell(name: str | None) -> tuple[Run, CellFolder]:
    """Find the cell that the user named: RUN/CELL, a CELL of the newest run, or a RUN.

    For a RUN, or None (the newest run), return its running cell, else the last one that started.
    """
    if name and "/" not in name and name not in (names := run_names()) and names:
        newest = find_run(None)
        if name in [cell.name for cell in newest.cells]:
            return newest, newest.cell(name)
    run, named = find_cell(name)
    if named is not None:
        return run, named
    if not run.cells:
        raise InputError(run.name, "has no cell", "start a new run")
    states = cell_states(run)
    running = [one.cell for one in states if one.state == RUNNING]
    started = [cell.name for cell in run.cells if cell.newest_log()]
    waiting = [one.cell for one in states if one.state in OPEN]
    choices = [*running, *started[-1:], *waiting, run.cells[0].name]
    return run, run.cell(choices[0])


def _state(run: Run, cell: CellFolder) -> CellState:
    return next(state for state in cell_states(run) if state.cell == cell.name)


def cancel(arguments: argparse.Namespace) -> int:
    try:
        run = find_run(arguments.run)
    except InputError:
        folder = runs_folder() / (arguments.run or "")
        if arguments.run is None or folder.exists() or not (found := cancel_deleted(folder)):
            raise
        print(f"{arguments.run}: its folder was deleted; cancelled what was left of it ({found})")
        return 0

    states = [state for state in cell_states(run) if state.is_known and not state.has_ended]
    num_jobs = len({state.job_id for state in states if state.job_id})
    if arguments.run is None and num_jobs:
        jobs = "1 job" if num_jobs == 1 else f"{num_jobs} jobs"
        print(f"{run.name}, the newest run: cancelling {jobs}", flush=True)
    cells = cancel_run(run)
    ending = [one.cell for one in states if one.is_ending and one.cell not in cells]
    if cells:
        print(f"cancelled: {', '.join(cells)}")
    if ending:
        print(f"ended already, and Slurm is still clearing up: {', '.join(ending)}")
    if not (cells or ending):
        print(f"{run.name}: all cells have ended already")
    return 0


class Watcher:
    """Read the progress of a run's cells; each `look` reads only new log lines."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._records = {cell.name: earlier_record(cell) or CellRecord() for cell in run.cells}
        self._tails: dict[Path, Tail] = {}

    def look(self, patience: float = slurm.PATIENCE_S) -> list[tuple[CellState, CellProgress]]:
        return [(state, self._progress(state)) for state in cell_states(self.run, patience)]

    def _progress(self, state: CellState) -> CellProgress:
        record, tails = self._records[state.cell], list[Tail]()
        # Until a new attempt logs a step, show the previous attempt's newest step.
        for attempt in reversed(self.run.cell(state.cell).attempts()):
            tail = self._tails.setdefault(attempt.path, Tail(attempt, record.loss_rank))
            tail.read()
            tails.append(tail)
            if tail.step is not None:
                break
        step, phase = (tails[-1].step, tails[0].phase) if tails else (None, None)
        recent = list(tails[-1].recent) if tails else []
        is_starting = phase and phase != Phase.TRAINING and state.state == RUNNING
        shown = phase.value if phase and is_starting else None
        if state.state == RUNNING:
            shown = _silence(self.run.cell(state.cell).newest_log()) or shown
        left, times = None, [(one.step, one.time) for one in recent if one.time is not None]
        if record.steps and len(tails) == 1 and len(times) >= _LEAST_STEPS:
            (first, began), (last, now) = times[0], times[-1]
            left = (record.steps - last) * (now - began) / (last - first)
        return CellProgress(
            name=state.cell,
            state=state.state,
            step=step.step if step else None,
            total_steps=record.steps,
            tokens_per_second=step.tokens_per_second if step else None,
            loss=step.loss if step else None,
            validation_loss=next(filter(None, (one.validation_loss for one in tails)), None),
            elapsed=(state.ended or time.time()) - state.started if state.started else None,
            phase=shown,
            is_known=state.is_known,
            left=left,
            emulated=record.emulated,
        )


def _silence(log: Path | None) -> str | None:
    """Return the last line of a log to which nothing was written for a minute."""
    with contextlib.suppress(OSError):
        if log and time.time() - log.stat().st_mtime >= _SILENT_S:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - 4096))
                lines = file.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no line")
            return f"silent for over a minute; last: {last[:120]}"
    return None


def watch_run(run: Run) -> bool:
    """Show progress until every cell has ended; return False if the user stopped watching."""
    watcher = Watcher(run)
    try:
        with contextlib.closing(Progress(sys.stdout)) as progress:
            while True:
                if not is_run(run.folder):
                    raise JobError(
                        f"{shown_path(run.folder)}: was deleted, but its jobs may still run; "
                        f"stop them: python submit.py cancel {run.name}"
                    )
                cells = watcher.look(_PATIENCE_S)
                progress.update([cell for _, cell in cells])
                # While Slurm does not answer, the jobs continue, so keep watching.
                if all(state.has_ended for state, _ in cells):
                    return True
                time.sleep(POLL_S[run.scheduler])
    except KeyboardInterrupt:
        print(
            f"\nThe jobs keep running. To follow them:\n"
            f"  python submit.py status {run.name} --watch\n"
            f"  python submit.py logs {run.name} -f\n"
            f"  python submit.py report {run.name}\n"
            f"To stop them:\n"
            f"  python submit.py cancel {run.name}"
        )
        return False


def wait_for(run: Run, cells: Sequence[CellFolder] | None = None) -> int:
    """Show the progress of `cells` (None: all), then the run's report; return the exit status."""
    watched = run if cells is None else replace(run, cells=tuple(cells))
    if not watch_run(watched):
        return 130
    of_run = print_report(run, "md")
    states = {cell.name: of_run[cell.name] for cell in watched.cells}
    for cell, state in states.items():
        if state == FAILED:
            print(f"{cell} failed; its log: python submit.py logs {run.name}/{cell}")
    return 0 if set(states.values()) <= SETTLED else 1


def show_report(arguments: argparse.Namespace) -> int:
    if not arguments.all:
        print_report(find_run(arguments.run), arguments.format or "md")
        return 0
    if arguments.run or arguments.format not in (None, "html"):
        raise InputError("--all", "is one page over all runs", "leave out RUN and --format")
    from cookbook.results.page import save_all

    found = dict[Run, RunResults]()
    for name in reversed(run_names()):
        try:
            run = find_run(name)
            found[run] = collect_results(run, cell_states(run))
        except InputError as error:
            print(f"submit.py: left out: {error}", file=sys.stderr)
    if not found:
        raise InputError(shown_path(runs_folder()), "has no run", "start one")
    print(shown_path(save_all(found, runs_folder())))
    return 0


def print_report(run: Run, form: str) -> dict[str, str]:
    """Print the results in the format `form`, save them as files, and return the cells' states."""
    states = cell_states(run)
    results = collect_results(run, states)
    if form == "json":
        print(render_json(results), end="")
        return {state.cell: state.state for state in states}
    # Import lazily: what draws nothing must not wait for Jinja.
    from cookbook.results.page import MARKDOWN, PAGE, save_report
    from cookbook.results.summary import render_markdown

    if form == "md":
        print(fitted(render_markdown(results)), end="", flush=True)
    try:
        save_report(run, results)
    except OSError as error:
        if form == "html":
            raise
        # Only warn: the results were printed above. The disk may be full, or the folder read-only.
        path = Path(error.filename or run.folder / MARKDOWN)
        print(f"submit.py: not saved: {shown_path(path)}: {error.strerror}", file=sys.stderr)
    else:
        page = shown_path(run.folder / PAGE)
        if form == "html":
            print(page)
        else:
            print(f"\nAs a page: {page}, with {MARKDOWN} beside it")
    return {state.cell: state.state for state in states}


def show_comparison(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a cell is slower than the tolerance allows."""
    if not 0 <= arguments.tolerance < 100:
        raise InputError("--tolerance", f"found {arguments.tolerance:g}, allowed: 0 to 100 percent")
    runs = [find_run(name) for name in (arguments.reference, arguments.other)]
    reference, other = (collect_results(run, cell_states(run)) for run in runs)
    comparison = compare.compare_runs(reference, other, arguments.tolerance)
    if not comparison.slower and not any(
        row.judged.speed or row.judged.loss for row in comparison.rows
    ):
        found = (row.judged.incomparable for row in comparison.rows)
        reasons = [reason for reason in found if reason] or ["no cell is in both"]
        place = f"compare {' and '.join(run.name for run in runs)}"
        raise InputError(place, f"there is nothing to compare: {reasons[0]}")
    as_text = "" if arguments.json else fitted(compare.comparison_markdown(comparison))
    print(as_text or compare.comparison_json(comparison), end="")
    return 1 if comparison.slower else 0
