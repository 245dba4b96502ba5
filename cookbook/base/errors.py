"""The errors of this package, how they are worded, and how a command ends with them."""

import contextlib
import difflib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# The place of an error about a bare name; `named_at` replaces it.
_KINDS = ("recipe", "precision", "EP backend", "cluster", "sweep")


class InputError(Exception):
    """The input is wrong: `submit.py` prints the message alone and ends with status 2.

    `place` leads from the file to the key (`recipes/debug.yaml: training.steps`), `found` has the
    wrong value and the allowed ones, and `remedy` is empty where `found` already says it.
    """

    def __init__(self, place: str, found: str, remedy: str = "") -> None:
        self.place, self.found, self.remedy = place, found, remedy
        # All three, so that it crosses processes.
        super().__init__(place, found, remedy)

    def __str__(self) -> str:
        return f"{self.place}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


class JobError(Exception):
    """The work failed although the input was right: status 1."""


@contextlib.contextmanager
def named_at(place: str) -> Iterator[None]:
    """Give an error about a bare name the `place` where that name was read."""
    try:
        yield
    except InputError as error:
        if error.place in _KINDS:
            error.place = place
        raise


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the `count` members of `known` most similar to `name`; empty where none is close."""
    written = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), written, n=count, cutoff=0.6)
    if not close and len(name) > 2:
        # The short name of a recipe, or a path without its ending.
        close = [one for one in written if name.lower() in one or one in name.lower()][:count]
    return [written[one] for one in close]


def unknown_name(place: str, what: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a `name` that is not in `known`, with the nearest one as remedy."""
    names = sorted(known)
    close = nearest(name, names)
    found = f"unknown {what} {name!r}; allowed: {', '.join(names) or 'none, there is none yet'}"
    return InputError(place, found, f"did you mean {close[0]!r}?" if close else "")


def described(value: Any) -> str:
    """Return `value` with its YAML type, for a message: `the text 'four'`."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f"the text {value!r}" if len(value) <= 80 else f"the text {value[:77]!r}..."
        case int() | float():
            return f"the number {value}"
    kinds: dict[type, str] = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return kinds.get(type(value)) or repr(value)


def quotes_remedy(value: Any, allowed: str) -> str:
    """Return the remedy where quotes, or the lack of them, gave `value` another type."""
    if allowed == "a text" and isinstance(value, bool | int | float):
        return "put it in quotes"
    reader = {"a whole number": int, "a number": float}.get(allowed)
    if reader and isinstance(value, str) and value.isascii():
        with contextlib.suppress(ValueError):
            return "remove the quotes" if math.isfinite(reader(value)) else ""
    return ""


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run `work` and return the exit status; print an error as one line on standard error.

    The status is that of `work`; 2 for wrong input; 1 where the work or the system failed; 130
    after an interrupt; 0 where the reader of standard output has left (`| head`).
    """
    if sys.stdout is None:
        # The caller has closed it.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal in an ASCII locale shows `?`, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    status, message = 0, ""
    try:
        try:
            status = work()
        except SystemExit as end:
            # argparse, after --help and after a wrong option.
            if not isinstance(end.code, int | None):
                raise
            status = end.code or 0
        sys.stdout.flush()
    except InputError as error:
        status, message = 2, str(error)
    except JobError as error:
        status, message = 1, str(error)
    except BrokenPipeError:
        status = 0
    except OSError as error:
        parts = (error.filename, error.strerror or error)
        status, message = 1, ": ".join(str(part) for part in parts if part)
    except KeyboardInterrupt:
        status = 130
    if message:
        print(f"{name}: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes once more when it exits, and would end with another status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
