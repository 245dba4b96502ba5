"""The results of runs: the verbs `report` and `compare`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import shown_path
from cookbook.results.collect import collect_results
from cookbook.results.compare import (
    compare_runs,
    compare_with_published,
    comparison_json,
    comparison_markdown,
)
from cookbook.results.report import render_markdown
from cookbook.results.result import render_json
from cookbook.run.run import Run, find_run
from cookbook.run.states import cell_states


def show_report(arguments: argparse.Namespace) -> int:
    """Print the results of a run."""
    print_report(find_run(arguments.run), arguments.format)
    return 0


def print_report(run: Run, form: str) -> dict[str, str]:
    """Print the results in `form`, keep them as files, and return the cells' states."""
    # Import lazily: `run --dry-run` and `status` must not wait for NumPy.
    from cookbook.results.save_report import FIGURES, MARKDOWN, PAGE, save_report

    states = cell_states(run)
    results = collect_results(run, states)
    # Before the figures, which take some seconds.
    if form != "html":
        text = render_json(results) if form == "json" else render_markdown(results)
        print(text, end="", flush=True)
    try:
        missing = save_report(run, results)
    except OSError as error:
        if form == "html":
            raise
        # A colleague's run, or a full disk; the results have been printed.
        path = Path(error.filename or run.folder / MARKDOWN)
        print(f"submit.py: not kept: {shown_path(path)}: {error.strerror}", file=sys.stderr)
    else:
        page = shown_path(run.folder / PAGE)
        if form == "html":
            print(page)
        elif form == "md":
            beside = MARKDOWN if missing else f"{MARKDOWN} and {FIGURES}/"
            print(f"\nAs a page: {page}, with {beside} beside it")
        if missing:
            print(f"submit.py: {missing}", file=sys.stderr)
    return {state.cell: state.state for state in states}


def compare(arguments: argparse.Namespace) -> int:
    """Print the comparison; status 1 if a cell is slower than the tolerance allows."""
    if not 0 <= arguments.tolerance < 100:
        raise InputError("--tolerance", f"found {arguments.tolerance:g}, allowed: 0 to 100 percent")
    names = arguments.runs
    if len(names) != (1 if arguments.other else 2) or "published" in names:
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
