"""A document of a training corpus, and the text in it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError


@dataclass(frozen=True)
class Document:
    """A text (str, or bytes in UTF-8) or, with a `key`, a line of JSON that holds one under it."""

    origin: Path | str
    row: int  # number of the line, row or piece in `origin`, from 1
    raw: Any
    key: str = ""

    def text(self) -> str:
        """Return the text; raise InputError if there is none, or if no tokenizer would take it."""
        found, remedy = "", "repair the document"
        value = self.raw
        try:
            if self.key:
                value = json.loads(value)
                if not isinstance(value, dict) or self.key not in value:
                    keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                    found = f"has no key {self.key!r}, found: {keys}"
                    remedy = "name the key of the text: data.text_key, or #KEY after the files"
                else:
                    value = value[self.key]
            if isinstance(value, bytes):
                return value.decode("utf-8-sig")
            if isinstance(value, str):
                value.encode()  # fails where a tokenizer would
                return value
            found = (
                found or f"{self.key or 'the column'} holds no text, found {type(value).__name__}"
            )
        except UnicodeDecodeError as error:
            found = f"byte {error.start:,} of the document is not UTF-8"
            remedy = "convert the file, with iconv -f latin1 say"
        except UnicodeEncodeError as error:
            found = f"character {error.start:,} of the text is half a surrogate pair"
        except (ValueError, RecursionError) as error:
            found = f"is not a line of JSON ({error})"
        raise InputError(f"{self.origin}:{self.row}", found, remedy)
