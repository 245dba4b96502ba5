"""A document of a training corpus, and the text in it."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cookbook.base.errors import InputError

# The number of documents that are read and shuffled together.
WINDOW = 4096


@dataclass(frozen=True)
class Document:
    """A text (str, or bytes in UTF-8) or, with a `key`, a line of JSON that holds one under it."""

    origin: Path | str
    row: int  # number of the line, row or piece in `origin`, from 1
    raw: Any
    key: str | None = None

    def text(self) -> str:
        """Return the text; raise InputError if there is none, or if no tokenizer would take it."""
        place, value, repair = f"{self.origin}:{self.row}", self.raw, "repair the document"
        if self.key is not None:
            try:
                value = json.loads(value)
            except ValueError as error:
                raise InputError(place, f"is not a line of JSON ({error})", "repair it") from None
            if not isinstance(value, dict) or self.key not in value:
                keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                remedy = "name the key of the text: data.text_key, or #KEY after the files"
                raise InputError(place, f"has no key {self.key!r}, found: {keys}", remedy)
            value = value[self.key]
        try:
            if isinstance(value, bytes):
                return value.decode("utf-8-sig")
            if isinstance(value, str):
                if not value.isascii():
                    value.encode()
                return value
        except UnicodeDecodeError as error:
            found = f"byte {error.start:,} of the document is not UTF-8"
            raise InputError(place, found, "convert the file, with iconv -f latin1 say") from None
        except UnicodeEncodeError as error:
            found = f"character {error.start:,} of the text is half a surrogate pair"
            raise InputError(place, found, repair) from None
        label = self.key or "the column"
        raise InputError(place, f"{label} holds no text, found {type(value).__name__}", repair)


class Part(Protocol):
    """What is read from its beginning: a file, or a shard of a data set on the hub."""

    def rows(self) -> Iterator[Document]:
        """Yield the documents in order; raise InputError if they cannot be read."""


def windows(part: Part) -> Iterator[list[Document]]:
    """Yield the documents of `part` in order, in lists of up to `WINDOW` documents."""
    rows = part.rows()
    while window := list(itertools.islice(rows, WINDOW)):
        yield window
