"""The verb `compare`: cells of runs beside those of the first, or beside the published numbers."""

from __future__ import annotations

import argparse

from cookbook.base.errors import InputError
from cookbook.results.collect import collect_results
from cookbook.results.compare import compare_runs, compare_with_published
from cookbook.results.compare_report import comparison_json, comparison_markdown
from cookbook.run.run import find_run
from cookbook.run.states import cell_states


def compare(arguments: argparse.Namespace) -> int:
    """Print the comparison; status 1 where a cell is slower than the tolerance allows."""
    if not 0 <= arguments.tolerance < 100:
        raise InputError("--tolerance", f"found {arguments.tolerance:g}, allowed: 0 to 100 percent")
    if not arguments.other and len(arguments.runs) < 2:
        raise InputError(
            f"compare {arguments.runs[0]}",
            "names one run",
            "name another one, or: --with published",
        )
    found = [find_run(name) for name in arguments.runs]
    results = [collect_results(run, cell_states(run)) for run in found]
    compare_all = compare_with_published if arguments.other else compare_runs
    comparison = compare_all(results, arguments.tolerance)
    if not comparison.slower and all(cell.speed is None for cell in comparison.cells):
        names = " and ".join(run.name for run in found)
        reasons = [cell.reason for cell in comparison.cells if cell.reason]
        nothing = "no cell is just what was published" if arguments.other else "no cell is in both"
        why = reasons[0] if reasons else nothing
        raise InputError(f"compare {names}", f"there is nothing to compare: {why}")
    text = comparison_json(comparison) if arguments.json else comparison_markdown(comparison)
    print(text, end="")
    return 1 if comparison.slower else 0
