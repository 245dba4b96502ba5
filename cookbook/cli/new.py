"""The verb `new`: a copy of a YAML file, with its comments, to edit."""

from __future__ import annotations

import argparse
import re

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.paths import RECIPES
from cookbook.base.yamlfile import shown_path
from cookbook.config.names import KINDS, check_name, find_file, names_in

# What holds for the original alone: keys at the top of its file, with the comment above them.
_LEFT_OUT = {"": "published", "precision": "synonyms", "ep_backend": "synonyms"}
_TRY = {
    "": "run {name} --dry-run",
    "precision": "run debug --precision {name} --dry-run",
    "ep_backend": "run debug --ep-backend {name} --dry-run",
    "cluster": "sweep matrix --cluster {name} --dry-run",
    "sweep": "sweep {name} --dry-run",
}


def new(arguments: argparse.Namespace) -> int:
    """Copy a recipe, precision, EP backend, cluster or sweep under a new name."""
    kind = _kind(arguments)
    name = check_name("NAME", arguments.name)
    target = RECIPES / kind / f"{name}.yaml"
    if target.exists():
        raise InputError(shown_path(target), "exists already", "choose another name")
    text = find_file(kind, arguments.source).read_text(encoding="utf-8")
    if kind == "":
        # Cells are named after it; in quotes, since `1e5` and `true` are no texts to YAML.
        text = re.sub(r"(?m)^name:.*$", f'name: "{name}"', text, count=1)
    if kind in _LEFT_OUT:
        key = _LEFT_OUT[kind]
        text = re.sub(
            rf"(?m)^(?:#[^\n]*\n)*{key}:[^\n]*\n(?:[ \t]+[^\n]*\n|-[^\n]*\n)*", "", text, count=1
        )
    write_whole(target, text)
    print(f"wrote {shown_path(target)}; edit it, then:")
    print(f"  python submit.py {_TRY[kind].format(name=name)}")
    return 0


def _kind(arguments: argparse.Namespace) -> str:
    """The kind that is asked for, else the one kind that has a file of the source's name."""
    if arguments.kind is not None:
        kind: str = arguments.kind
        return "" if kind == "recipe" else kind.replace("-", "_")
    found = [kind for kind in KINDS if arguments.source in names_in(kind)]
    if len(found) == 1:
        return found[0]
    if not found:
        # Says what recipes there are; the other kinds are named in --help.
        find_file("", arguments.source)
    kinds = ", ".join(KINDS[kind] for kind in found)
    raise InputError(
        "--from",
        f"{arguments.source!r} is the name of several files ({kinds})",
        "say which: --kind recipe, precision, ep-backend, cluster or sweep",
    )
