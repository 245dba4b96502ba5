"""The errors of this package, and how they are worded: place, what was found, remedy."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

# No shell, log or table can show these; lone surrogates are bytes that were no UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# The place of an error about a name, where all that is known is what it should name.
_KINDS = ("recipe", "precision", "EP backend", "cluster", "sweep")


class InputError(Exception):
    """The input is wrong: `submit.py` prints the message alone and ends with status 2.

    Args:
        place: file, or file and key, from the outside in (`recipes/debug.yaml: training.steps`).
        found: what stands there, and what would be allowed.
        remedy: what to do about it; empty where `found` already says it.
    """

    def __init__(self, place: str, found: str, remedy: str = "") -> None:
        self.place = place
        self.found = found
        self.remedy = remedy
        super().__init__(f"{place}: {found}" + (f"; {remedy}" if remedy else ""))


@contextlib.contextmanager
def named_at(place: str) -> Iterator[None]:
    """Say where a name was read: an error about the name alone gets `place` as its place."""
    try:
        yield
    except InputError as error:
        if error.place in _KINDS:
            raise InputError(place, error.found, error.remedy) from None
        raise


class JobError(Exception):
    """The work failed although the input was right: status 1."""


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The `count` members of `known` that look most like `name`; empty where none is close."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def unknown_name(place: str, what: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a `name` that is none of `known`: lists them, nearest first in the remedy."""
    names = sorted(known)
    close = nearest(name, names)
    return InputError(
        place,
        f"unknown {what} {name!r}; allowed: {', '.join(names) or 'none, there is none yet'}",
        f"did you mean {close[0]!r}?" if close else "",
    )


def control_character(text: str) -> str:
    """Return the first character that no text here may hold, as `U+0007`; empty for none."""
    found = _CONTROL.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def described(value: Any) -> str:
    """Return `value` as a message names it, with its YAML type: `the text 'four'`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 80 else f"the text {value[:77]!r}..."
    if isinstance(value, int | float):
        return f"the number {value}"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)
