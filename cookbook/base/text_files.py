"""Read the texts that a recipe names: plain text, JSON lines or Parquet files, or data of the hub.

`submit.py` checks them before a job is queued, and the training process's data loader reads them
with the same functions, so both report errors at the same file and line. `submit.py data` records
document lengths in the runs folder's `texts.json`, where `check` and `plan` read them.
"""

import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cookbook.base.document import Document
from cookbook.base.errors import InputError
from cookbook.base.files import json_text, write_whole
from cookbook.base.hub_texts import PREFIX, HubTexts
from cookbook.base.paths import runs_folder

# The number of documents that are read and shuffled together.
WINDOW = 4096
_LINES = [f".{kind}{packed}" for kind in ("jsonl", "json", "txt") for packed in ("", ".gz", ".zst")]
SUFFIXES = (*_LINES, ".parquet")
# A .txt file is one document. A larger one is cut at line ends into documents of this many bytes.
_PIECE_BYTES = 256 * 2**10
_ENTRY = re.compile(r"(?:(\d+(?:\.\d+)?):)?(.+?)(?:#([^#]*))?", re.DOTALL)


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
    return [TextSource(", ".join(patterns), files)]


def _files(pattern: str, root: Path) -> list[Path]:
    path = root / Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
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
        if not file.stat().st_size:
            raise InputError("data.files", f"{file} is empty", "remove it, or narrow the glob")
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
