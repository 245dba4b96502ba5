"""The YAML files of `recipes/`, found by name: recipes, overlays, clusters and sweeps."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.paths import RECIPES

# The folder below `recipes/` of each kind, and what a message calls one of it.
KINDS = {
    "": "recipe",
    "precision": "precision",
    "ep_backend": "EP backend",
    "cluster": "cluster",
    "sweep": "sweep",
}
# Safe in a shell, in a path, and as a name of jobs and W&B runs. A cell's name holds three of them
# and becomes a folder, whose name may have 255 bytes.
NAME_CHARACTERS = 60
# Of a varied value; what is longer, or does not fit, ends with so much of a digest.
_WORD_CHARACTERS, _DIGEST_CHARACTERS = 40, 8
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARACTERS - 1}}}")
_ALLOWED = f"letters, digits, '.', '-' and '_', at most {NAME_CHARACTERS}, a letter or digit first"


def check_name(place: str, name: str) -> str:
    """`name`, where cells, jobs and folders can be named after it."""
    if not _NAME.fullmatch(name):
        raise InputError(place, f"found {name!r}, allowed: {_ALLOWED}")
    return name


def word_of(value: Any) -> str:
    """An option's value as a part of a cell's name: of letters that files, jobs and W&B may have.

    Two values of an option have two words: a word that does not hold all of a value ends with a
    digest of it.
    """
    items = _items(value)
    text = "+".join(items)
    word = "".join(letter if _is_plain(letter) else "_" for letter in text)
    is_list = isinstance(value, list)
    is_nested = is_list and any(isinstance(item, list) for item in value)
    is_changed = isinstance(value, str | list) and word != text
    is_unclear = is_list and (is_nested or any("+" in item for item in items))
    if not (is_changed or is_unclear or len(word) > _WORD_CHARACTERS):
        return word
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{word[:_WORD_CHARACTERS]}_{digest}"


def _items(value: Any) -> list[str]:
    """The texts of a list, or of lists in it; of any other value its own."""
    if isinstance(value, list):
        return [text for item in value for text in _items(item)]
    return [str(value)]


def _is_plain(letter: str) -> bool:
    return letter.isascii() and (letter.isalnum() or letter in "_.+")


def names_in(kind: str) -> list[str]:
    """The names of the files of `kind`; editors' and systems' own files have no such names."""
    return sorted(
        path.stem for path in (RECIPES / kind).glob("*.yaml") if _NAME.fullmatch(path.stem)
    )


def find_file(kind: str, name: str) -> Path:
    """The file for `name`, which may also be the path of a YAML file of the user's own."""
    what = KINDS[kind]
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        # These, unlike Path's, answer for names that are too long for the file system too.
        if not os.path.isfile(name):  # noqa: PTH113
            is_folder = os.path.isdir(name)  # noqa: PTH112
            found = f"is a folder, not a {what} file" if is_folder else f"no such {what} file"
            raise InputError(name[-80:], found)
        check_name(f"{name}: the file's name", path.stem)
        return path
    path = RECIPES / kind / f"{name}.yaml"
    if name in names_in(kind):
        return path
    error = unknown_name(what, what, name, names_in(kind))
    for other, verb in {"": "run", "sweep": "sweep"}.items():
        if kind in ("", "sweep") and name in names_in(other):
            raise InputError(error.place, error.found, f"write: python submit.py {verb} {name}")
    raise error


def reference(kind: str, path: Path) -> str:
    """What `find_file` finds `path` by from any folder: its name, or the whole path of another."""
    path = path.resolve()
    return path.stem if path.parent == (RECIPES / kind).resolve() else str(path)
