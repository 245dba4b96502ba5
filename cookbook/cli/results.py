"""The verb `report`: the results of a run, printed and kept in its folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cookbook.base.yamlfile import shown_path
from cookbook.results.collect import collect_results
from cookbook.results.report import render_markdown
from cookbook.results.result import render_json
from cookbook.run.run import Run, find_run
from cookbook.run.states import cell_states


def show_report(arguments: argparse.Namespace) -> int:
    """Print the results of a run."""
    print_report(find_run(arguments.run), arguments.format)
    return 0


def print_report(run: Run, form: str) -> dict[str, str]:
    """Print the results in `form`, keep them as files, and return the cells' states.

    Args:
        form: md, json, or html, which prints where the page is.
    """
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
        # A colleague's run, or a full disk: what was asked for has been printed.
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
