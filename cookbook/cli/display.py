"""How far each cell of a run is: a picture redrawn in place, or lines off a terminal."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TextIO

from cookbook.base.tables import display_width
from cookbook.cli.graphs import bar, sparkline

_STATES = ("running", "failed", "cancelled", "queued", "finished", "refused")
# Of the bar, and of the sparkline, in columns.
_SHORTEST, _LONGEST = 8, 20
_CLEAR_LINE, _CLEAR_BELOW, _PLAIN = "\x1b[K", "\x1b[J", "\x1b[0m"
_COLOURS = {
    "failed": "\x1b[31m",
    "cancelled": "\x1b[33m",
    "refused": "\x1b[33m",
    "finished": "\x1b[32m",
    "emulated": "\x1b[35m",
}
_WORDS = attrgetter("state", "phase", "is_known")


@dataclass(frozen=True, slots=True)
class CellProgress:
    """One cell as it is now; unknown values are None, `is_known` False where Slurm is silent."""

    name: str
    state: str
    step: int | None = None
    total_steps: int | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    elapsed: float | None = None
    """Seconds since the cell started."""
    phase: str | None = None
    """What a running cell does, until it makes steps: loading, building, compiling, ..."""
    left: float | None = None
    """Seconds to the last step, at the pace of the steps seen so far."""
    emulated: bool = False
    is_known: bool = True
    speeds: tuple[float, ...] = ()
    """Tokens/s/GPU of the newest steps, the last one last: the sparkline."""


def render_progress(
    cells: Sequence[CellProgress],
    columns: int = 80,
    rows: int = 24,
    is_unicode: bool = True,
    colour: bool = False,
) -> list[str]:
    """At most `rows` lines of at most `columns` columns: a summary, then a line per cell, or two
    for one that runs.

    Where not all cells fit, running and failed ones are shown first and the rest is counted.
    """
    shown = list(cells)
    room = max(1, rows - 1)
    if len(shown) > room:
        important = sorted(shown, key=lambda cell: _rank_of(cell.state))[: max(0, room - 1)]
        chosen = {cell.name for cell in important}
        shown = [cell for cell in shown if cell.name in chosen]
    name_columns = max((display_width(cell.name) for cell in shown), default=0)
    may_wrap = len(shown) + sum(map(_has_sparks, shown)) <= room
    lines = [_summary(cells)]
    for cell in shown:
        first, *more = (
            _cut(line, columns)
            for line in _cell_lines(cell, name_columns, columns, is_unicode, may_wrap)
        )
        lines += [_coloured(first, cell) if colour else first, *more]
    if len(shown) < len(cells):
        lines.append(f"and {len(cells) - len(shown)} more")
    return [_cut(line, columns) for line in lines[: max(1, rows)]]


def describe_cell(cell: CellProgress) -> str:
    """One line for a log: `671b-bf16-deepep: running, step 5/20, 859 tokens/s/GPU, loss 3.9168`."""
    figures = [*_steps(cell), *_figures(cell), *_left(cell)]
    return f"{cell.name}: " + ", ".join([cell.state, *figures])


class Progress:
    """Writes progress to a stream: in place on a terminal, else one line for each change.

    Args:
        stream: where to write; whether it is a terminal decides how.
        every_steps: off a terminal, also write a line when a cell has gone this many steps.
    """

    def __init__(self, stream: TextIO, every_steps: int = 10) -> None:
        self._stream = stream
        self._every_steps = max(1, every_steps)
        self._is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_unicode = _can_encode(stream, "█░")
        self._colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self._drawn: list[str] = []
        self._written: dict[str, CellProgress] = {}

    def update(self, cells: Sequence[CellProgress]) -> None:
        """Show the cells as they are now."""
        show = self._redraw if self._is_terminal else self._write_changes
        show(cells)

    def close(self) -> None:
        """Leave the last picture standing; what is written next comes below it."""
        self._drawn = []
        self._stream.flush()

    def _redraw(self, cells: Sequence[CellProgress]) -> None:
        size = shutil.get_terminal_size()
        # One column stays free: a full line makes some terminals wrap.
        columns = max(1, size.columns - 1)
        rows = max(1, size.lines - 1)
        lines = render_progress(cells, columns, rows, self._is_unicode, self._colour)
        lines = [_encodable(line, self._stream) for line in lines]
        # A terminal made narrower has wrapped the lines of the last picture.
        height = sum(max(1, math.ceil(display_width(line) / size.columns)) for line in self._drawn)
        up = f"\x1b[{min(height, size.lines - 1)}A" if height else ""
        # One write and no clearing beforehand, so that nothing flickers.
        text = up + "\r" + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW
        self._stream.write(text)
        self._stream.flush()
        self._drawn = lines

    def _write_changes(self, cells: Sequence[CellProgress]) -> None:
        for cell in cells:
            before = self._written.get(cell.name)
            steps = (cell.step or 0) - ((before.step or 0) if before else 0)
            # Fewer steps than before: the cell was resumed from a checkpoint.
            moved = steps >= self._every_steps or steps < 0
            changed = before is None or _WORDS(before) != _WORDS(cell)
            if changed or moved:
                self._stream.write(_encodable(describe_cell(cell), self._stream) + "\n")
                self._written[cell.name] = cell
        self._stream.flush()


def duration(seconds: float) -> str:
    """`2:05`, or `1:02:05` from an hour on."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _summary(cells: Sequence[CellProgress]) -> str:
    """How many cells are in each state, and how far they are all together."""
    states = [cell.state for cell in cells]
    known = [state for state in _STATES if state in states]
    others = sorted(set(states) - set(known))
    counts = ", ".join(f"{states.count(state)} {state}" for state in known + others)
    text = f"{len(cells)} cells: {counts}" if len(cells) != 1 else f"1 cell: {counts}"
    counted = [cell for cell in cells if cell.total_steps and cell.state != "refused"]
    if len(counted) > 1:
        done = sum(min(cell.step or 0, cell.total_steps or 0) for cell in counted)
        text += f"; {done:,}/{sum(cell.total_steps or 0 for cell in counted):,} steps"
    left = _total_left(cells)
    return text if left is None else f"{text}, {duration(left)} left"


def _total_left(cells: Sequence[CellProgress]) -> float | None:
    """Seconds until all cells have ended, with as many at a time as run now."""
    running = [cell for cell in cells if cell.state == "running"]
    waiting = sum(cell.total_steps or 0 for cell in cells if cell.state == "queued")
    paces = [
        cell.left / (cell.total_steps - cell.step)
        for cell in running
        if cell.left is not None and cell.total_steps and cell.step
        if cell.total_steps > cell.step
    ]
    if not paces or len(cells) == 1:
        return None
    last = max(cell.left or 0 for cell in running)
    return last + waiting * (sum(paces) / len(paces)) / len(running)


def _cell_lines(
    cell: CellProgress, name_columns: int, columns: int, is_unicode: bool, may_wrap: bool
) -> list[str]:
    """Name and state always, then what fits whole; two lines where one cannot hold all."""
    head = cell.name + " " * (name_columns - display_width(cell.name)) + f"  {cell.state:<9}"
    room = columns - display_width(head)
    graph = _SHORTEST + 2
    everything = [*_steps(cell), *_figures(cell), *_left(cell)]
    if may_wrap and _has_sparks(cell) and _width(everything) + graph > room:
        first = _fitting([*_steps(cell), *_figures(cell)[:1], *_left(cell)], room)
        rest = [figure for figure in [*_left(cell), *_figures(cell)] if figure not in first]
        line = sparkline(cell.speeds, _LONGEST, is_unicode)
        second = _fitting([line, *rest], columns - name_columns)
        indent = " " * name_columns
        return [_joined(head, first), _joined(indent, second)]
    essential = _fitting([*_steps(cell), *_left(cell)], room)
    room -= _width(essential)
    has_sparks = _has_sparks(cell) and room >= graph
    has_bar = cell.state == "running" and bool(cell.total_steps and cell.step) and room >= graph
    # `step 5/20` says what the bar does, so the bar is what a narrow line can spare.
    has_bar = has_bar and (not has_sparks or room >= 2 * graph + _width(_figures(cell)))
    room -= graph * (has_sparks + has_bar)
    others = _fitting(_figures(cell), room)
    room -= _width(others)
    steps = essential[: len(_steps(cell))]
    figures = [*steps, *others, *essential[len(steps) :]]
    if has_bar and cell.total_steps:
        length = min(_LONGEST, _SHORTEST + room)
        figures.insert(0, bar((cell.step or 0) / cell.total_steps, length, is_unicode))
        room -= length - _SHORTEST
    if has_sparks:
        figures.insert(0, sparkline(cell.speeds, min(_LONGEST, _SHORTEST + room), is_unicode))
    return [_joined(head, figures)]


def _has_sparks(cell: CellProgress) -> bool:
    return cell.state == "running" and len(cell.speeds) > 1


def _joined(head: str, figures: Sequence[str]) -> str:
    return "".join([head, *(f"  {figure}" for figure in figures)]).rstrip()


def _width(figures: Sequence[str]) -> int:
    return sum(display_width(figure) + 2 for figure in figures)


def _fitting(figures: Sequence[str], room: int) -> list[str]:
    """Those that fit beside the ones before them."""
    chosen = []
    for figure in figures:
        if display_width(figure) + 2 <= room:
            chosen.append(figure)
            room -= display_width(figure) + 2
    return chosen


def _steps(cell: CellProgress) -> list[str]:
    """The step, or what a cell does that has not made one; and that its state is not known."""
    silent = [] if cell.is_known else ["Slurm does not answer"]
    if cell.step is not None:
        total = f"/{cell.total_steps:,}" if cell.total_steps else ""
        return [f"step {cell.step:,}{total}", *silent]
    return [cell.phase, *silent] if cell.phase and cell.state == "running" else silent


def _left(cell: CellProgress) -> list[str]:
    running = cell.state == "running"
    return [f"{duration(cell.left)} left"] if cell.left is not None and running else []


def _figures(cell: CellProgress) -> list[str]:
    figures = []
    if cell.tokens_per_second is not None:
        figures.append(f"{cell.tokens_per_second:,.0f} tokens/s/GPU")
    if cell.loss is not None:
        figures.append(f"loss {cell.loss:.4f}")
    if cell.elapsed is not None:
        figures.append(duration(cell.elapsed))
    if cell.emulated and cell.state != "refused":
        figures.append("emulated")
    return figures


def _coloured(line: str, cell: CellProgress) -> str:
    """The line with its state, and the label of emulation, in colour."""
    for word in (cell.state, "emulated"):
        position = line.find(word, len(cell.name))
        if position >= 0 and word in _COLOURS:
            end = position + len(word)
            line = line[:position] + _COLOURS[word] + word + _PLAIN + line[end:]
    return line


def _cut(line: str, columns: int) -> str:
    while display_width(line) > columns:
        line = line[:-1]
    return line


def _rank_of(state: str) -> int:
    return _STATES.index(state) if state in _STATES else 0


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _encodable(line: str, stream: TextIO) -> str:
    """The line with `?` for what the stream can't write, so that a display never ends a run."""
    if _can_encode(stream, line):
        return line
    return line.encode("ascii", "replace").decode("ascii")
