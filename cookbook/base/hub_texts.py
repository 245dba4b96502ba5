"""Stream a data set of the Hugging Face hub, or a folder in its layout, through `datasets`.

A data set is read shard by shard (its files, mostly). `datasets` yields the rows of a shard in the
same order each time, so a position is a shard and a number of rows. A resume reads its shard from
the start again, up to that row.
"""

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.document import Document
from cookbook.base.errors import InputError

PREFIX = "hub:"
_FORM = re.compile(r"hub:([^:@]+)(?:@([^:]+))?(?::([^:]*))?(?::([^:]+))?")
_SECONDS = 10


@dataclass(frozen=True)
class Shard:
    """One of the parts that a streamed data set has."""

    origin: str
    key: str
    stream: Any  # a datasets.IterableDataset

    def rows(self) -> Iterator[Document]:
        before = 0
        # Its __iter__ would share one shard among the data loader's workers; `iter` does not.
        for batch in self.stream.iter(batch_size=64):
            if self.key not in batch:
                found = f"has no column {self.key!r}, found: {', '.join(batch)}"
                raise InputError(self.origin, found, "name it: data.text_key, or #KEY at the end")
            for number, text in enumerate(batch[self.key], before + 1):
                yield Document(self.origin, number, text)
            before += len(batch[self.key])


@dataclass(frozen=True)
class HubTexts:
    """One split of a data set; `name` is OWNER/NAME, or a folder's path."""

    pattern: str
    name: str
    revision: str | None
    config: str | None
    split: str
    key: str

    @classmethod
    def parse(cls, pattern: str, key: str, root: Path) -> "HubTexts":
        """Parse hub:OWNER/NAME@REVISION:CONFIG:SPLIT; all but the name can be left out."""
        found, remedy = _FORM.fullmatch(pattern), "write hub:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]"
        name, revision, config, split = found.groups() if found else ("", None, None, None)
        folder = root / Path(name).expanduser()
        if found and folder.is_dir() and not revision:
            name = str(folder.resolve())
        elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise InputError("data.files", f"{pattern!r} is no data set or folder", remedy)
        return cls(pattern, name, revision, config or None, split or "train", key)

    @property
    def is_folder(self) -> bool:
        return self.name.startswith("/")

    def commit(self) -> str:
        """Return the commit that the hub has now; raise InputError if it cannot be asked."""
        if self.is_folder:
            return ""
        from huggingface_hub import HfApi

        try:
            asked = HfApi().dataset_info(self.name, revision=self.revision, timeout=_SECONDS)
        except Exception as error:
            raise self._unread(error) from None
        return str(asked.sha)

    def shards(self) -> list[Shard]:
        """Return the shards, unread; raise InputError if the data set cannot be opened."""
        from datasets import load_dataset

        try:
            where: dict[str, Any] = {"name": self.config, "revision": self.revision}
            stream = load_dataset(self.name, split=self.split, streaming=True, **where)
        except Exception as error:
            raise self._unread(error) from None
        count = stream.num_shards
        part = functools.partial(stream.shard, num_shards=count)
        return [Shard(self.pattern, self.key, part(index=number)) for number in range(count)]

    def _unread(self, error: Exception) -> InputError:
        hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        remedy = (
            f"its name, and HF_TOKEN where it is private, must suit {hub}; without a network, "
            "download it and name its files"
        )
        words = " ".join(str(error).split())[:200]
        return InputError(self.pattern, f"cannot be read ({type(error).__name__}: {words})", remedy)
