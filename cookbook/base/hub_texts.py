"""Stream a data set of the Hugging Face hub, or a folder in its layout, through `datasets`.

A data set is read shard by shard (its files, mostly). `datasets` yields the rows of a shard in the
same order each time, so a position is a shard and a number of rows. A resume reads its shard from
the start again, up to that row.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.document import Document
from cookbook.base.errors import InputError

PREFIX = "hub:"
_FORM = re.compile(r"hub:([^:@]+)(?:@([^:]+))?(?::([^:]*))?(?::([^:]+))?")


@dataclass(frozen=True)
class HubTexts:
    """One split of a data set; `name` is OWNER/NAME, or a folder's path."""

    pattern: str
    key: str
    name: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, pattern: str, key: str, root: Path) -> "HubTexts":
        """Parse hub:OWNER/NAME@REVISION:CONFIG:SPLIT; all but the name can be left out."""
        found = _FORM.fullmatch(pattern)
        name, revision, config, split = found.groups() if found else ("", None, None, None)
        if (folder := root / Path(name).expanduser()).is_dir() and found and not revision:
            name = str(folder.resolve())
        elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            remedy = "write hub:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]"
            raise InputError("data.files", f"{pattern!r} is no data set or folder", remedy)
        return cls(pattern, key, name, revision, config or None, split or "train")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
            remedy = f"{hub} must know it, and HF_TOKEN where it is private; without a network, "
            remedy += "download it and name its files"
            raise InputError(self.pattern, f"cannot be read ({words})", remedy) from None

    def commit(self) -> str:
        """Return the commit that the hub has now; raise InputError if it cannot be asked."""
        if self.name.startswith("/"):
            return ""
        with self._reading():
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(self.name, revision=self.revision, timeout=10).sha)

    def shards(self) -> list[Callable[[], Iterator[Document]]]:
        """Return for each shard what reads it; raise InputError if there is no such data set."""
        with self._reading():
            from datasets import load_dataset

            where = {"name": self.config, "revision": self.revision, "split": self.split}
            stream: Any = load_dataset(self.name, **where, streaming=True)
            count = stream.num_shards
            shards = [stream.shard(num_shards=count, index=number) for number in range(count)]
        return [functools.partial(self._rows, shard) for shard in shards]

    def _rows(self, shard: Any) -> Iterator[Document]:
        before = 0
        # Its __iter__ would share one shard among the data loader's workers; `iter` does not.
        for batch in shard.iter(batch_size=64):
            if self.key not in batch:
                found = f"has no column {self.key!r}, found: {', '.join(batch)}"
                raise InputError(self.pattern, found, "name it: data.text_key, or #KEY at the end")
            for number, text in enumerate(batch[self.key], before + 1):
                yield Document(self.pattern, number, text)
            before += len(batch[self.key])
