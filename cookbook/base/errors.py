"""The cookbook's exceptions, and functions that format their messages."""

import contextlib
import difflib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Placeholders for an error's `place`. A function that looks up a name does not know where the name
# was written. It raises the error with a placeholder, which `named_at` replaces.
_KINDS = ("recipe", "precision", "EP backend", "cluster", "sweep")


class InputError(Exception):
    """The input is wrong: `submit.py` prints only the message and exits with status 2.

    `place` locates the error, from file to key (`recipes/debug.yaml: training.steps`). `found`
    states the wrong value and the allowed ones. `remedy` is empty if `found` implies it.
    """

    def __init__(self, place: str, found: str, remedy: str = "") -> None:
        self.place, self.found, self.remedy = place, found, remedy
        # An exception sent to another process is pickled, and rebuilt from these three arguments.
        super().__init__(place, found, remedy)

    def __str__(self) -> str:
        return f"{self.place}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


class JobError(Exception):
    """The input is right, but the work failed: the command exits with status 1."""


@contextlib.contextmanager
def named_at(place: str) -> Iterator[None]:
    """Set the `place` of unknown-name errors raised in the `with` block."""
    try:
        yield
    except InputError as error:
        if error.place in _KINDS:
            error.place = place
        raise


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return up to `count` members of `known` that resemble `name`, most similar first."""
    written = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), written, n=count, cutoff=0.6)
    if not close and len(name) > 2:
        close = [one for one in written if name.lower() in one or one in name.lower()][:count]
    return [written[one] for one in close]


def unknown_name(place: str, what: str, name: str, known: Iterable[str]) -> InputError:
    """Return an error that says `name` is not in `known` and suggests the closest match."""
    names = sorted(known)
    close = nearest(name, names)
    found = f"unknown {what} {name!r}; allowed: {', '.join(names) or 'none, as none exist yet'}"
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
    """Return a remedy if adding or removing quotes gives `value` the allowed type; else empty."""
    if allowed == "a text" and isinstance(value, bool | int | float):
        return "put it in quotes"
    reader = {"a whole number": int, "a number": float}.get(allowed)
    if reader and isinstance(value, str) and value.isascii():
        with contextlib.suppress(ValueError):
            return "remove the quotes" if math.isfinite(reader(value)) else ""
    if allowed == "a whole number" and isinstance(value, str | float):
        with contextlib.suppress(ValueError):
            return f"write {int(float(value))}" if float(value).is_integer() else ""
    return ""


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run `work` and return the exit status; print an error as one line on standard error.

    The status is the result of `work`, 2 for wrong input, 1 if the work or the system failed, 130
    after an interrupt, and 0 if the reader of standard output closed the pipe (`| head`).
    """
    if sys.stdout is None:
        # The process was started with standard output closed.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In an ASCII locale, print `?` for other characters instead of failing with a traceback.
        sys.stdout.reconfigure(errors="replace")
    status, message = 0, ""
    try:
        try:
            status = work()
        except SystemExit as end:
            # argparse exits after --help and after a wrong option.
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
        # Python flushes stdout again at exit. A failure there would change the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
