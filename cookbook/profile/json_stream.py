"""Reads a trace's JSON event by event, so that memory does not grow with the file."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path

_BLOCK = 1 << 22
# No event or heading is longer; a file in which one seems to be is no trace.
_LONGEST = 1 << 26
_SPACE = re.compile(r"[ \t\r\n]*")
_GZIP = b"\x1f\x8b"
_EVENTS = "traceEvents"


class TraceStream:
    """The events of a Chrome trace, one at a time; plain or gzip.

    Attributes:
        header: every other key of the file, as far as it has been read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._text = ""
        self._at = 0
        # Characters before `_text`, for messages.
        self._before = 0
        # Names of kernels may hold what JSON would have escaped.
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def events(self) -> Iterator[dict[str, Any]]:
        """Each event; an InputError where the file is no whole trace."""
        try:
            with self._open() as file:
                yield from self._read(file)
        except (OSError, EOFError, zlib.error) as error:
            words = getattr(error, "strerror", None) or str(error)
            raise InputError(shown_path(self.path), f"cannot be read: {words}") from None
        except UnicodeDecodeError:
            raise InputError(shown_path(self.path), "is not text: no trace") from None
        except RecursionError:
            raise self._broken("is nested too deeply") from None

    def _open(self) -> IO[str]:
        with self.path.open("rb") as file:
            packed = file.read(2) == _GZIP
        if packed:
            return gzip.open(self.path, "rt", encoding="utf-8")
        return self.path.open(encoding="utf-8")

    def _read(self, file: IO[str]) -> Iterator[dict[str, Any]]:
        if self._next(file) != "{":
            raise self._broken("is not a trace: it holds no JSON object")
        self._at += 1
        found = False
        separator = "{"
        while self._next(file) != "}" or separator == ",":
            key = self._value(file)
            if not isinstance(key, str) or self._next(file) != ":":
                raise self._broken("is not JSON")
            self._at += 1
            if key == _EVENTS and not found:
                found = True
                yield from self._list(file)
            else:
                self.header[key] = self._value(file)
            separator = self._next(file)
            if separator == ",":
                self._at += 1
            elif separator != "}":
                raise self._broken("is not JSON")
        if not found:
            raise self._broken(f"is not a trace: it has no {_EVENTS}")

    def _list(self, file: IO[str]) -> Iterator[dict[str, Any]]:
        if self._next(file) != "[":
            raise self._broken(f"is not a trace: {_EVENTS} is no list")
        self._at += 1
        while self._next(file) != "]":
            event = self._value(file)
            if isinstance(event, dict):
                yield event
            if self._next(file) == ",":
                self._at += 1
            elif self._text[self._at] != "]":
                raise self._broken("is not JSON")
        self._at += 1

    def _next(self, file: IO[str]) -> str:
        """The next character that is no space; it stays."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(file):
                raise self._broken("ends too early: the trace was not written to its end")

    def _value(self, file: IO[str]) -> Any:
        """The JSON value here."""
        self._next(file)
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                # A number at the end of the block may have more digits in the next.
                if end < len(self._text):
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                # Near the end of what was read the value may only be cut; elsewhere it is wrong.
                cut = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated")
                if not cut or len(self._text) - self._at > _LONGEST:
                    self._at = error.pos
                    raise self._broken("is not JSON") from None
            if not self._more(file):
                raise self._broken("ends too early: the trace was not written to its end")

    def _more(self, file: IO[str]) -> bool:
        block = file.read(_BLOCK)
        if block:
            self._before += self._at
            self._text = self._text[self._at :] + block
            self._at = 0
        return bool(block)

    def _broken(self, found: str) -> InputError:
        if not self._before and not self._text:
            return InputError(shown_path(self.path), "is empty", "the job ended while writing it?")
        place = f"{shown_path(self.path)}: character {self._before + self._at:,}"
        return InputError(place, found, "profile the recipe again")
