"""Writes files whole, or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write `content` to `path` through a temporary file beside it, so that no reader sees a part.

    Raises:
        OSError: with `path` as its file name, also where the disk is full.
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
        # mkdir says that its folder exists, where that is a file.
        number = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
        raise OSError(number, os.strerror(number or 0), str(path)) from error
