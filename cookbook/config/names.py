"""The YAML files of `recipes/`, found by name: recipes, overlays, clusters and sweeps."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError, unknown_name
from cookbook.base.paths import RECIPES

# The folder below `recipes/` of each kind, and its name in messages.
KINDS = {
    "": "recipe",
    "precision": "precision",
    "ep_backend": "EP backend",
    "cluster": "cluster",
    "sweep": "sweep",
}
# Safe in a shell, in a path, and as a name of jobs and W&B runs. A cell's name holds three of them
# and becomes a folder, whose name may have 255 bytes.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_ALLOWED = "letters, digits, '.', '-' and '_', at most 60, a letter or digit first"
_WORD_CHARACTERS = 40


def check_name(place: str, name: str) -> str:
    """Return `name` where cells, jobs and folders can be named after it; raise elsewhere."""
    if not _NAME.fullmatch(name):
        raise InputError(place, f"found {name!r}, allowed: {_ALLOWED}")
    return name


def word_of(value: Any) -> str:
    """Return an option's value as a part of a cell's name: letters for files, jobs and W&B.

    Two values of an option have two words: one that does not hold all of its value ends with a
    digest of it.
    """
    items = value if isinstance(value, list) else [value]
    text = "+".join(map(str, items))
    word = re.sub(r"[^A-Za-z0-9_.+]", "_", text)
    is_changed = isinstance(value, str | list) and word != text
    is_unclear = isinstance(value, list) and word.count("+") != max(0, len(items) - 1)
    if not (is_changed or is_unclear or len(word) > _WORD_CHARACTERS):
        return word
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
    return f"{word[:_WORD_CHARACTERS]}_{digest}"


def names_in(kind: str) -> list[str]:
    """Return the names of the files of `kind`; editors' backup files have no such names."""
    return sorted(
        path.stem for path in (RECIPES / kind).glob("*.yaml") if _NAME.fullmatch(path.stem)
    )


def find_file(kind: str, name: str) -> Path:
    """Return the file for `name`, which may also be the path of a user's own YAML file."""
    title = KINDS[kind]
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            is_folder = f"is a folder, not a {title} file"
            remedy = f"did you mean {path.stem!r}?" if path.stem in names_in(kind) else ""
            raise InputError(name, is_folder if path.is_dir() else f"no such {title} file", remedy)
        check_name(f"{name}: the file's name", path.stem)
        return path
    if name in names_in(kind):
        return RECIPES / kind / f"{name}.yaml"
    error = unknown_name(title, title, name, names_in(kind))
    for other, verb in {"": "run", "sweep": "sweep"}.items():
        if kind in ("", "sweep") and name in names_in(other):
            raise InputError(error.place, error.found, f"write: python submit.py {verb} {name}")
    raise error


def reference(kind: str, path: Path) -> str:
    """Return the name by which `find_file` finds `path` from any folder, or the whole path."""
    path = path.resolve()
    return path.stem if path.parent == (RECIPES / kind).resolve() else str(path)
