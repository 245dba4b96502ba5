"""Keeps the report of a run in its folder: report.md, report.html and figures/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cookbook.base.files import write_whole
from cookbook.results.conditions import Conditions, configuration, environment
from cookbook.results.figures.canvas import standalone
from cookbook.results.figures.draw import NAMES, Drawing, draw_figures
from cookbook.results.headlines import headlines
from cookbook.results.page import render_page
from cookbook.results.report import render_markdown
from cookbook.results.result import RunResults
from cookbook.results.table import Table
from cookbook.results.tables import measured_tables, published_table
from cookbook.run.run import Run

MARKDOWN, PAGE, FIGURES = "report.md", "report.html", "figures"
_NO_FIGURES = "no figures: the package {package} is not installed here; run: ./setup.sh"


def keep_report(run: Run, results: RunResults) -> str | None:
    """Write the files into the run's folder.

    Returns:
        why there are no figures, and what to do; None where there are.

    Raises:
        OSError: the folder cannot be written to.
    """
    missing, drawings = None, list[Drawing]()
    try:
        drawings = draw_figures(results)
    except ModuleNotFoundError as error:
        missing = _NO_FIGURES.format(package=error.name)
    conditions = {"Configuration": configuration(run), "Environment": environment(run)}
    # The figures first: what names them must not be there before they are.
    _write_figures(run.folder / FIGURES, drawings)
    write_whole(run.folder / MARKDOWN, _markdown(results, conditions, drawings, missing))
    page = render_page(results, conditions, drawings, missing)
    write_whole(run.folder / PAGE, page)
    return missing


def _write_figures(folder: Path, drawings: Sequence[Drawing]) -> None:
    if not drawings:
        return
    for drawing in drawings:
        write_whole(folder / f"{drawing.name}.svg", standalone(drawing.wide))
        write_whole(folder / f"{drawing.name}.png", drawing.png)
    # What an earlier report drew, and the logs no longer hold.
    for name in set(NAMES) - {drawing.name for drawing in drawings}:
        for suffix in ("svg", "png"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def _markdown(
    results: RunResults,
    conditions: Mapping[str, Conditions],
    drawings: Sequence[Drawing],
    missing: str | None,
) -> str:
    """What is printed, and below it what only a file has room for."""
    parts = [render_markdown(results).rstrip("\n")]
    if said := headlines(results):
        parts += ["## In short", "\n".join(f"- {line}" for line in said)]
    if (published := published_table(results)) is not None:
        parts += ["## Beside the published results", published.markdown()]
    if missing:
        parts += ["## Figures", missing]
    for drawing in drawings:
        parts += [
            f"## {drawing.title}",
            f"![{drawing.title}]({FIGURES}/{drawing.name}.svg)",
            drawing.caption,
        ]
    for title, table, legend in measured_tables(results):
        parts += [f"## {title}", table.markdown(), legend]
    for title, found in conditions.items():
        parts.append(f"## {title}")
        if found.differing is not None:
            parts += ["Where cells differ:", found.differing.markdown()]
        if found.shared:
            parts.append("What all cells share:")
            parts.append(Table(("", "value"), found.shared, "ll").markdown())
    return "\n\n".join(parts) + "\n"
