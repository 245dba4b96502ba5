"""Read the texts that a recipe names: plain text, JSON lines or Parquet files, or data of the hub.

`submit.py` checks them before a job is queued, and the training process's data loader reads them
with the same functions, so both report errors at the same file and line. `submit.py data` records
document lengths in the runs folder's `texts.json`, where `check` and `plan` read them.

A data set of the hub is streamed shard by shard (its files, mostly). `datasets` yields the rows of
a shard in the same order each time, so a position is a shard and a number of rows. A resume reads
its shard from the start again, up to that row.
"""

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.files import json_text, write_whole
from cookbook.base.paths import runs_folder

PREFIX = "hub:"
_FORM = re.compile(r"hub:([^:@]+)(?:@([^:]+))?(?::([^:]*))?(?::([^:]+))?")
# The number of documents that are read and shuffled together.
WINDOW = 4096
_LINES = [f".{kind}{packed}" for kind in ("jsonl", "json", "txt") for packed in ("", ".gz", ".zst")]
SUFFIXES = (*_LINES, ".parquet")
# A .txt file is one document. A larger one is cut at line ends into documents of this many bytes.
_PIECE_BYTES = 256 * 2**10
_ENTRY = re.compile(r"(?:(\d+(?:\.\d+)?):)?(.+?)(?:#([^#]*))?", re.DOTALL)


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


@dataclass(frozen=True)
class TextFile:
    """A file of texts; `key` names the text in a line of JSON, or the column in Parquet."""

    path: Path
    key: str

    @property
    def is_plain(self) -> bool:
        return self.path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt")

    @property
    def used_key(self) -> str:
        return "" if self.is_plain else self.key

    def rows(self) -> Iterator[Document]:
        """Yield the documents in order; raise InputError if they cannot be read."""
        try:
            yield from self._parquet() if self.path.suffix == ".parquet" else self._lines()
        except (OSError, EOFError, ValueError, zlib.error) as error:
            reason, remedy = getattr(error, "strerror", None) or str(error), "repair or remove it"
            raise InputError(str(self.path), f"cannot be read: {reason}", remedy) from None

    def _lines(self) -> Iterator[Document]:
        with _opened(self.path) as lines:
            pieces: Iterable[bytes] = lines
            if self.is_plain:
                pieces = iter(lambda: b"".join(lines.readlines(_PIECE_BYTES)), b"")
            for row, piece in enumerate(pieces, 1):
                if not piece.isspace():
                    yield Document(self.path, row, piece, self.used_key)

    def _parquet(self) -> Iterator[Document]:
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(self.path)
        if self.key not in (columns := table.schema_arrow.names):
            found = f"has no column {self.key!r}, found: {', '.join(columns)}"
            remedy = "name it: data.text_key, or #COLUMN after the files"
            raise InputError(str(self.path), found, remedy)
        batches = table.iter_batches(batch_size=WINDOW, columns=[self.key])
        texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for row, text in enumerate(texts, 1):
            yield Document(self.path, row, text)


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


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


@dataclass(frozen=True)
class TextSource:
    """Texts that are read as one stream; `weight` is the stream's relative share of the tokens."""

    pattern: str
    files: tuple[TextFile, ...]
    weight: float = 1.0
    hub: HubTexts | None = None

    def parts(self) -> list[Callable[[], Iterator[Document]]]:
        """Return for each file, or shard of a streamed data set, what yields its documents."""
        return self.hub.shards() if self.hub else [file.rows for file in self.files]

    def too_few(self, count: int, readers: int) -> InputError:
        found = f"has {count} documents for {readers} data-parallel ranks and workers"
        return InputError(self.pattern, found, "use fewer of them, or more documents")


def windows(rows: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield the documents in order, in lists of up to `WINDOW`, or of 64 MiB."""
    window, size = list[Document](), 0
    for document in rows:
        window.append(document)
        size += len(document.raw) if isinstance(document.raw, str | bytes) else 0
        if len(window) == WINDOW or size >= 64 * 2**20:
            yield window
            window, size = [], 0
    if window:
        yield window


def find_sources(patterns: Sequence[str], key: str, root: Path = Path()) -> list[TextSource]:
    """Return the sources that `data.files` lists as globs, files, folders or data sets of the hub.

    `0.7:web/*.jsonl#content` has weight 0.7, and its texts are under `content` instead of `key`.
    Without weights, all files form one source.
    """
    place = "data.files"
    if not patterns:
        remedy = "name files, folders or globs of .jsonl, .txt or .parquet files"
        raise InputError(place, "is empty", remedy)
    sources = []
    for whole in patterns:
        if not (found := _ENTRY.fullmatch(whole)):
            raise InputError(place, f"{whole!r} names no file", "remove it")
        weight, pattern, own = found.groups()
        if own is not None and (not own or own.endswith(SUFFIXES)):
            remedy = "where a file's own name has a '#', add the key: FILE#text"
            raise InputError(place, f"{whole!r}: '#' is followed by no key of a text", remedy)
        if weight is not None and not float(weight):
            raise InputError(place, f"{pattern!r} has weight 0", "remove it")
        if pattern.startswith(PREFIX):
            hub, files = HubTexts.parse(pattern, own or key, root), tuple[TextFile, ...]()
        else:
            hub, files = None, tuple(TextFile(file, own or key) for file in _files(pattern, root))
            if own and all(file.is_plain for file in files):
                raise InputError(place, f"{whole!r}: .txt files have no keys", f"remove #{own}")
        sources.append((whole, weight, TextSource(pattern, files, float(weight or 1), hub)))
    weighted = any(weight for _, weight, _ in sources)
    for whole, weight, source in sources:
        if not weight and (weighted or (source.hub and len(sources) > 1)):
            others = "others have one" if weighted else "a data set of the hub is one of several"
            remedy = f"write 0.5:{whole}, or remove the weights of the others"
            raise InputError(place, f"{whole!r} has no weight and {others}", remedy)
    if weighted or len(sources) == 1:
        return [source for _, _, source in sources]
    files = tuple(file for _, _, source in sources for file in source.files)
    if twice := [str(file.path) for file, times in Counter(files).items() if times > 1]:
        remedy = "name it once, or give each entry a weight"
        raise InputError(place, f"names {twice[0]} twice", remedy)
    return [TextSource(", ".join(patterns), files)]


def _files(pattern: str, root: Path) -> list[Path]:
    path = root / Path(pattern).expanduser()
    if path.is_dir():
        # As with a glob, hidden files are none of the texts.
        files = (file for file in path.iterdir() if not file.name.startswith("."))
        found = sorted(file for file in files if file.name.endswith(SUFFIXES))
    else:
        # Path.glob does not accept absolute patterns.
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
    if not found:
        remedy = f"name {', '.join(SUFFIXES)} files; relative paths start at {root.resolve()}"
        if re.match(r"[\d.]+%?:", pattern):
            remedy = "a weight is a number such as 0.7, not a percentage"
        elif deep := [file for file in path.rglob("*") if file.name.endswith(SUFFIXES)]:
            remedy = f"for its folders, write {pattern.rstrip('/')}/**/*{deep[0].suffix}"
        raise InputError("data.files", f"{pattern!r} matches no file", remedy)
    for file in found:
        if not file.name.endswith(SUFFIXES):
            wrong = f"found {file}, allowed: {', '.join(SUFFIXES)}"
            raise InputError("data.files", wrong, "convert it, or narrow the glob")
        if not file.is_file() or not file.stat().st_size:
            why = "is empty" if file.is_file() else "is no file, or a link to none"
            raise InputError("data.files", f"{file} {why}", "remove it, or narrow the glob")
    return found


def check_sources(patterns: Sequence[str], key: str, root: Path, readers: int) -> None:
    """Read the first 100 documents of every file, or of the first shard of a streamed data set.

    Raise the InputError that a job would raise.
    """
    for source in find_sources(patterns, key, root):
        if source.hub:
            # Ask once: `datasets` asks six times, in half a minute, where there is no network.
            source.hub.commit()
        count = 0  # each reader needs a document of every source
        for index, rows in enumerate(source.parts()):
            # Of .txt files, which may be large, and of streams no more than what is judged.
            most = 100 if source.hub or source.files[index].is_plain else WINDOW
            number = 0
            for number, document in enumerate(islice(rows(), max(most, readers - count)), 1):
                if number <= 100:
                    document.text()
            if not number:
                place = source.pattern if source.hub else str(source.files[index].path)
                raise InputError(place, "has no documents", "remove it")
            count += number
            if source.hub and count >= readers:
                break
        if count < readers:
            raise source.too_few(count, readers)


def write_lengths(
    sources: Sequence[TextSource], tokenizer: Path, mean: float, median: float
) -> None:
    """Record the mean and median document length of `sources`, in tokens, for `read_lengths`."""
    found = _read_lengths() | {_key(sources, tokenizer): [mean, median]}
    write_whole(runs_folder() / "texts.json", json_text(found))


def read_lengths(sources: Sequence[TextSource], tokenizer: Path) -> list[float] | None:
    """Return the mean and median document length in tokens; None if unrecorded or outdated."""
    return _read_lengths().get(_key(sources, tokenizer))


def _read_lengths() -> dict[str, list[float]]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, list[float]] = json.loads((runs_folder() / "texts.json").read_bytes())
        return found
    return {}


def _key(sources: Sequence[TextSource], tokenizer: Path) -> str:
    total = sum(source.weight for source in sources)
    known = [hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    for source in sources:
        known.append(f"{source.weight / total:.6f} {source.hub or ''}")
        for path, key in sorted((file.path.resolve(), file.used_key) for file in source.files):
            stat = path.stat()
            known.append(f"{path} {stat.st_size} {stat.st_mtime_ns} {key}")
    return hashlib.sha256("\n".join(known).encode()).hexdigest()
