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
    """Print the findings; 0 if every cell may run, else 1."""
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


def judged_cells(cells: Sequence[Cell], arguments: argparse.Namespace) -> tuple[list[Cell], str]:
    """Return the cells with the reason of refused ones, and a line on the parts that were checked.

    Warnings go to stderr. Only cells that would wait in a queue are built: a dry run answers at
    once, and a job on this machine shows at once what TorchTitan refuses.

    Args:
        arguments: with `dry_run` and `no_check`.
    """
    cluster, is_checked = cells[0].cluster, not arguments.no_check
    gpus = sum(cell.world for cell in cells if cell.cluster.gpu and not cell.refused)
    build = is_checked and not arguments.dry_run and gpus > 0 and cluster.scheduler == "slurm"
    if build:
        print(
            f"checking {len(cells)} cell(s) before {gpus} GPUs are asked for "
            "(--no-check skips this) ...",
            file=sys.stderr,
            flush=True,
        )
    checks = check_cells(cells, build=build, is_submitted=not arguments.dry_run)
    findings = [finding for one in checks for finding in one.findings if is_checked]
    for text in dict.fromkeys(str(one) for one in findings if one.level == WARNING):
        print(f"warning: {text}", file=sys.stderr)
    judged = [replace(one.cell, refused=one.judged.refused) for one in checks]
    seen = [one.judged for one in checks if not one.judged.rules] or [checks[0].judged]
    return judged, seen[0].parts
