"""What the user varies and no layout has: each value with its reason."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.options import Setting
from cookbook.config.validate import validation_errors
from cookbook.plan.space import Space
from cookbook.predict.step import refuse_unmodelled

# Layouts that are asked why they are refused; all are seldom needed.
_MOST_ASKED = 500


def rejected_values(space: Space, cells: Sequence[Cell]) -> list[str]:
    """`OPTION=VALUE: reason` for each value of `space` that none of its `cells` has.

    Those that are refused for themselves come first, before what stands beside them alone.
    """
    found = [
        (option, value, *_reason(space, option, value))
        for option, values in space.varied.items()
        for value in values
        if all(cell.options[option] != value for cell in cells)
    ]
    found.sort(key=lambda one: one[2] != one[0])
    return [f"{option}={value}: {reason}" for option, value, _, reason in found]


def _reason(space: Space, option: str, value: Any) -> tuple[str, str]:
    """The option to change, and why."""
    place = f"--vary {option}"
    alone = replace(
        space.base, options=space.base.options.override({option: Setting(value, place)})
    )
    try:
        refuse_unmodelled(alone)
    except InputError as error:
        if error.place == place:
            return option, f"{error.found}; {error.remedy}"
    found = Counter(_refused(replace(space, varied={**space.varied, option: [value]})))
    found = found or Counter((one.option, str(one)) for one in validation_errors(alone))
    if not found:
        return "", "no layout has room for it"
    # What the option itself is refused for says more than what stands beside it.
    culprit, reason = max(found, key=lambda key: (key[0] == option, found[key]))
    return culprit, reason.removeprefix(f"{option}: ")


def _refused(space: Space) -> Iterator[tuple[str, str]]:
    for cell in itertools.islice(space.all_candidates(), _MOST_ASKED):
        for finding in validation_errors(cell):
            yield finding.option, str(finding)
