"""A log as text: blocks of whole lines, forwards and backwards, and messages fit to be shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

RANK = re.compile(r"\[rank([0-9]{1,7})\]:")
COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Besides, window titles and the like, and sequences of two or three characters.
ESCAPES = re.compile(
    rf"{COLOURS.pattern}|\x9b[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*[0-~]"
)

# A metrics line has under 1,000 bytes, what a training process says was active under 4,000, and few
# exceptions have more than 10,000: no longer line is of use, and a file may be one single line.
MAX_LINE_BYTES = 64 << 10
# Small enough to stay in a core's cache: larger blocks are read no faster.
_BLOCK_BYTES = 512 << 10


def blocks(path: Path, with_last: bool = False) -> Iterator[bytes]:
    r"""The file in blocks of whole lines, each ending with `\n`; `\r` ends a line as well.

    Lines over MAX_LINE_BYTES may be left out, always whole, so that memory stays bounded.

    Args:
        path: the log.
        with_last: also the last line where its newline is missing.
    """
    with path.open("rb") as file:
        begun: bytes | None = b""  # the line whose end is not read yet; None for one too long
        while block := _read(file, _BLOCK_BYTES):
            if begun is None:
                newline = block.find(b"\n")
                if newline < 0:
                    continue
                begun, block = b"", block[newline + 1 :]
            end = block.rfind(b"\n") + 1
            if end:
                yield begun + block[:end]
                begun = b""
            begun += block[end:]
            if len(begun) > MAX_LINE_BYTES:
                begun = None
        if begun and with_last:
            yield begun + b"\n"


def blocks_backwards(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The whole lines between two offsets in blocks like those of `blocks`, the last block first.

    A line that begins before `start`, or that has no newline before `end`, is left out.
    """
    starts_line = start == 0 or _read_at(file, start - 1, 1) == b"\n"
    finished: bytes | None = None  # the end of the line whose start is not read yet
    while end > start:
        size = min(_BLOCK_BYTES, end - start)
        end -= size
        block = _read_at(file, end, size)
        if len(block) < size:
            return  # truncated meanwhile: what was read does not belong together
        if finished is None:
            block = block[: block.rfind(b"\n") + 1]
            if not block:
                continue
        else:
            block += finished
        begin = 0 if end == start and starts_line else block.find(b"\n") + 1
        if begin < len(block):
            yield block[begin:]
        finished = block[:begin]
        if len(finished) > MAX_LINE_BYTES + 1:
            finished = None


def lines_with(block: bytes, needle: bytes) -> Iterator[bytes]:
    """The lines of a block that hold `needle` and are not over MAX_LINE_BYTES, in order."""
    position = 0
    while (found := block.find(needle, position)) >= 0:
        start = block.rfind(b"\n", position, found) + 1 or position
        end = block.find(b"\n", found)
        if end - start <= MAX_LINE_BYTES:
            yield block[start:end]
        position = end + 1


def last_line_end(file: BinaryIO, start: int, end: int) -> int:
    """The offset behind the last whole line between two offsets; `end` within a line too long."""
    behind = max(start, end - MAX_LINE_BYTES - 1)
    newline = _read_at(file, behind, end - behind).rfind(b"\n")
    if newline >= 0:
        return behind + newline + 1
    return start if behind == start else end


def plain_text(text: str, max_characters: int) -> str:
    """`text` as one line for a terminal or Markdown: printable characters only, cut with `...`."""
    text = ESCAPES.sub("", text)
    # isprintable also refuses what reverses or hides text, such as U+202E and U+200B.
    text = "".join(char for char in text if char.isprintable() or char.isspace())
    text = " ".join(text.split())
    return text if len(text) <= max_characters else text[: max_characters - 3].rstrip() + "..."


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return _read(file, size)


def _read(file: BinaryIO, size: int) -> bytes:
    # A carriage return ends a line: a progress bar's last state stands before a message.
    return file.read(size).replace(b"\r", b"\n")
