"""Aligned tables, as plain text for a terminal and in Markdown.

The doctor prints plain ones before any package is installed, so they need none.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A last column that is narrower than this is hard to read; the line grows too long instead.
_NARROWEST = 20


def display_width(text: str) -> int:
    """Return the columns of a line in a terminal: two for a wide character, none for a colour."""
    text = _COLOUR.sub("", text)
    if text.isascii():
        return len(text)
    try:
        from rich.cells import cell_len
    except ModuleNotFoundError:
        return len(text)
    return cell_len(text)


def terminal_width() -> int | None:
    """Return the columns of standard output; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    rows: Iterable[Sequence[str]], *, align: str = "", width: int | None = None, indent: int = 0
) -> str:
    """Return the rows as lines of plain text whose columns are aligned, without borders.

    Args:
        rows: cells of equal number in each row; cells may hold terminal colours.
        align: a letter for each column, "l" or "r"; columns without one are "l".
        width: wraps the last column between words so that lines fit into it. A line break in a
            last cell is kept.
        indent: spaces before each line.
    """
    table = [list(row) for row in rows]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    align = align.ljust(len(widths), "l")
    start = indent + sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines: list[str] = []
    for *cells, last in table:
        head = [_pad(*column) for column in zip(cells, widths, align, strict=False)]
        first = " " * indent + "".join(f"{cell}  " for cell in head)
        for part in _wrap(last, max(width - start, _NARROWEST) if width else None):
            lines.append((first + _pad(part, widths[-1], align[-1])).rstrip())
            first = " " * start
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Return a Markdown table that is aligned in its source too.

    Args:
        align: a letter for each column: "l", or "r" for numbers.
    """
    table = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(2, *map(display_width, column)) for column in zip(*table, strict=True)]
    rule = [
        "-" * (width - 1) + ("-" if a == "l" else ":")
        for width, a in zip(widths, align, strict=True)
    ]
    table.insert(1, rule)
    return "\n".join(
        "| " + " | ".join(_pad(*cell) for cell in zip(row, widths, align, strict=True)) + " |"
        for row in table
    )


def _pad(text: str, width: int, align: str) -> str:
    gap = " " * (width - display_width(text))
    return gap + text if align == "r" else text + gap


def _wrap(text: str, room: int | None) -> list[str]:
    lines = []
    for line in text.split("\n"):
        if room is None or display_width(line) <= room:
            lines.append(line)
            continue
        current = ""
        for word in line.split():
            if current and display_width(f"{current} {word}") > room:
                lines.append(current)
                current = word
            else:
                current = f"{current} {word}".lstrip()
        lines.append(current)
    return lines
