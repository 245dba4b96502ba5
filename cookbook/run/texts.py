"""Lengths of the documents of text files, as `submit.py data` counted them: `texts.json`.

The file lies beside the runs. `check` and `plan` look up the files of a recipe in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from cookbook.base.files import json_text, write_whole
from cookbook.base.paths import runs_folder
from cookbook.base.text_files import TextSource


def write_lengths(
    sources: Sequence[TextSource], text_key: str, tokenizer: Path, mean: float, median: float
) -> None:
    """Record the mean and the median length of the documents, in tokens."""
    found = _read() | {_key(sources, text_key, tokenizer): [mean, median]}
    write_whole(_path(), json_text(found))


def read_lengths(
    sources: Sequence[TextSource], text_key: str, tokenizer: Path
) -> tuple[float, float] | None:
    """Return mean and median; None if these files, as they are now, were not counted."""
    found = _read().get(_key(sources, text_key, tokenizer))
    return (found[0], found[1]) if found else None


def _path() -> Path:
    return runs_folder() / "texts.json"


def _read() -> dict[str, list[float]]:
    try:
        found: dict[str, list[float]] = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Nothing was counted yet, and a damaged file is counted anew.
        return {}
    return found


def _key(sources: Sequence[TextSource], text_key: str, tokenizer: Path) -> str:
    """Return a digest of the files' paths, sizes and times, the weights and the tokenizer."""
    total = sum(source.weight for source in sources)
    known = [text_key, hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    for source in sources:
        known.append(f"{source.weight / total:.6f}")
        for path in sorted(file.resolve() for file in source.files):
            stat = path.stat()
            known.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(known).encode()).hexdigest()
