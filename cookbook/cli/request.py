"""From the command line to cells, and to the files that it names."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cookbook.base.errors import InputError, named_at
from cookbook.base.files import write_whole
from cookbook.config.cell import Cell
from cookbook.config.cluster import default_cluster, load_cluster
from cookbook.config.expand import CellRequest, command_line_settings, expand_sweep
from cookbook.config.options import Settings
from cookbook.config.overlay import load_ep_backend, load_precision
from cookbook.config.resolve import merge_config
from cookbook.config.sweep import Sweep, load_sweep, sweep_of_recipe


def requested_cell(arguments: argparse.Namespace, settings: Settings | None = None) -> Cell:
    """Return the one cell of a recipe; the user's settings override `settings`."""
    request = _request(arguments)
    request = replace(request, overrides={**(settings or {}), **request.overrides})
    (cell,) = expand_sweep(sweep_of_recipe(arguments.recipe), request)
    return cell


def merged_cell(arguments: argparse.Namespace) -> Cell:
    """Return the one cell of a recipe unjudged: its layout may not fit the cluster."""
    request = _request(arguments)
    sweep = sweep_of_recipe(arguments.recipe)
    precision, ep_backend = sweep.pairs[0]
    if request.precision is not None:
        with named_at("--precision"):
            precision = load_precision(request.precision, request.cluster.gpu)
    if request.ep_backend is not None:
        with named_at("--ep-backend"):
            ep_backend = load_ep_backend(request.ep_backend)
    return merge_config(
        sweep.recipes[0],
        precision,
        ep_backend,
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


def write_output(option: str, name: str, content: str | bytes, mode: int = 0o644) -> None:
    """Write to the file that `option` names, whole; a device or a pipe is written in place.

    Raises:
        InputError: it cannot be written.
    """
    path = Path(name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            # A symbolic link stays one.
            write_whole(path.resolve(), content, mode)
    except OSError as error:
        raise InputError(f"{option} {name}", f"cannot be written: {error.strerror}") from None
