"""The verbs `list`, `show` and `render`: what there is; nothing is submitted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.tables import text_table
from cookbook.cli.request import requested_cell
from cookbook.config.cluster import default_cluster, load_cluster
from cookbook.config.names import names_in
from cookbook.config.overlay import Kind, load_overlay
from cookbook.config.recipe import load_recipe
from cookbook.config.sweep import load_sweep
from cookbook.launch.render import render_script
from cookbook.run.record import shown_with_places


def list_all(arguments: argparse.Namespace) -> int:
    """Print every recipe, precision, EP backend, cluster and sweep, a line each."""
    problems: list[str] = []

    def described(kind: str, describe: Callable[[str], str]) -> Iterator[tuple[str, str]]:
        for name in names_in(kind):
            try:
                yield name, describe(name)
            except InputError as error:
                # One file that cannot be read must not hide the others.
                problems.append(str(error))

    parts = {
        "recipes": dict(described("", lambda name: load_recipe(name).description)),
        "precisions": dict(described("precision", lambda name: _overlay("precision", name))),
        "EP backends": dict(described("ep_backend", lambda name: _overlay("ep_backend", name))),
        "clusters": dict(described("cluster", _cluster)),
        "sweeps": dict(described("sweep", lambda name: load_sweep(name).description)),
    }
    # One table, so that the descriptions of all kinds begin in one column.
    rows = [row for names in parts.values() for row in names.items()]
    lines = iter(text_table(rows, indent=2).splitlines() if rows else ())
    for title, names in parts.items():
        print(f"{title}:")
        for _ in names:
            print(next(lines))
    # A file that several others build on is named once.
    for problem in dict.fromkeys(problems):
        print(f"submit.py: left out: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _overlay(kind: Kind, name: str) -> str:
    overlay = load_overlay(kind, name)
    also = f" (also: {', '.join(overlay.synonyms)})" if overlay.synonyms else ""
    return overlay.description + also


def _cluster(name: str) -> str:
    here = " (default here)" if name == default_cluster() else ""
    return load_cluster(name).description + here


def show_cell(arguments: argparse.Namespace) -> int:
    """Print the resolved cell as YAML."""
    cell = requested_cell(arguments)
    record = cell.record()
    if arguments.origins:
        places = {name: setting.origin for name, setting in cell.options.settings.items()}
        record = shown_with_places(record, places)
    print(record.as_yaml(), end="")
    return 0


def render_cell(arguments: argparse.Namespace) -> int:
    """Print the cell's script, or write it."""
    cell = requested_cell(arguments)
    if arguments.output in (None, "-"):
        print(render_script(cell), end="")
        return 0
    path = Path(arguments.output)
    text = render_script(cell, file_name=path.name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # A device or a pipe is written to; a file beside it would take its place.
            path.write_text(text, encoding="utf-8")
        else:
            # A symbolic link stays one.
            write_whole(path.resolve(), text, mode=0o755)
    except OSError as error:
        place = f"--output {arguments.output}"
        raise InputError(place, f"cannot be written: {error.strerror}") from None
    return 0
