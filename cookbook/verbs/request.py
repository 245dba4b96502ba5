"""In: parsed arguments. Out: the cells that they ask for."""

from __future__ import annotations

import argparse

from cookbook.base.errors import named_at
from cookbook.cells.cell import Cell
from cookbook.cells.cluster import default_cluster, load_cluster
from cookbook.cells.recipe import load_recipe
from cookbook.cells.sweep import (
    CellRequest,
    Sweep,
    command_line_settings,
    expand_sweep,
    load_sweep,
    sweep_of_recipe,
)
from cookbook.stack.stack import load_stack


def cell_request(arguments: argparse.Namespace) -> CellRequest:
    """What the cell options of the command line say."""
    stack = load_stack()
    with named_at("--cluster" if arguments.cluster else "COOKBOOK_CLUSTER"):
        cluster = load_cluster(arguments.cluster or default_cluster(), stack)
    return CellRequest(
        cluster=cluster,
        stack=stack,
        precision=arguments.precision,
        ep_backend=arguments.ep_backend,
        nodes=arguments.nodes,
        overrides=command_line_settings(arguments.set, stack),
    )


def requested_cell(arguments: argparse.Namespace) -> Cell:
    """The one cell of a recipe."""
    request = cell_request(arguments)
    recipe = load_recipe(arguments.recipe, request.stack)
    (cell,) = expand_sweep(sweep_of_recipe(recipe, request.stack), request)
    return cell


def requested_sweep(arguments: argparse.Namespace) -> tuple[Sweep, list[Cell]]:
    """The sweep and its cells."""
    request = cell_request(arguments)
    sweep = load_sweep(arguments.sweep, request.stack)
    return sweep, expand_sweep(sweep, request)
