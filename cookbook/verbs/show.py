"""In: parsed arguments. Out: what the cookbook holds and would do, printed; none is submitted."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.paths import RECIPES
from cookbook.cells.cluster import default_cluster, load_cluster
from cookbook.cells.recipe import load_overlay, load_recipe, names_in
from cookbook.cells.sweep import load_sweep
from cookbook.script.render import render_script
from cookbook.stack.stack import load_stack
from cookbook.verbs.request import requested_cell


def list_all(arguments: argparse.Namespace) -> int:
    """Print every recipe, precision, EP backend, cluster and sweep, a line each."""
    stack = load_stack()
    default = default_cluster()
    parts = {
        "recipes": {name: load_recipe(name, stack).description for name in names_in("")},
        "precisions": {name: _with_synonyms("precision", name) for name in names_in("precision")},
        "EP backends": {
            name: _with_synonyms("ep_backend", name) for name in names_in("ep_backend")
        },
        "clusters": {
            name: load_cluster(name, stack).description
            + (" (default here)" if name == default else "")
            for name in names_in("cluster")
        },
        "sweeps": {name: load_sweep(name, stack).description for name in names_in("sweep")},
    }
    width = max(len(name) for names in parts.values() for name in names)
    for title, names in parts.items():
        print(f"{title}:")
        for name, description in names.items():
            print(f"  {name:<{width}}  {description}")
    return 0


def _with_synonyms(kind: str, name: str) -> str:
    overlay = load_overlay(kind, name, load_stack())
    also = f" (also: {', '.join(overlay.synonyms)})" if overlay.synonyms else ""
    return overlay.description + also


def show_cell(arguments: argparse.Namespace) -> int:
    """Print the resolved cell as YAML."""
    print(requested_cell(arguments).as_yaml(arguments.origins), end="")
    return 0


def render_cell(arguments: argparse.Namespace) -> int:
    """Print the cell's script, or write it."""
    cell = requested_cell(arguments)
    if arguments.output is None:
        print(render_script(cell), end="")
    else:
        text = render_script(cell, file_name=Path(arguments.output).name)
        try:
            write_whole(Path(arguments.output), text, mode=0o755)
        except OSError as error:
            raise InputError(
                f"--output {arguments.output}", f"cannot be written: {error.strerror}"
            ) from None
    return 0


def new_recipe(arguments: argparse.Namespace) -> int:
    """Copy a recipe under a new name, with its comments; only its `name:` is changed."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", arguments.name):
        raise InputError("NAME", f"found {arguments.name!r}, allowed: letters, digits, '-' and '_'")
    target = RECIPES / f"{arguments.name}.yaml"
    if target.exists():
        raise InputError(str(target), "exists already", "choose another name")
    recipe = load_recipe(arguments.source, load_stack())
    text = recipe.path.read_text(encoding="utf-8")
    # Cells are named after it: two recipes of one short name would be taken for one another.
    text = re.sub(r"(?m)^name:.*$", f"name: {arguments.name}", text, count=1)
    # What was published holds for the original alone.
    text = re.sub(r"(?m)^(?:#[^\n]*\n)*published:\n(?:[ \t]+[^\n]*\n)+", "", text, count=1)
    write_whole(target, text)
    print(f"wrote {target.relative_to(RECIPES.parent)}; edit it, then:")
    print(f"  python submit.py run {arguments.name} --dry-run")
    return 0
