"""A table of a report: the same rows in Markdown and in the page."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.base.tables import markdown_table

UNKNOWN = "-"


@dataclass(frozen=True)
class Table:
    """Text by row and column.

    Attributes:
        align: a letter for each column: "l", or "r" for numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def markdown(self) -> str:
        """The table in Markdown that also reads well as text."""
        return markdown_table(self.head, self.rows, self.align)
