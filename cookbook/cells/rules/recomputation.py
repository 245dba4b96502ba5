"""What the list of operators that selective recomputation saves refuses."""

from __future__ import annotations

from collections.abc import Iterator

from cookbook.base.errors import nearest
from cookbook.cells.cell import SAVE_LIST, SAVED_OPERATORS, Cell
from cookbook.cells.finding import ERROR, Finding


def save_list(cell: Cell) -> Iterator[Finding]:
    """Names of operators, for the one mode that looks at operators."""
    chosen = cell.options[SAVE_LIST]
    for name in chosen:
        if name not in SAVED_OPERATORS:
            close = nearest(name, SAVED_OPERATORS)
            remedy = f"did you mean {close[0]!r}?" if close else ""
            reason = f"found {name!r}, allowed: {', '.join(SAVED_OPERATORS)}"
            yield _wrong(reason, remedy)
    if chosen and not cell.saves:
        mode = cell.options["activation_checkpoint.mode"]
        yield _wrong(
            f"activation_checkpoint.mode {mode} has no use for a list of operators",
            "set activation_checkpoint.mode=selective and "
            "activation_checkpoint.selective_ac_option=op, or leave the list out",
        )


def _wrong(reason: str, remedy: str) -> Finding:
    return Finding(ERROR, "save_list", SAVE_LIST, reason, remedy, is_input=True)
