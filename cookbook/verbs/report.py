"""The verb `report`: the results of a run, printed and kept in its folder."""

from __future__ import annotations

import argparse
import sys

from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.results.collect import collect_results
from cookbook.results.report import render_json, render_markdown
from cookbook.run.run import Run, find_run
from cookbook.run.states import cell_states


def show_report(arguments: argparse.Namespace) -> int:
    """Print the results of a run."""
    print_report(find_run(arguments.run), arguments.format)
    return 0


def print_report(run: Run, form: str) -> dict[str, str]:
    """Print the results in `form` (md or json), keep report.md, and return the cells' states."""
    states = cell_states(run)
    results = collect_results(run, states)
    text = render_markdown(results)
    print(render_json(results) if form == "json" else text, end="", flush=True)
    path = run.folder / "report.md"
    try:
        write_whole(path, text)
    except OSError as error:
        # A colleague's run, or a full disk: what was asked for has been printed.
        print(f"submit.py: not kept: {shown_path(path)}: {error.strerror}", file=sys.stderr)
    return {state.cell: state.state for state in states}
