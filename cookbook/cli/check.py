"""The verb `check`, and the check that `run` and `sweep` make before they submit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from cookbook.base.errors import unknown_name
from cookbook.base.tables import terminal_width
from cookbook.check.check import check_cells
from cookbook.check.report import render_json, render_text
from cookbook.cli.request import requested_cell, requested_sweep
from cookbook.config.cell import Cell
from cookbook.config.finding import WARNING
from cookbook.config.names import names_in
from cookbook.config.sweep import is_sweep


def check(arguments: argparse.Namespace) -> int:
    """Print the findings; 0 where every cell may run, else 1."""
    if is_sweep(arguments.recipe):
        arguments.sweep = arguments.recipe
        sweep, cells = requested_sweep(arguments)
        name = sweep.name
    elif "." not in arguments.recipe and arguments.recipe not in names_in(""):
        known = [*names_in(""), *names_in("sweep")]
        raise unknown_name("check", "recipe or sweep", arguments.recipe, known)
    else:
        cell = requested_cell(arguments)
        name, cells = cell.recipe.short_name, [cell]
    checks = check_cells(cells, build=not arguments.rules_only)
    if arguments.json:
        print(render_json(checks), end="")
    else:
        print(render_text(name, checks, terminal_width()), end="")
    return 0 if all(one.may_run for one in checks) else 1


def refuse_by_check(cells: Sequence[Cell], build: bool) -> list[Cell]:
    """The cells, those that may not run marked as refused; what else was found goes to stderr.

    Without `build`, by the rules alone: a job on this machine says itself, and at once, what
    TorchTitan does not like, and nobody waits for it in a queue.
    """
    candidates = [cell for cell in cells if not cell.refused]
    gpus = sum(cell.world for cell in candidates if cell.cluster.gpu)
    build = build and gpus > 0 and candidates[0].cluster.scheduler == "slurm"
    if build:
        print(
            f"checking {len(candidates)} cell(s) before {gpus} GPUs are asked for "
            "(--no-check skips this) ...",
            file=sys.stderr,
            flush=True,
        )
    checks = {one.cell.name: one for one in check_cells(candidates, build=build)}
    warnings = {
        str(finding): None
        for one in checks.values()
        for finding in one.findings
        if finding.level == WARNING
    }
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)
    return [
        replace(cell, refused=checks[cell.name].summary)
        if cell.name in checks and not checks[cell.name].may_run
        else cell
        for cell in cells
    ]
