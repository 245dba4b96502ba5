"""The display fits the terminal and keeps what matters; a log stays short."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from cookbook.cli import display
from cookbook.cli.display import (
    CellProgress,
    Progress,
    describe_cell,
    summarize,
)

RUNNING = CellProgress("671b-bf16-deepep", "running", 5, 20, 859.4, 3.91683, 125.0)
LEFT = replace(RUNNING, left=75.0)
QUEUED = CellProgress("671b-mxfp8-deepep", "queued")


class Terminal(io.StringIO):
    """A terminal, as far as a program can tell."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def picture(
    cells: list[CellProgress], columns: int = 80, rows: int = 24, encoding: str = "utf-8"
) -> list[str]:
    """The lines on a terminal of this size."""
    terminal = Terminal()
    terminal.encoding = encoding
    console = Console(
        file=terminal, width=columns, height=rows, force_terminal=True, color_system=None
    )
    console.print(display._render_picture(cells, console))
    return [line.rstrip() for line in terminal.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("columns", "heads", "line"),
    [
        (
            100,
            "step  tokens/s now    loss  time  left",
            "671b-bf16-deepep  running  ██▂█▁▅  ██░░░░░░░░  5/20           859  3.9168  2:05  1:15",
        ),
        (
            80,
            "step  tokens/s now    loss  left",
            "671b-bf16-deepep  running  ██▂█▁▅  ██░░░░░░░░  5/20           859  3.9168  1:15",
        ),
        (60, "step  left", "671b-bf16-deepep  running  ██░░░░░░░░  5/20  1:15"),
        (40, "step", "671b-bf16-deepep  running  5/20"),
    ],
)
def test_a_narrow_terminal_keeps_step_and_time_left(columns: int, heads: str, line: str) -> None:
    cell = replace(LEFT, speeds=(800.0, 800.0, 100.0, 800.0, 0.0, 400.0))
    assert [one.strip() for one in picture([cell], columns)[1:]] == [heads, line]


def test_a_terminal_that_knows_only_ascii() -> None:
    lines = picture([replace(LEFT, speeds=(8.0, 0.0))], 130, encoding="ascii")
    assert "#_  ##........" in lines[2] and "\n".join(lines).isascii()


def test_many_cells_show_the_busy_ones() -> None:
    cells = [replace(QUEUED, name=f"cell-{n}") for n in range(50)]
    cells[40] = replace(RUNNING, name="cell-40")
    cells[45] = replace(RUNNING, name="cell-45", state="failed")
    lines = picture(cells, rows=8)
    assert lines[0] == "50 cells: 1 running, 1 failed, 48 queued; 10/40 steps"
    assert [line.split()[0] for line in lines[2:]] == [
        *("cell-0", "cell-1", "cell-40", "cell-45"),
        "and",
    ]
    assert lines[6] == "and 46 more"


def test_before_its_first_step_a_cell_shows_its_phase() -> None:
    cell = CellProgress("a", "running", total_steps=20, elapsed=40.0, phase="compiling")
    assert picture([cell])[2] == "a  running  compiling  0:40"
    assert describe_cell(cell) == "a: running, compiling, 0:40"
    assert "compiling" not in describe_cell(replace(cell, state="failed"))


def test_the_summary_counts_states_steps_and_time() -> None:
    finished = replace(RUNNING, name="a", state="finished", step=20)
    waiting = [replace(QUEUED, name=f"b{n}", total_steps=20) for n in range(2)]
    refused = CellProgress("c", "refused", total_steps=20)
    # 75 s for 15 steps: 5 s each, and 40 more to come.
    assert summarize([finished, LEFT, *waiting, refused]) == (
        "5 cells: 1 running, 2 queued, 1 finished, 1 refused; 25/80 steps, 4:35 left"
    )
    # Where two run at a time, those that wait take half as long.
    assert summarize([LEFT, replace(LEFT, name="d"), *waiting]).endswith(", 2:55 left")


def test_a_terminal_is_redrawn_in_place_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    progress = Progress(terminal)
    progress.update([RUNNING, QUEUED])
    progress.update([replace(RUNNING, state="failed", emulated=True), QUEUED])
    progress.close()
    text = terminal.getvalue()
    # Up to the summary, and no clearing of the screen: nothing flickers.
    assert "\x1b[1A" in text and "\x1b[2J" not in text
    assert "\x1b[31mfailed" in text and "\x1b[35memulated" in text
    assert text.endswith("\x1b[?25h")


def test_a_log_gets_a_line_only_when_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A dumb terminal is a log too.
    monkeypatch.setenv("TERM", "dumb")
    for log in (io.StringIO(), Terminal()):
        progress = Progress(log, every_steps=10)
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
