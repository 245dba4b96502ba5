"""How a command ends: with an exit status, and with one line instead of a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from cookbook.base.errors import InputError, JobError

_INTERRUPTED = 130
_STANDARD_OUTPUT = "standard output"


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run `work` and return the exit status, after a line on standard error where it did not work.

    The status is that of `work`; 2 where the input is wrong; 1 where the work or the system failed;
    130 after an interrupt; 0 where the reader of standard output has seen enough (`| head`).

    Args:
        name: what the line begins with, e.g. "submit.py".
    """
    _prepare_streams()
    message = ""
    try:
        status = _status_of(work)
        sys.stdout.flush()
    except InputError as error:
        status, message = 2, str(error)
    except JobError as error:
        status, message = 1, str(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename == _STANDARD_OUTPUT:
            status = 0
        else:
            words = (error.filename, error.strerror or error)
            status, message = 1, ": ".join(str(word) for word in words if word)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    if message:
        print(f"{name}: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes once more when it exits, and would end with another status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _status_of(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as end:
        # argparse ends this way, after --help and after a wrong option.
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        raise


class _NamedOutput(io.FileIO):
    """Standard output that is named in its errors, as files are."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STANDARD_OUTPUT
            raise


def _prepare_streams() -> None:
    """Make printing safe where a stream is closed or fails, or its encoding lacks a letter."""
    # The next file that is opened would get a closed stream's number, and be printed into.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # open() takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    # Where it is another object, a caller has put a stream of its own there.
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        raw = _NamedOutput(sys.stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            raw if sys.stdout.write_through else io.BufferedWriter(raw),
            encoding=sys.stdout.encoding,
            errors="replace",
            line_buffering=sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )
