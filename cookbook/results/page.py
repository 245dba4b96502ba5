"""The report as one HTML page that needs nothing else: no network, no other file.

Every text is escaped, and a value that the template lacks is an error. Decisions are taken here,
the template lays out, and its script draws the charts.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict

import jinja2
from markupsafe import Markup

from cookbook.base.paths import TEMPLATES
from cookbook.results.charts import COLOURS, charts_of
from cookbook.results.columns import CELLS, LEGENDS, TITLES, report_tables
from cookbook.results.report import facts, headlines, notes, partly_finished
from cookbook.results.result import RunResults
from cookbook.results.run_differences import configuration, environment


def _breakable(text: str) -> Markup:
    """A name such as `model.flash_attention`, which may wrap after a dot or the like."""
    return Markup(re.sub(r"([._/-])", r"\1<wbr>", html.escape(text, quote=True)))


def render_page(results: RunResults) -> str:
    """The page."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["breakable"] = _breakable
    unfinished = partly_finished(results)
    conditions = facts(results)
    warnings = [fact for fact in conditions if fact.startswith("WARNING: ")]
    tables = report_tables(results)
    charts = charts_of(results)
    sources = {setting.published_source for setting in results.settings.values()} - {None}
    numbers = json.dumps([asdict(chart) for chart in charts])
    return jinja.get_template("report.html.j2").render(
        run=results.run.run,
        alerts=[text for text in (unfinished, *warnings) if text],
        headlines=headlines(results),
        cells=tables.pop(CELLS),
        cells_legend=LEGENDS[CELLS].format(unit=results.unit),
        notes=notes(results),
        facts=[fact for fact in conditions if fact not in (*warnings, unfinished)],
        charts=charts,
        # In a script element only `<` could end it.
        chart_data=Markup(numbers.replace("<", "\\u003c")),
        tables=[
            (name, TITLES[name], table, LEGENDS[name].format(unit=results.unit))
            for name, table in tables.items()
        ],
        source=sources.pop() if len(sources) == 1 else None,
        conditions={"Configuration": configuration(results), "Environment": environment(results)},
        colours={cell.name: number % len(COLOURS) for number, cell in enumerate(results.cells)},
        cell_colours=COLOURS,
    )
