"""What is in the files that a run reads, so that a resume notices that they have changed.

Files are compared by name, size and a hash of their head and tail, not by the folders they lie in.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.text_files import TextSource

_BYTES = 64 * 2**10
# Option -> its files in the order in which they are read: each one's path, its share of the tokens
# and the key of its texts, and what is in it.
Identity = Mapping[str, Sequence[Sequence[str]]]


def identify(files: Iterable[Path], use: str = "") -> list[list[str]]:
    """Return the path of each file, its `use`, and its name, size and hash."""

    def one(path: Path) -> list[str]:
        size = path.stat().st_size
        with path.open("rb") as stream:
            digest = hashlib.sha256(stream.read(_BYTES))
            stream.seek(max(size - _BYTES, 0))
            digest.update(stream.read(_BYTES))
        return [str(path), use, f"{path.name} {size} {digest.hexdigest()[:16]}"]

    # Files on a shared disk take a round trip each.
    with ThreadPoolExecutor(16) as pool:
        return [*pool.map(one, files)]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def identify_sources(sources: Sequence[TextSource]) -> list[list[str]]:
    """Return the entries of all files; raise InputError if a hub does not answer."""
    total, found = sum(source.weight for source in sources), list[list[str]]()
    for source in sources:
        share = f"{source.weight / total:.6f} "
        if hub := source.hub:
            use, folder = f"{share}{hub.key} {hub.split}", Path(hub.name)
            if folder.is_absolute():
                found += identify(files_in(folder), use)
            else:
                found.append([source.pattern, use, hub.commit()])
        for key, files in itertools.groupby(source.files, lambda file: file.used_key):
            found += identify((file.path for file in files), share + key)
    return found


def check_same(now: Identity, then: Identity, anew: str) -> None:
    """Raise InputError, which names a file, if texts or tokenizer differ from those of `then`."""
    for option in now.keys() & then.keys():
        files, before = now[option], then[option]
        if [entry[1:] for entry in files] == [entry[1:] for entry in before]:
            continue
        old = {content: Path(path).name for path, _, content in before}
        new = {content: path for path, _, content in files}
        found = "the files' order, shares of the tokens or keys differ from the checkpoint's"
        if added := [new[content] for content in new if content not in old]:
            is_known = Path(added[0]).name in old.values()
            says = "has changed since" if is_known else "was not among the files when"
            found = f"{added[0]} {says} the run recorded them"
        elif gone := [old[content] for content in old if content not in new]:
            found = f"{gone[0]}, which the run recorded, is missing"
        raise InputError(option, found, f"restore what was there, or {anew}")
