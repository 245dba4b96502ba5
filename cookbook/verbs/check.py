"""In: parsed arguments that name a recipe or a sweep. Out: what was found about each cell, and a
status.
"""

from __future__ import annotations

import argparse

from cookbook.check.cells import check_cells
from cookbook.check.report import render_json, render_text
from cookbook.errors import unknown_name
from cookbook.recipe import names_in
from cookbook.sweep import is_sweep
from cookbook.verbs.request import requested_cell, requested_sweep


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
    print(render_json(checks) if arguments.json else render_text(name, checks), end="")
    return 0 if all(one.may_run for one in checks) else 1
