"""Atomic file writes, file locks and JSON formatting."""

import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write `content` to `path` atomically, through a temporary file in the same folder.

    Every OSError names `path`. Python's own error for a full disk would not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, across all machines that share the file.

    If the file system does not support locks, continue without one. Never delete the file: a
    process that creates it anew does not see a lock on the deleted one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        # Some shared file systems do not support locks.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def json_text(value: object) -> str:
    """Format `value`, with dataclasses, as indented JSON; NaN and infinity become null."""
    text = json.dumps(value, default=dataclasses.asdict)
    finite = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(finite, indent=2) + "\n"
