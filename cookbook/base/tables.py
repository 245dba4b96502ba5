"""Aligned tables: plain text for a terminal, and Markdown.

The plain ones need no package: the doctor prints them where nothing is installed yet. As tabulate
takes 50 ms to import, and wcwidth 10, each is imported where it is needed.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GAP = 2
# A last column that is narrower than this is hard to read; the line grows too long instead.
_NARROWEST = 20


def display_width(text: str) -> int:
    """The columns that a line takes in a terminal: two for a wide character, none for a colour."""
    text = _COLOUR.sub("", text)
    if text.isascii():
        return len(text)
    try:
        import wcwidth
    except ModuleNotFoundError:
        return len(text)
    return wcwidth.width(text)


def terminal_width() -> int | None:
    """The columns of the terminal that standard output is; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    rows: Iterable[Sequence[str]], *, align: str = "", width: int | None = None, indent: int = 0
) -> str:
    """The rows as lines of plain text whose columns are aligned; no heading, no borders.

    Args:
        rows: cells of equal number in each row; cells may hold terminal colours.
        align: a letter for each column, "l" or "r"; columns without one are "l".
        width: where given, the last column is wrapped between words so that lines fit into it. A
            line break in a last cell is kept.
        indent: spaces before each line.
    """
    lines: list[str] = []
    table = [list(row) for row in rows]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    align = align.ljust(len(widths), "l")
    start = indent + sum(column + _GAP for column in widths[:-1])
    room = max(width - start, _NARROWEST) if width else None
    for *cells, last in table:
        parts = _wrap(last, room)
        if align[-1] == "r":
            parts = [_pad(part, widths[-1], "r") for part in parts]
        first = " " * indent
        for text, column, letter in zip(cells, widths, align, strict=False):
            first += _pad(text, column, letter) + " " * _GAP
        lines.append(first + parts[0])
        lines += [" " * start + part for part in parts[1:]]
    return "\n".join(line.rstrip() for line in lines)


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


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """A Markdown table that is aligned in its source too, so that it also reads well as text.

    Args:
        align: a letter for each column: "l", or "r" for numbers.
    """
    from tabulate import DataRow, TableFormat, tabulate

    # tabulate would widen the columns of a heading, so the heading is the first row here.
    text = tabulate(
        [[_one_cell(cell) for cell in row] for row in (head, *rows)],
        tablefmt=TableFormat(
            lineabove=_rule,
            linebelowheader=None,
            linebetweenrows=None,
            linebelow=None,
            headerrow=None,
            datarow=DataRow("|", "|", "|"),
            padding=1,
            with_header_hide=None,
        ),
        colalign=["right" if letter == "r" else "left" for letter in align],
        disable_numparse=True,
    )
    rule, heading, *body = text.split("\n")
    return "\n".join([heading, rule, *body])


def _rule(widths: Sequence[int], aligns: Sequence[str]) -> str:
    """The line below the heading; Markdown wants a hyphen in each column."""
    parts = [
        f" {'-' * max(width - 3, 1)}: " if align == "right" else f" {'-' * (width - 2)} "
        for width, align in zip(widths, aligns, strict=True)
    ]
    return f"|{'|'.join(parts)}|"


def _one_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
