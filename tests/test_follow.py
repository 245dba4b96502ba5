"""`logs`, `status` and `cancel`; the watcher of cells that run, and its display."""

import io
import itertools
import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from cookbook.cli import display
from cookbook.cli.display import CellProgress, Progress
from cookbook.cli.follow import Watcher, cancel, show_logs, show_status
from cookbook.run import slurm
from cookbook.run.folder import CellFolder
from cookbook.run.run import read_run
from cookbook.run.slurm import JobInfo
from cookbook.run.status import write_job
from tests.made_up_run import Run, metrics_line, steps_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setattr(slurm, "own_jobs", list)
    return Run(tmp_path)


def printed(
    capfd: pytest.CaptureFixture[str], cell: str | None = None, follow: bool = False
) -> list[str]:
    """The lines that `logs` prints."""
    assert show_logs(Namespace(cell=cell, follow=follow)) == 0
    return capfd.readouterr().out.splitlines()


def test_before_the_first_attempt_logs_shows_the_jobs_newest_log(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    job = CellFolder(run.add("first", state="queued")).job_files
    run.write()
    job.mkdir()
    for number, time_s in ((1, 10), (2, 30), (3, 20)):
        (job / f"{number}.log").write_text(f"of job {number}\n")
        os.utime(job / f"{number}.log", (time_s, time_s))
    assert printed(capfd, "first") == ["of job 2"]


def test_logs_shows_the_cell_that_runs(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.add("first", "of the first\n")
    run.add("second", "of the second\n", state="running")
    run.add("third", "of the third\n", state="failed")
    run.add("fourth", state="queued")
    run.write()
    name = run.folder.name
    assert printed(capfd) == printed(capfd, name) == ["of the second"]
    for asked in ("third", f"{name}/third", f"{name}/third/", f"{run.folder}/third"):
        assert printed(capfd, asked) == ["of the third"]
    assert printed(capfd, str(run.folder)) == ["of the second"]


def test_status_shows_the_last_line_of_a_log_that_is_silent(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = CellFolder(run.add("first", "of the first\nwaits for a name\n\n", state="running"))
    run.write()
    log = cell.newest_log()
    assert log
    for silent_s, is_told in ((50, False), (70, True)):
        os.utime(log, (time.time() - silent_s,) * 2)
        assert show_status(Namespace(run=None, watch=False)) == 0
        told = "silent for over a minute; last: waits for a name" in capfd.readouterr().out
        assert told is is_told


def test_a_log_is_followed_through_a_new_attempt_to_the_end(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.add("a", state="queued")
    run.write()

    def say(state: str) -> None:
        (folder / "status.json").write_text(json.dumps({"state": state}))

    def log(attempt: int, text: str) -> None:
        (folder / f"attempt-{attempt}").mkdir(exist_ok=True)
        with (folder / f"attempt-{attempt}/train.log").open("a") as file:
            file.write(text)

    def pauses() -> Iterator[None]:
        """What happens in each pause; one pause too many is an error."""
        yield
        log(0, "one\n")
        yield
        log(0, "two\n")
        yield
        # The first attempt ends with a last line, and the next one has begun already.
        log(0, "three\n")
        log(1, "four\n")
        yield
        log(1, "five\n")
        say("finished")
        yield

    say("running")
    left, seconds = pauses(), itertools.count(1000)
    monkeypatch.setattr(time, "sleep", lambda _: next(left))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    assert printed(capfd, "a", follow=True) == ["one", "two", "three", "four", "five"]
    assert not list(left)
    assert printed(capfd, "a", follow=True) == ["four", "five"]


@pytest.mark.parametrize("is_named", [False, True])
def test_without_a_name_it_is_said_first_which_run_is_cancelled(
    run: Run, is_named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("a", "b", "c")):
        run.add(name, state="queued")
        write_job(CellFolder(run.folder / name), str(7 + number % 2))
    run.write(scheduler="slurm")
    said: list[str] = []
    infos = {job: JobInfo("PENDING", "Priority") for job in ("7", "8")}
    monkeypatch.setattr(slurm, "job_infos", lambda jobs, patience: infos)
    monkeypatch.setattr(slurm, "scancel", lambda jobs: said.append(capsys.readouterr().out))
    name = run.folder.name
    assert cancel(Namespace(run=name if is_named else None)) == 0
    assert said == ["" if is_named else f"{name}, the newest run: cancelling 2 jobs\n"]
    assert capsys.readouterr().out == "cancelled: a, b, c\n"


@pytest.mark.parametrize(
    ("second", "status"), [("finished", 0), ("refused", 0), ("failed", 1), ("cancelled", 1)]
)
def test_who_watches_to_the_end_gets_report_and_status(
    run: Run, second: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", metrics_line(20))
    run.add("b", metrics_line(3), state=second, reason="why")
    run.write()
    assert show_status(Namespace(run=None, watch=True)) == status
    said = capsys.readouterr().out
    assert "tokens/s/GPU" in said
    words = f"b failed; its log: python submit.py logs {run.folder.name}/b"
    assert (words in said) == (second == "failed") and "a failed" not in said


PP = {"parallelism.pipeline_parallel_degree": 2, "training.steps": 20}


def watcher_of(run: Run) -> Watcher:
    run.write()
    return Watcher(read_run(run.folder))


def looked(watcher: Watcher) -> CellProgress:
    ((_, progress),) = watcher.look()
    return progress


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    first = "".join(metrics_line(step, loss="3.5") for step in (1, 2, 3))
    # Resumed from an earlier step.
    second = metrics_line(2, loss="2.5")
    run = Run(tmp_path)
    run.add("a", first, second, "no step yet\n", options=PP)
    found = looked(watcher_of(run))
    assert (found.step, found.loss, found.total_steps) == (2, 2.5, 20)


def test_the_time_left_is_of_the_newest_steps(tmp_path: Path) -> None:
    def line(step: int, seconds: int, tps: str = "500") -> str:
        when = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=seconds)
        return metrics_line(step, tps=tps, when=when)

    run = Run(tmp_path)
    options = {"training.steps": 100}
    # The first step holds compilation; from step 13 on a step takes 2 s.
    early = line(1, 600, "10") + "".join(line(step, 600 + step) for step in range(2, 13))
    lines = [line(step, 700 + 2 * step) for step in range(13, 33)]
    cell = run.add("a", early, state="running", options=options)
    watcher = watcher_of(run)
    assert looked(watcher).left == 88 * 12 / 11
    (cell / "attempt-1" / "metrics.jsonl").write_text(steps_of(early + "".join(lines)))
    found = looked(watcher)
    assert (found.tokens_per_second, found.left) == (500.0, 68 * 2)
    (cell / "attempt-2").mkdir()
    assert looked(watcher).left is None
    (cell / "attempt-2" / "metrics.jsonl").write_text(steps_of("".join(lines[:3])))
    assert (looked(watcher).step, looked(watcher).left) == (15, None)


RUNNING = CellProgress("671b-bf16-deepep", "running", 5, 20, 859.4, 3.91683, 125.0, left=75.0)
QUEUED = CellProgress("671b-mxfp8-deepep", "queued")


class Terminal(io.StringIO):
    """A terminal, as far as a program can tell."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_table_has_a_summary_and_as_many_rows_as_the_terminal() -> None:
    finished = replace(RUNNING, name="a", state="finished", step=20, left=None)
    waiting = [replace(QUEUED, name=f"b{n}", total_steps=20) for n in range(2)]
    refused = CellProgress("c", "refused", total_steps=20)
    terminal = Terminal()
    console = Console(file=terminal, width=90, height=5, force_terminal=True, color_system=None)
    console.print(display._render_picture([finished, RUNNING, *waiting, refused], console))
    summary, heads, row, more = (line.split() for line in terminal.getvalue().splitlines())
    counts = "5 cells: 1 running, 2 queued, 1 finished, 1 refused; 25/80 steps"
    assert " ".join(summary) == counts
    assert heads == ["step", "tokens/s", "now", "loss", "time", "left", "note"]
    assert row[1:] == ["running", "5/20", "859", "3.9168", "0:02:05", "0:01:15"]
    assert more == ["and", "4", "more"]


def test_a_log_gets_a_line_only_when_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for log in (io.StringIO(), Terminal()):
        progress = Progress(log)
        progress.update([QUEUED])
        progress.update([QUEUED])
        silent = replace(QUEUED, is_known=False)
        for cell in (silent, silent):
            progress.update([cell])
        for step in [*range(1, 26), 8]:
            progress.update([replace(RUNNING, name=QUEUED.name, step=step, elapsed=None)])
        progress.update([replace(RUNNING, name=QUEUED.name, state="finished", step=20)])
        progress.close()
        assert [line.split(", 859")[0] for line in log.getvalue().splitlines()] == [
            "671b-mxfp8-deepep: queued",
            "671b-mxfp8-deepep: queued, unconfirmed",
            "671b-mxfp8-deepep: running, step 1/20",
            "671b-mxfp8-deepep: running, step 11/20",
            "671b-mxfp8-deepep: running, step 21/20",
            "671b-mxfp8-deepep: running, step 8/20",
            "671b-mxfp8-deepep: finished, step 20/20",
        ]
