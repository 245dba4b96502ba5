"""Aligned tables in plain text and Markdown, and charts in one common style.

Matplotlib is imported only to draw a chart: `submit.py doctor` must work before it is installed.
"""

import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def terminal_width() -> int | None:
    """Return the width of standard output in columns; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    rows: Iterable[Sequence[str]], *, align: str = "", width: int | None = None, indent: int = 0
) -> str:
    """Return the rows as plain text with aligned columns and no borders.

    `align` has one letter per column, "l" or "r"; the default is "l". The last column is wrapped
    between words to fit `width`; its own line breaks are kept.
    """
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    align = align.ljust(len(widths), "l")
    start = indent + sum(widths[:-1]) + 2 * (len(widths) - 1)
    # Give the last column at least 20 characters to stay legible, even if lines exceed `width`.
    room = max(width - start, 20) if width else sys.maxsize
    lines: list[str] = []
    for *cells, last in table:
        head = [_pad(*column) for column in zip(cells, widths, align, strict=False)]
        first = " " * indent + "".join(f"{cell}  " for cell in head)
        for line in last.split("\n"):
            for part in textwrap.wrap(line, room, break_long_words=False) or [""]:
                lines.append((first + _pad(part, widths[-1], align[-1])).rstrip())
                first = " " * start
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Return a Markdown table whose columns are aligned in the source text too."""
    table = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(2, *map(len, column)) for column in zip(*table, strict=True)]
    ends = {"l": "-", "r": ":"}
    table.insert(1, ["-" * (n - 1) + ends[a] for n, a in zip(widths, align, strict=True)])
    rows = ([_pad(*cell) for cell in zip(row, widths, align, strict=True)] for row in table)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _pad(text: str, width: int, align: str) -> str:
    return text.rjust(width) if align == "r" else text.ljust(width)


INK, QUIET, GRID, BAND = "#1b2026", "#5d6670", "#e3e6e9", "#edf0f2"


def draw_figure(
    name: str,
    height: float,
    paint: Callable[["Axes"], None],
    grid: Literal["x", "y"] = "y",
    legend: str = "",
) -> dict[str, bytes]:
    """Return the figure that `paint` draws, as the bytes of reproducible `svg` and `png` files.

    `name` seeds the SVG's ids. `height` is in inches; the width is 7.6. `legend` is the color of
    the legend's labels, or `linecolor` to color each like its line; empty means no legend.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Draw `$` as it is: Matplotlib would otherwise read it as the start of a formula.
    style: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=QUIET, length=0)
        axes.grid(color=GRID, axis=grid)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter("{x:,g}")
        paint(axes)
        if legend:
            place: Any = {"loc": "outside upper left", "ncols": 2, "frameon": False}
            figure.legend(fontsize=9, labelcolor=legend, **place)
        files = {"svg": io.BytesIO(), "png": io.BytesIO()}
        # Omit the date, so that equal numbers give equal files.
        figure.savefig(files["svg"], format="svg", metadata={"Date": None})
        figure.savefig(files["png"], format="png", dpi=144)
    return {suffix: file.getvalue() for suffix, file in files.items()}
