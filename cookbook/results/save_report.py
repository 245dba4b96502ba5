"""Write the report of a run into its folder: report.md, report.html and figures/.

The page needs nothing else: no network, no other file. Every text is escaped, and a value that the
template lacks is an error. The template lays out, and its script draws the charts.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict

import jinja2
from markupsafe import Markup

from cookbook.base.files import write_whole
from cookbook.base.paths import TEMPLATES
from cookbook.results.charts import COLOURS, NAMES, Chart, charts_of, draw_chart
from cookbook.results.columns import CELLS, LEGENDS, TITLES, Table, report_tables
from cookbook.results.report import facts, headlines, notes, partly_finished, render_markdown
from cookbook.results.result import RunResults
from cookbook.results.run_differences import Conditions, configuration, environment
from cookbook.run.run import Run

MARKDOWN, PAGE, FIGURES = "report.md", "report.html", "figures"
_NO_FIGURES = "no figures: the package {package} is not installed here; run: ./setup.sh"


def save_report(run: Run, results: RunResults) -> str | None:
    """Write report.md, report.html and figures/ into the run's folder.

    Returns:
        why there are no figure files, with the remedy; None where there are.

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
    write_whole(run.folder / MARKDOWN, _render_file(results, charts, missing))
    write_whole(run.folder / PAGE, render_page(results))
    return missing


def _render_file(results: RunResults, charts: Sequence[Chart], missing: str | None) -> str:
    """Return the printed report, and below it all that only a file has room for."""
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
    for title, found in _conditions(results).items():
        parts.append(f"## {title}")
        if found.differing is not None:
            parts += ["Where cells differ:", found.differing.markdown()]
        if found.shared:
            shared = Table(("", "value"), found.shared, "ll").markdown()
            parts += ["What all cells share:", shared]
    return "\n\n".join(parts) + "\n"


def _conditions(results: RunResults) -> dict[str, Conditions]:
    return {"Configuration": configuration(results), "Environment": environment(results)}


def render_page(results: RunResults) -> str:
    """Return the report as one HTML page."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A name such as `model.flash_attention` may wrap after a dot or the like.
    jinja.filters["breakable"] = lambda text: Markup(
        re.sub(r"([._/-])", r"\1<wbr>", html.escape(text, quote=True))
    )
    unfinished, facts_ = partly_finished(results), facts(results)
    warnings = [fact for fact in facts_ if fact.startswith("WARNING: ")]
    tables, charts = report_tables(results), charts_of(results)
    sources = {cell.published_source for cell in results.cells} - {None}
    numbers = json.dumps([asdict(chart) for chart in charts])
    return jinja.get_template("report.html.j2").render(
        run=results.run.run,
        alerts=[text for text in (unfinished, *warnings) if text],
        headlines=headlines(results),
        cells=tables.pop(CELLS),
        cells_legend=LEGENDS[CELLS].format(unit=results.unit),
        notes=notes(results),
        facts=[fact for fact in facts_ if fact not in (*warnings, unfinished)],
        charts=charts,
        # In a script element only `<` could end it.
        chart_data=Markup(numbers.replace("<", "\\u003c")),
        tables=[
            (name, TITLES[name], table, LEGENDS[name].format(unit=results.unit))
            for name, table in tables.items()
        ],
        source=sources.pop() if len(sources) == 1 else None,
        conditions=_conditions(results),
        colours={cell.name: number % len(COLOURS) for number, cell in enumerate(results.cells)},
        cell_colours=COLOURS,
    )
