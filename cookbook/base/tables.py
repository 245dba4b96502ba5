"""Aligned tables in plain text and Markdown."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence


def terminal_width() -> int | None:
    """Return the width of standard output in columns; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fitted(text: str) -> str:
    """Return `text` for standard output, wrapped between words if that is a terminal."""
    if (width := terminal_width()) is None:
        return text
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        start = len(line) - len(line.lstrip(" "))
        wrap.subsequent_indent = " " * (start + 4)
        lines += [line] if len(line) <= width else wrap.wrap(line)
    return "\n".join(lines)


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
