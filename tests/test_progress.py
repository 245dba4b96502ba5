"""The display fits the terminal and says what matters, and a log stays short."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cookbook.base.tables import display_width
from cookbook.cli.display import CellProgress, Progress, describe_cell, render_progress

RUNNING = CellProgress("671b-bf16-deepep", "running", 5, 20, 859.4, 3.91683, 125.0)
QUEUED = CellProgress("671b-mxfp8-deepep", "queued")


class Terminal(io.StringIO):
    """A terminal as far as a program can tell, that keeps the picture it was drawn."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True

    def picture(self) -> list[str]:
        lines: list[str] = [""]
        row = 0
        written = re.sub(r"\x1b\[\d*m", "", self.getvalue())
        for token in re.findall(r"\x1b\[\d*[A-Z]|\n|\r|[^\x1b\n\r]+", written):
            if token.endswith("A") and token.startswith("\x1b"):
                row -= int(token[2:-1])
                assert row >= 0
            elif token == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif token == "\x1b[J":
                del lines[row + 1 :]
                lines[row] = ""
            elif token not in ("\r", "\x1b[K"):
                lines[row] = token
        return lines[:-1]


@pytest.fixture(autouse=True)
def a_common_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "24")


def test_a_line_per_cell_below_a_summary() -> None:
    lines = render_progress([RUNNING, QUEUED], columns=110)
    assert lines == [
        "2 cells: 1 running, 1 queued",
        "671b-bf16-deepep   running    █████░░░░░░░░░░░░░░░"
        "  step 5/20  859 tokens/s/GPU  loss 3.9168  2:05",
        "671b-mxfp8-deepep  queued",
    ]
    assert "#####..............." in render_progress([RUNNING], 110, is_unicode=False)[1]


def test_a_narrow_terminal_keeps_what_matters() -> None:
    assert render_progress([RUNNING], columns=40)[1] == "671b-bf16-deepep  running    step 5/20"
    assert render_progress([RUNNING], columns=10)[1] == "671b-bf16-"


def test_many_cells_show_the_busy_ones() -> None:
    cells = [replace(QUEUED, name=f"cell-{n}") for n in range(50)]
    cells[40] = replace(RUNNING, name="cell-40")
    cells[45] = replace(RUNNING, name="cell-45", state="failed")
    lines = render_progress(cells, rows=6)
    assert len(lines) == 6
    assert lines[0] == "50 cells: 1 running, 1 failed, 48 queued; 10/40 steps"
    assert [line.split()[0] for line in lines[1:5]] == ["cell-0", "cell-1", "cell-40", "cell-45"]
    assert lines[5] == "and 46 more"


LEFT = replace(RUNNING, left=75.0)


def test_at_80_columns_there_are_bar_step_and_time_left() -> None:
    (_, line) = render_progress([LEFT], columns=80)
    assert line == (
        "671b-bf16-deepep  running    ███░░░░░░░░  step 5/20  859 tokens/s/GPU  1:15 left"
    )
    (_, line) = render_progress([replace(LEFT, name="671b-mxfp8_wgrad_hp-mxfp8_a2a")], columns=80)
    assert line.startswith("671b-mxfp8_wgrad_hp-mxfp8_a2a  running    ██") and "1:15 left" in line


def test_a_sparkline_shows_where_steps_were_slow() -> None:
    speeds = (800.0, 800.0, 100.0, 800.0, 0.0, 400.0)
    cell = replace(LEFT, speeds=speeds)
    (_, wide) = render_progress([cell], columns=130)
    assert "██▂█▁▅  ███" in wide and "loss 3.9168" in wide
    assert "##.#_=  ###" in render_progress([cell], 130, is_unicode=False)[1]
    # The newest ones, as many as there is room for.
    (_, many) = render_progress([replace(cell, speeds=(0.0,) * 20 + (5.0,) * 20)], columns=110)
    assert "████████  " in many and "▁" not in many
    # Of one step, and of a cell that makes none, there is nothing to see.
    assert len(render_progress([replace(cell, speeds=(800.0,))], columns=80)) == 2
    assert "▂" not in render_progress([replace(cell, state="finished")], columns=130)[1]


def test_at_80_columns_a_running_cell_has_two_lines_that_say_all() -> None:
    cell = replace(LEFT, step=1234, total_steps=1500, speeds=(800.0,) * 19 + (100.0,))
    waiting = replace(QUEUED, name="671b-mxfp8_wgrad_hp-deepep")
    lines = render_progress([cell, waiting], columns=80)
    assert lines[1:] == [
        "671b-bf16-deepep            running    step 1,234/1,500  859 tokens/s/GPU",
        "                            ███████████████████▂  1:15 left  loss 3.9168  2:05",
        "671b-mxfp8_wgrad_hp-deepep  queued",
    ]
    # Where the rows do not hold that, one line has what matters most.
    short = render_progress([cell, waiting], columns=80, rows=3)
    assert len(short) == 3
    assert "step 1,234/1,500" in short[1] and "1:15 left" in short[1]


def test_before_its_first_step_a_cell_says_what_it_does() -> None:
    cell = CellProgress("a", "running", total_steps=20, elapsed=40.0, phase="compiling")
    assert render_progress([cell])[1] == "a  running    compiling  0:40"
    assert describe_cell(cell) == "a: running, compiling, 0:40"
    assert "compiling" not in describe_cell(replace(cell, state="failed"))


@pytest.mark.parametrize("cell", [LEFT, QUEUED, replace(LEFT, state="cancelled", step=None)])
def test_a_state_that_slurm_has_not_confirmed_says_so_whatever_it_is(cell: CellProgress) -> None:
    silent = replace(cell, is_known=False)
    assert "Slurm does not answer" in describe_cell(silent)
    assert "Slurm does not answer" in render_progress([silent], columns=80)[1]
    stream = io.StringIO()
    progress = Progress(stream)
    for one in (cell, silent, silent, cell):
        progress.update([one])
    lines = stream.getvalue().splitlines()
    assert ["Slurm does not answer" in line for line in lines] == [False, True, False]


def test_the_summary_says_how_far_all_cells_are() -> None:
    finished = replace(RUNNING, name="a", state="finished", step=20)
    waiting = [replace(QUEUED, name=f"b{n}", total_steps=20) for n in range(2)]
    refused = CellProgress("c", "refused", total_steps=20)
    lines = render_progress([finished, LEFT, *waiting, refused])
    # 75 s for 15 steps: 5 s each, and 40 more to come.
    assert lines[0] == (
        "5 cells: 1 running, 2 queued, 1 finished, 1 refused; 25/80 steps, 4:35 left"
    )
    # Where two run at a time, those that wait take half as long.
    lines = render_progress([LEFT, replace(LEFT, name="d"), *waiting])
    assert lines[0].endswith(", 2:55 left")


def test_colours_mark_what_went_wrong_and_what_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [replace(RUNNING, state="failed"), replace(RUNNING, name="finished", emulated=True)]
    plain = render_progress(cells, 110)
    coloured = render_progress(cells, 110, colour=True)
    assert "\x1b[31mfailed\x1b[0m" in coloured[1]
    assert "\x1b[35memulated\x1b[0m" in coloured[2] and "\x1b[32m" not in coloured[2]
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in coloured] == plain
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    Progress(terminal).update(cells)
    assert not re.search(r"\x1b\[\d+m", terminal.getvalue())


@given(
    st.lists(
        st.builds(
            CellProgress,
            st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=30),
            st.sampled_from(["running", "queued", "finished", "odd"]),
            st.none() | st.integers(0, 2000),
            st.none() | st.integers(1, 1500),
            st.none() | st.floats(0, 1e6),
            st.none() | st.floats(),
            st.none() | st.floats(-1, 1e7),
            st.none() | st.sampled_from(["loading", "first step"]),
            st.none() | st.floats(0, 1e7),
            st.booleans(),
            st.lists(st.floats(0, 1e7), max_size=25).map(tuple),
        ),
        max_size=12,
    ),
    st.integers(1, 120),
    st.integers(1, 15),
)
def test_the_picture_always_fits(cells: list[CellProgress], columns: int, rows: int) -> None:
    lines = render_progress(cells, columns, rows, colour=rows % 2 == 0)
    assert 1 <= len(lines) <= rows
    assert all(display_width(line) <= columns for line in lines)


def test_a_terminal_is_redrawn_in_place() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    progress.update([RUNNING, QUEUED])
    before = len(terminal.getvalue())
    progress.update([replace(RUNNING, step=6), QUEUED])
    # One write without clearing first: nothing flickers.
    assert "\x1b[2J" not in terminal.getvalue()
    assert terminal.getvalue()[before:].startswith("\x1b[3A\r")
    assert terminal.picture() == render_progress([replace(RUNNING, step=6), QUEUED], 99)
    progress.update([replace(RUNNING, state="finished", step=20)])
    progress.close()
    assert terminal.picture() == render_progress([replace(RUNNING, state="finished", step=20)], 99)


def test_a_terminal_made_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    progress.update([RUNNING])
    drawn = [display_width(line) for line in render_progress([RUNNING], 99)]
    monkeypatch.setenv("COLUMNS", "40")
    before = len(terminal.getvalue())
    progress.update([RUNNING])
    wrapped = sum(-(-width // 40) for width in drawn)
    assert terminal.getvalue()[before:].startswith(f"\x1b[{wrapped}A")


def test_a_terminal_that_knows_only_ascii() -> None:
    terminal = Terminal("ascii")
    Progress(terminal).update([replace(RUNNING, name="größe")])
    assert terminal.getvalue().isascii()
    assert "#####....." in terminal.getvalue()


def test_a_log_gets_a_line_only_when_something_changes() -> None:
    log = io.StringIO()
    progress = Progress(log, every_steps=10)
    progress.update([QUEUED])
    progress.update([QUEUED])
    for step in range(1, 26):
        progress.update([replace(RUNNING, name=QUEUED.name, step=step, elapsed=None)])
    progress.update([replace(RUNNING, name=QUEUED.name, step=8, elapsed=None)])
    progress.update([replace(RUNNING, name=QUEUED.name, state="finished", step=20)])
    progress.close()
    assert [line.split(", 859")[0] for line in log.getvalue().splitlines()] == [
        "671b-mxfp8-deepep: queued",
        "671b-mxfp8-deepep: running, step 1/20",
        "671b-mxfp8-deepep: running, step 11/20",
        "671b-mxfp8-deepep: running, step 21/20",
        "671b-mxfp8-deepep: running, step 8/20",
        "671b-mxfp8-deepep: finished, step 20/20",
    ]
    assert "\x1b" not in log.getvalue()


def test_a_dumb_terminal_is_treated_as_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    Progress(terminal).update([QUEUED])
    assert terminal.getvalue() == "671b-mxfp8-deepep: queued\n"


def test_unknown_values_are_left_out() -> None:
    assert describe_cell(QUEUED) == "671b-mxfp8-deepep: queued"
    assert describe_cell(replace(RUNNING, total_steps=None, elapsed=3725.0)) == (
        "671b-bf16-deepep: running, step 5, 859 tokens/s/GPU, loss 3.9168, 1:02:05"
    )


def test_the_size_comes_from_the_terminal() -> None:
    assert os.environ["COLUMNS"] == "100"
    terminal = Terminal()
    Progress(terminal).update([RUNNING])
    assert max(map(display_width, terminal.picture())) <= 99
