"""`logs` and `status`: whose log is printed, how far it is followed, what is said of a run."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.cli.follow import cancel, show_logs, show_status
from cookbook.run import slurm
from cookbook.run.excluded import exclude_nodes
from cookbook.run.folder import CellFolder
from cookbook.run.slurm import JobInfo
from cookbook.run.status import write_job
from tests.test_results import Run, metrics_line

Happen = Callable[[], object]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def sleep(seconds: float) -> None:
        raise AssertionError("waits although nobody follows, or all has ended")

    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    monkeypatch.setattr(time, "sleep", sleep)
    return Run(tmp_path)


def write(run: Run, scheduler: str = "local") -> None:
    content = {"run": run.folder.name, "scheduler": scheduler, "cells": run.cells}
    run.folder.mkdir(exist_ok=True)
    (run.folder / "run.json").write_text(json.dumps(content))


def printed(
    capfd: pytest.CaptureFixture[str], cell: str | None = None, follow: bool = False
) -> list[str]:
    """The lines that `logs` prints."""
    assert show_logs(Namespace(cell=cell, follow=follow)) == 0
    return capfd.readouterr().out.splitlines()


def test_without_a_name_it_is_the_cell_that_runs(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.add("first", "of the first\n")
    run.add("second", "of the second\n", state="running")
    run.add("third", "of the third\n", state="failed")
    run.add("fourth", state="queued")
    write(run)
    name = run.folder.name
    assert printed(capfd) == printed(capfd, name) == ["of the second"]
    for asked in ("third", f"{name}/third", f"{run.folder}/third"):
        assert printed(capfd, asked) == ["of the third"]
    assert printed(capfd, str(run.folder)) == ["of the second"]


def test_where_none_runs_it_is_the_last_that_began(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.add("first", "of the first\n")
    run.add("second", "of the second\n", state="failed")
    run.add("third", state="refused")
    write(run)
    assert printed(capfd) == ["of the second"]


def test_a_cell_without_a_log_says_why(run: Run) -> None:
    run.add("first", state="refused", reason="needs GPUs")
    run.add("second", state="running")
    write(run)
    for cell, said in [
        ("first", r"/first: has no log: refused, needs GPUs"),
        (None, r"/second: has no log: running, nothing is written yet"),
    ]:
        with pytest.raises(InputError, match=said):
            show_logs(Namespace(cell=cell, follow=False))


def test_a_run_without_cells_is_named(run: Run) -> None:
    write(run)
    with pytest.raises(InputError, match=f"^{run.folder.name}: has no cell"):
        show_logs(Namespace(cell=None, follow=False))


@pytest.fixture
def happening(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[Happen]]:
    """Makes one thing happen in each pause; one pause too many is an error."""

    def set_up(*events: Happen) -> Iterator[Happen]:
        coming, now = iter(events), [1000.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds
            event = next(coming, None)
            assert event is not None, "goes on although the cell has ended"
            event()

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        return coming

    return set_up


def test_a_log_is_followed_through_a_new_attempt_to_the_end(
    run: Run, capfd: pytest.CaptureFixture[str], happening: Callable[..., Iterator[Happen]]
) -> None:
    folder = run.add("a", state="queued")
    write(run)

    def say(state: str) -> None:
        (folder / "status.json").write_text(json.dumps({"state": state}))

    def log(attempt: int, text: str) -> None:
        (folder / f"attempt-{attempt}").mkdir(exist_ok=True)
        with (folder / f"attempt-{attempt}/train.log").open("a") as file:
            file.write(text)

    def requeued() -> None:
        log(0, "three\n")
        log(1, "four\n")

    def finished() -> None:
        log(1, "five\n")
        say("finished")

    say("running")
    left = happening(
        lambda: None,
        lambda: log(0, "one\n"),
        lambda: log(0, "two\n"),
        # The first attempt ends with a last line, and the next one has begun already.
        requeued,
        finished,
    )
    assert printed(capfd, "a", follow=True) == ["one", "two", "three", "four", "five"]
    assert next(left, None) is None
    # Of a cell that has ended, all that there is.
    assert printed(capfd, "a", follow=True) == ["four", "five"]


def test_status_says_how_far_each_cell_is_and_why(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", metrics_line(7), state="running")
    run.add("b", metrics_line(3), state="failed", reason="out of memory")
    run.add("c", state="refused", reason="needs GPUs")
    write(run)
    assert show_status(Namespace(run=None, watch=False)) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == f"{run.folder.name} (local)"
    assert [row.split() for row in rows[:3]] == [
        ["a", "running", "step", "7/20"],
        ["b", "failed", "step", "3/20", "out", "of", "memory"],
        ["c", "refused", "needs", "GPUs"],
    ]


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_nodes_that_jobs_leave_out_are_named_where_there_are_nodes(
    run: Run, scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", metrics_line(7))
    write(run, scheduler)
    exclude_nodes({"worker-7": "GPU 3 is broken"}, hours=24)
    assert show_status(Namespace(run=None, watch=False)) == 0
    said = capsys.readouterr().out
    assert ("left out of new jobs: worker-7" in said) == (scheduler == "slurm")


def test_nothing_is_left_to_cancel(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.add("a", metrics_line(7))
    write(run)
    assert cancel(Namespace(run=None)) == 0
    assert capsys.readouterr().out == f"{run.folder.name}: all cells have ended already\n"


@pytest.mark.parametrize("is_named", [False, True])
def test_without_a_name_it_is_said_first_which_run_is_cancelled(
    run: Run, is_named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("a", "b", "c")):
        run.add(name, state="queued")
        write_job(CellFolder(run.folder / name), str(7 + number % 2))
    write(run, "slurm")
    said: list[str] = []
    infos = {job: JobInfo("PENDING", "Priority") for job in ("7", "8")}
    monkeypatch.setattr(slurm, "job_infos", lambda jobs: infos)
    monkeypatch.setattr(slurm, "scancel", lambda jobs: said.append(capsys.readouterr().out))
    name = run.folder.name
    assert cancel(Namespace(run=name if is_named else None)) == 0
    assert said == ["" if is_named else f"{name}, the newest run: cancels 2 jobs\n"]
    assert capsys.readouterr().out == "cancelled: a, b, c\n"


@pytest.mark.parametrize(
    ("second", "status"), [("finished", 0), ("refused", 0), ("failed", 1), ("cancelled", 1)]
)
def test_who_watches_to_the_end_gets_report_and_status(
    run: Run, second: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", metrics_line(20))
    run.add("b", metrics_line(3), state=second, reason="why")
    write(run)
    assert show_status(Namespace(run=None, watch=True)) == status
    said = capsys.readouterr().out
    assert "tokens/s/GPU" in said
    words = f"b failed; its log: python submit.py logs {run.folder.name}/b"
    assert (words in said) == (second == "failed") and "a failed" not in said
