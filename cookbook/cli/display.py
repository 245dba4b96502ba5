"""Show the progress of a run's cells: on a terminal in a live table, elsewhere as log lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# If not all cells fit on the screen, cells in the states listed first are shown.
_STATES = ("running", "failed", "cancelled", "queued", "finished", "refused")
_STYLES = {"failed": "red", "cancelled": "yellow", "refused": "yellow", "finished": "green"}
# The columns after a cell's name and state. A column's name is its heading unless listed below.
_COLUMNS = ("sparks", "bar", "step", "speed", "loss", "elapsed", "left", "note")
_HEADINGS = {"sparks": "", "bar": "", "speed": "tokens/s now", "elapsed": "time", "note": ""}
# Columns to drop on a narrow terminal, in this order.
_SPARE = ("elapsed", "sparks", "loss", "speed", "note", "left", "bar")
_BAR = 10
_EVERY_STEPS = 10  # steps between two log lines of a cell


@dataclass(frozen=True, slots=True)
class CellProgress:
    name: str
    state: str
    step: int | None = None
    total_steps: int | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    elapsed: float | None = None
    phase: str | None = None
    left: float | None = None
    emulated: bool = False
    is_known: bool = True
    speeds: tuple[float, ...] = ()
    validation_loss: float | None = None


class Progress:
    """Show progress on a stream: redraw in place on a terminal, else print a line per change."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._written = stream, dict[str, CellProgress]()
        console = Console(file=stream, highlight=False, emoji=False, markup=False)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            # Do not let rich redirect the output of other code.
            as_is: Any = {"redirect_stdout": False, "redirect_stderr": False}
            self._live = Live(console=console, auto_refresh=False, **as_is)
            self._live.start()

    def update(self, cells: Sequence[CellProgress]) -> None:
        if self._live is not None:
            self._live.update(_render_picture(cells, self._live.console), refresh=True)
            return
        words = attrgetter("state", "phase", "is_known")
        for cell in cells:
            before = self._written.get(cell.name)
            made = (cell.step or 0) - ((before.step or 0) if before else 0)
            # A step lower than the last one shown: the cell was resumed from a checkpoint.
            if before is None or words(before) != words(cell) or made < 0 or made >= _EVERY_STEPS:
                print(describe_cell(cell), file=self._stream, flush=True)
                self._written[cell.name] = cell

    def close(self) -> None:
        """Keep the last table on the screen, with later output below it."""
        if self._live is not None:
            self._live.stop()


def describe_cell(cell: CellProgress) -> str:
    """Return a log line: `671b-bf16-deepep: running, step 5/20, 859 tokens/s now, ...`."""
    fields = _fields(cell, is_ascii=True)
    words = {"speed": "{} tokens/s now", "loss": "loss {}", "left": "{} left"}
    if cell.step is not None:
        words["step"] = "step {}"
    names = ("step", "note", "speed", "loss", "elapsed", "left")
    shown = [words.get(name, "{}").format(fields[name]) for name in names if fields[name]]
    return f"{cell.name}: " + ", ".join([cell.state, *shown])


def _render_picture(cells: Sequence[CellProgress], console: Console) -> Group:
    # Reserve rows for the summary, the headings, the count of hidden cells, and a blank last row:
    # text in a terminal's last row may make it scroll.
    room, columns = console.height - 4, console.width - 1
    order = {state: place for place, state in enumerate(_STATES)}
    first = sorted(cells, key=lambda cell: order.get(cell.state, 0))[: max(room, 0)]
    shown = [cell for cell in cells if cell in first]
    fields = [_fields(cell, console.options.ascii_only) for cell in shown]
    heads = {name: _HEADINGS.get(name, name) for name in _COLUMNS}
    widths = {
        name: 2 + max(map(cell_len, [head, *(field[name] for field in fields)]))
        for name, head in heads.items()
        if any(field[name] for field in fields)
    }
    widths[""] = max((cell_len(cell.name) + len(cell.state) + 2 for cell in shown), default=0)
    for name in _SPARE:
        if sum(widths.values()) > columns:
            widths.pop(name, None)
    names = [name for name in _COLUMNS if name in widths]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for head in ("", "", *(heads[name] for name in names)):
        side: Literal["left", "right"] = "left" if head in ("", "step") else "right"
        table.add_column(head, no_wrap=True, overflow="crop", justify=side)
    for cell, field in zip(shown, fields, strict=True):
        state = Text(cell.state, _STYLES.get(cell.state, ""))
        notes = [Text(field[name], "magenta" if name == "note" else "") for name in names]
        table.add_row(Text(cell.name), state, *notes)
    more = [Text(f"and {len(cells) - len(shown)} more")] if len(shown) < len(cells) else []
    return Group(Text(summarize(cells)), table, *more)


def _fields(cell: CellProgress, is_ascii: bool) -> dict[str, str]:
    is_running = cell.state == "running"
    fields = dict.fromkeys(_COLUMNS, "")
    if cell.step is not None:
        fields["step"] = f"{cell.step:,}" + (f"/{cell.total_steps:,}" if cell.total_steps else "")
        if is_running and cell.total_steps:
            full = round(min(1.0, cell.step / cell.total_steps) * _BAR)
            done, rest = "#." if is_ascii else "█░"
            fields["bar"] = done * full + rest * (_BAR - full)
    elif is_running:
        fields["step"] = cell.phase or ""
    if is_running and len(cell.speeds) > 1:
        # Scale from 0 to the highest speed, so that a stall shows as a dip.
        levels, top = "_.:-=+*#" if is_ascii else "▁▂▃▄▅▆▇█", max(cell.speeds) or 1.0
        fields["sparks"] = "".join(levels[round(7 * speed / top)] for speed in cell.speeds)
    speed, left = cell.tokens_per_second, cell.left if is_running else None
    notes = [] if cell.is_known else ["unconfirmed"]
    notes += ["emulated"] if cell.emulated and cell.state != "refused" else []
    return fields | {
        "speed": "" if speed is None else f"{speed:,.0f}",
        "loss": "" if cell.loss is None else f"{cell.loss:.4f}",
        "elapsed": "" if cell.elapsed is None else duration(cell.elapsed),
        "left": "" if left is None else duration(left),
        "note": ", ".join(notes),
    }


def summarize(cells: Sequence[CellProgress]) -> str:
    """Return one line: the number of cells in each state, the total steps, and the time left."""
    states = [cell.state for cell in cells]
    order = sorted({*states}, key=lambda state: [*_STATES, state].index(state))
    counts = ", ".join(f"{states.count(state)} {state}" for state in order)
    text = f"{len(cells)} cells: {counts}" if len(cells) != 1 else f"1 cell: {counts}"
    counted = [cell for cell in cells if cell.total_steps and cell.state != "refused"]
    if len(counted) > 1:
        done = sum(min(cell.step or 0, cell.total_steps or 0) for cell in counted)
        text += f"; {done:,}/{sum(cell.total_steps or 0 for cell in counted):,} steps"
    # Estimate the time left, assuming that the number of running cells stays the same.
    running = [cell for cell in cells if cell.state == "running"]
    paces = [
        cell.left / (cell.total_steps - cell.step)
        for cell in running
        if cell.left and cell.total_steps and cell.step and cell.step < cell.total_steps
    ]
    if paces and len(cells) > 1:
        waiting = sum(cell.total_steps or 0 for cell in cells if cell.state == "queued")
        left = max(cell.left or 0 for cell in running)
        left += waiting * (sum(paces) / len(paces)) / len(running)
        text += f", {duration(left)} left"
    return text


def duration(seconds: float) -> str:
    """Format seconds as `2:05`, or as `1:02:05` from one hour on."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
