"""From the command line to cells, and to the files that it names."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cookbook.base.errors import InputError, named_at
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.config.cluster import default_cluster, load_cluster
from cookbook.config.options import Settings, command_line_settings
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import merge_config
from cookbook.config.sweep import (
    CellRequest,
    Sweep,
    expand_sweep,
    load_sweep,
    requested_pair,
    sweep_of_recipe,
)


def requested_cell(arguments: argparse.Namespace, settings: Settings | None = None) -> Cell:
    """Return the one cell of a recipe; the user's settings override `settings`."""
    request = _request(arguments)
    request = replace(request, overrides={**(settings or {}), **request.overrides})
    (cell,) = expand_sweep(sweep_of_recipe(arguments.recipe), request)
    return cell


def merged_cell(arguments: argparse.Namespace) -> Cell:
    """Return the one cell of a recipe unjudged: its layout may not fit the cluster."""
    request = _request(arguments)
    recipe = load_recipe(arguments.recipe)
    return merge_config(
        recipe,
        *requested_pair(recipe, request),
        request.cluster,
        nodes=request.nodes,
        layers=({}, {}, request.overrides),
    )


def requested_sweep(arguments: argparse.Namespace) -> tuple[Sweep, list[Cell]]:
    """Return the sweep and its cells."""
    sweep = load_sweep(arguments.sweep)
    return sweep, expand_sweep(sweep, _request(arguments))


def _request(arguments: argparse.Namespace) -> CellRequest:
    with named_at("--cluster" if arguments.cluster else "COOKBOOK_CLUSTER"):
        cluster = load_cluster(arguments.cluster or default_cluster())
    return CellRequest(
        cluster=cluster,
        precision=arguments.precision,
        ep_backend=arguments.ep_backend,
        nodes=arguments.nodes,
        overrides=command_line_settings(arguments.set),
    )


def check_figure(name: str) -> None:
    """Refuse, before the work, a figure that could not be written after it."""
    if not name.endswith(".svg"):
        raise InputError("--figure", f"found {name!r}, allowed: a file that ends with .svg")
    if not Path(name).absolute().parent.is_dir():
        raise InputError("--figure", f"{shown_path(Path(name).parent)} is no folder")


def write_output(option: str, name: str, content: str | bytes, mode: int = 0o644) -> None:
    """Write to the file that `option` names, whole; a device or a pipe is written in place."""
    path = Path(name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            # A symbolic link stays one.
            write_whole(path.resolve(), content, mode)
    except OSError as error:
        raise InputError(f"{option} {name}", f"cannot be written: {error.strerror}") from None
