"""Writes the report of a run into its folder: report.md, report.html and figures/."""

from __future__ import annotations

from collections.abc import Sequence

from cookbook.base.files import write_whole
from cookbook.results.charts import NAMES, Chart, charts_of
from cookbook.results.columns import CELLS, LEGENDS, TITLES, Table, report_tables
from cookbook.results.draw import draw_chart
from cookbook.results.page import render_page
from cookbook.results.report import render_markdown
from cookbook.results.result import RunResults
from cookbook.results.run_differences import configuration, environment
from cookbook.run.run import Run

MARKDOWN, PAGE, FIGURES = "report.md", "report.html", "figures"
_NO_FIGURES = "no figures: the package {package} is not installed here; run: ./setup.sh"


def save_report(run: Run, results: RunResults) -> str | None:
    """Write report.md, report.html and figures/ into the run's folder.

    Returns:
        why there are no figure files, and what to do; None where there are.

    Raises:
        OSError: the folder cannot be written to.
    """
    missing, charts = None, charts_of(results)
    folder = run.folder / FIGURES
    try:
        for chart in charts:
            for suffix, content in draw_chart(chart).items():
                write_whole(folder / f"{chart.name}.{suffix}", content)
    except ModuleNotFoundError as error:
        missing, charts = _NO_FIGURES.format(package=error.name), []
    # Figures of an earlier report, for which the logs no longer hold the numbers.
    for name in {*NAMES} - {chart.name for chart in charts} if not missing else ():
        for suffix in ("svg", "png"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    write_whole(run.folder / MARKDOWN, _file(results, charts, missing))
    write_whole(run.folder / PAGE, render_page(results))
    return missing


def _file(results: RunResults, charts: Sequence[Chart], missing: str | None) -> str:
    """The printed report, and below it all that only a file has room for."""
    parts = [render_markdown(results).rstrip("\n")]
    if missing:
        parts += ["## Figures", missing]
    for chart in charts:
        picture = f"![{chart.title}]({FIGURES}/{chart.name}.svg)"
        parts += [f"## {chart.title}", picture, chart.caption]
    for name, table in report_tables(results).items():
        if name != CELLS:
            parts += [f"## {TITLES[name]}", table.markdown()]
            parts += [LEGENDS[name].format(unit=results.unit)] if LEGENDS[name] else []
    for title, found in (
        ("Configuration", configuration(results)),
        ("Environment", environment(results)),
    ):
        parts.append(f"## {title}")
        if found.differing is not None:
            parts += ["Where cells differ:", found.differing.markdown()]
        if found.shared:
            shared = Table(("", "value"), found.shared, "ll").markdown()
            parts += ["What all cells share:", shared]
    return "\n\n".join(parts) + "\n"
