"""The verb `compare`: the cells of a run beside another run's, or the published numbers."""

from __future__ import annotations

import argparse

from cookbook.base.errors import InputError
from cookbook.results.collect import collect_results
from cookbook.results.compare import (
    compare_runs,
    compare_with_published,
    comparison_json,
    comparison_markdown,
)
from cookbook.run.run import find_run
from cookbook.run.states import cell_states


def compare(arguments: argparse.Namespace) -> int:
    """Print the comparison; status 1 where a cell is slower than the tolerance allows."""
    if not 0 <= arguments.tolerance < 100:
        raise InputError("--tolerance", f"found {arguments.tolerance:g}, allowed: 0 to 100 percent")
    names = arguments.runs
    if len(names) != (1 if arguments.other else 2):
        raise InputError(
            f"compare {' '.join(names)}",
            f"names {len(names)} run{'s' if len(names) > 1 else ''}",
            "name one run with --with published, else two",
        )
    found = [find_run(name) for name in names]
    first, *others = [collect_results(run, cell_states(run)) for run in found]
    if arguments.other:
        comparison = compare_with_published(first, arguments.tolerance)
    else:
        comparison = compare_runs(first, others[0], arguments.tolerance)
    if not comparison.slower and all(row.speed is None for row in comparison.rows):
        reasons = [row.incomparable for row in comparison.rows if row.incomparable]
        nothing = "no cell is just what was published" if arguments.other else "no cell is in both"
        raise InputError(
            f"compare {' and '.join(run.name for run in found)}",
            f"there is nothing to compare: {reasons[0] if reasons else nothing}",
        )
    text = comparison_json(comparison) if arguments.json else comparison_markdown(comparison)
    print(text, end="")
    return 1 if comparison.slower else 0
