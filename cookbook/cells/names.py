"""The YAML files of `recipes/`, found by name: recipes, overlays, clusters and sweeps."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARACTERS - 1}}}")
_ALLOWED = f"letters, digits, '.', '-' and '_', at most {NAME_CHARACTERS}, a letter or digit first"


def check_name(place: str, name: str) -> str:
    """`name`, where cells, jobs and folders can be named after it."""
    if not _NAME.fullmatch(name):
        raise InputError(place, f"found {name!r}, allowed: {_ALLOWED}")
    return name


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
