"""Read the documents of a training corpus: JSON lines, gzipped JSON lines or Parquet.

`submit.py` checks the files before a job is queued, and the training process's data loader reads
them with the same functions, so both report errors at the same file and line. `submit.py data`
records document lengths in the runs folder's `texts.json`, where `check` and `plan` read them.
"""

import contextlib
import glob
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.files import json_text, write_whole
from cookbook.base.paths import runs_folder

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
# The number of documents that are read and shuffled together.
WINDOW = 4096


@dataclass(frozen=True)
class TextSource:
    """Files that are read as one stream; `weight` is the stream's relative share of the tokens."""

    pattern: str
    files: tuple[Path, ...]
    weight: float

    def too_few(self, count: int, readers: int) -> InputError:
        found = f"has {count} documents for {readers} data-parallel ranks and workers"
        return InputError(self.pattern, found, "use fewer of them, or more documents")


@dataclass(frozen=True)
class Document:
    """An unparsed document; `row` is its line number, or its row in a Parquet file, from 1."""

    file: Path
    row: int
    raw: str | bytes | None

    def text(self, key: str) -> str:
        """Return the text under `key`; raise InputError if the JSON is invalid or has no text."""
        place = f"{self.file}:{self.row}"
        value: Any = self.raw
        if self.file.suffix != ".parquet":
            try:
                value = json.loads(self.raw or "")
            except ValueError as error:
                raise InputError(place, f"is not a line of JSON ({error})", "repair it") from None
            if not isinstance(value, dict) or key not in value:
                keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                remedy = "name the key of the text: data.text_key, or --text-key of the verb data"
                raise InputError(place, f"has no key {key!r}, found: {keys}", remedy)
            value = value[key]
        if not isinstance(value, str):
            found = type(value).__name__
            raise InputError(place, f"{key} holds no text, found {found}", "repair the document")
        return value


def find_sources(patterns: Sequence[str], root: Path = Path()) -> list[TextSource]:
    """Return the sources that `data.files` lists as globs, files or folders.

    `0.7:web/*.jsonl` is a source with weight 0.7. Without weights, all files form one source.
    """
    place = "data.files"
    weighted = [re.fullmatch(r"(\d+(?:\.\d+)?):(.+)", pattern) for pattern in patterns]
    if not patterns:
        remedy = "name files, folders or globs of .jsonl, .json.gz or .parquet files"
        raise InputError(place, "is empty", remedy)
    if not any(weighted):
        files = tuple(path for pattern in patterns for path in _files(pattern, root))
        return [TextSource(", ".join(patterns), files, 1.0)]
    sources = []
    for whole, match in zip(patterns, weighted, strict=True):
        if not match:
            remedy = f"write 0.5:{whole}, or remove the weights of the others"
            raise InputError(place, f"{whole!r} has no weight and others have one", remedy)
        weight, pattern = float(match[1]), match[2]
        if not weight:
            raise InputError(place, f"{pattern!r} has weight 0", "remove it")
        sources.append(TextSource(pattern, tuple(_files(pattern, root)), weight))
    return sources


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
        raise InputError("data.files", f"{pattern!r} matches no file", remedy)
    for file in found:
        if not file.name.endswith(SUFFIXES):
            wrong = f"found {file}, allowed: {', '.join(SUFFIXES)}"
            raise InputError("data.files", wrong, "convert it, or narrow the glob")
        if not file.stat().st_size:
            raise InputError("data.files", f"{file} is empty", "remove it, or narrow the glob")
    return found


def read_windows(file: Path, key: str) -> Iterator[list[Document]]:
    """Yield the documents of a file in order, in lists of up to `WINDOW` documents."""
    try:
        if file.suffix == ".parquet":
            yield from _read_parquet(file, key)
            return
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            rows = enumerate(lines, 1)
            documents = (Document(file, row, line) for row, line in rows if not line.isspace())
            while window := list(itertools.islice(documents, WINDOW)):
                yield window
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(str(file), f"cannot be read: {reason}", "repair or remove it") from None


def _read_parquet(file: Path, key: str) -> Iterator[list[Document]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise InputError(str(file), f"is not a Parquet file ({error})", "repair it") from None
    columns = table.schema_arrow.names
    if key not in columns:
        remedy = "set data.text_key to the column of the text"
        raise InputError(str(file), f"has no column {key!r}, found: {', '.join(columns)}", remedy)
    rows = itertools.count(1)
    for batch in table.iter_batches(batch_size=WINDOW, columns=[key]):
        yield [Document(file, next(rows), text) for text in batch.column(0).to_pylist()]


def check_sources(patterns: Sequence[str], key: str, root: Path, readers: int) -> None:
    """Read the first 100 documents of every file; raise the InputError that a job would raise."""
    for source in find_sources(patterns, root):
        count = 0  # each reader needs a document of every source
        for file in source.files:
            windows = read_windows(file, key)
            first = next(windows, [])
            if not first:
                raise InputError(str(file), "has no documents", "remove it")
            for document in first[:100]:
                document.text(key)
            count += len(first)
            while count < readers and (window := next(windows, [])):
                count += len(window)
        if count < readers:
            raise source.too_few(count, readers)


def write_lengths(
    sources: Sequence[TextSource], text_key: str, tokenizer: Path, mean: float, median: float
) -> None:
    """Record the mean and median document length of `sources`, in tokens, for `read_lengths`."""
    found = _read_lengths() | {_key(sources, text_key, tokenizer): [mean, median]}
    write_whole(runs_folder() / "texts.json", json_text(found))


def read_lengths(
    sources: Sequence[TextSource], text_key: str, tokenizer: Path
) -> list[float] | None:
    """Return the mean and median document length in tokens; None if unrecorded or outdated."""
    return _read_lengths().get(_key(sources, text_key, tokenizer))


def _read_lengths() -> dict[str, list[float]]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, list[float]] = json.loads((runs_folder() / "texts.json").read_bytes())
        return found
    return {}


def _key(sources: Sequence[TextSource], text_key: str, tokenizer: Path) -> str:
    total = sum(source.weight for source in sources)
    known = [text_key, hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    for source in sources:
        known.append(f"{source.weight / total:.6f}")
        for path in sorted(file.resolve() for file in source.files):
            stat = path.stat()
            known.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(known).encode()).hexdigest()
