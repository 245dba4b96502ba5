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

    def without_unknown(self) -> Table:
        """The table without the columns that hold nothing but dashes; the first one stays."""
        kept = [
            position
            for position in range(len(self.head))
            if not position or any(row[position] != UNKNOWN for row in self.rows)
        ]
        return Table(
            head=tuple(self.head[position] for position in kept),
            rows=tuple(tuple(row[position] for position in kept) for row in self.rows),
            align="".join(self.align[position] for position in kept),
        )

    def markdown(self) -> str:
        """The table in Markdown that also reads well as text."""
        return markdown_table(self.head, self.rows, self.align)
