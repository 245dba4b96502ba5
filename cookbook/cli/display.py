"""Show the progress of a run's cells: on a terminal in a live table, elsewhere as log lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# If not all cells fit on the screen, cells in the states listed first are shown.
_STATES = ("running", "failed", "cancelled", "queued", "finished", "refused")
_STYLES = {"failed": "red", "cancelled": "yellow", "refused": "yellow", "finished": "green"}
# The columns after a cell's name and state.
_COLUMNS = ("step", "tokens/s now", "loss", "time", "left", "note")
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
    fields = _fields(cell)
    words = {"tokens/s now": "{} tokens/s now", "loss": "loss {}", "left": "{} left"}
    if cell.step is not None:
        words["step"] = "step {}"
    names = ("step", "note", "tokens/s now", "loss", "time", "left")
    shown = [words.get(name, "{}").format(fields[name]) for name in names if fields[name]]
    return f"{cell.name}: " + ", ".join([cell.state, *shown])


def _render_picture(cells: Sequence[CellProgress], console: Console) -> Group:
    # Reserve rows for the summary, the headings, the count of hidden cells, and a blank last row:
    # text in a terminal's last row may make it scroll.
    room = max(console.height - 4, 0)
    order = {state: place for place, state in enumerate(_STATES)}
    first = sorted(cells, key=lambda cell: order.get(cell.state, 0))[:room]
    shown = [cell for cell in cells if cell in first]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for head in ("", "", *_COLUMNS):
        side: Literal["left", "right"] = "left" if head in ("", "step", "note") else "right"
        table.add_column(head, no_wrap=True, overflow="crop", justify=side)
    for cell in shown:
        state = Text(cell.state, _STYLES.get(cell.state, ""))
        table.add_row(Text(cell.name), state, *map(Text, _fields(cell).values()))
    more = [Text(f"and {len(cells) - len(shown)} more")] if len(shown) < len(cells) else []
    return Group(Text(summarize(cells)), table, *more)


def _fields(cell: CellProgress) -> dict[str, str]:
    step = (cell.phase or "") if cell.state == "running" else ""
    if cell.step is not None:
        step = f"{cell.step:,}" + (f"/{cell.total_steps:,}" if cell.total_steps else "")
    speed, left = cell.tokens_per_second, cell.left if cell.state == "running" else None
    notes = [] if cell.is_known else ["unconfirmed"]
    notes += ["emulated"] if cell.emulated and cell.state != "refused" else []
    return {
        "step": step,
        "tokens/s now": "" if speed is None else f"{speed:,.0f}",
        "loss": "" if cell.loss is None else f"{cell.loss:.4f}",
        "time": "" if cell.elapsed is None else str(timedelta(seconds=int(cell.elapsed))),
        "left": "" if left is None else str(timedelta(seconds=int(left))),
        "note": ", ".join(notes),
    }


def summarize(cells: Sequence[CellProgress]) -> str:
    """Return one line: the number of cells in each state, and the total steps."""
    states = [cell.state for cell in cells]
    order = sorted({*states}, key=lambda state: [*_STATES, state].index(state))
    counts = ", ".join(f"{states.count(state)} {state}" for state in order)
    text = f"{len(cells)} cells: {counts}" if len(cells) != 1 else f"1 cell: {counts}"
    counted = [cell for cell in cells if cell.total_steps and cell.state != "refused"]
    if len(counted) > 1:
        done = sum(min(cell.step or 0, cell.total_steps or 0) for cell in counted)
        text += f"; {done:,}/{sum(cell.total_steps or 0 for cell in counted):,} steps"
    return text
