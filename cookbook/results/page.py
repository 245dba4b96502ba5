"""The report as one HTML page that needs nothing else: no network, no script to be read.

Of the rooms that render, this one alone makes HTML: every text is escaped, and what is not given
to the template is an error. Decisions are taken here, the template lays out.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Mapping, Sequence

import jinja2
from markupsafe import Markup

from cookbook.base.paths import TEMPLATES
from cookbook.results.conditions import Conditions
from cookbook.results.figures import theme
from cookbook.results.figures.canvas import style_sheet
from cookbook.results.figures.draw import Drawing
from cookbook.results.headlines import headlines, partly_finished
from cookbook.results.report import LEGEND, facts, notes, summary_table
from cookbook.results.result import RunResults
from cookbook.results.tables import measured_tables, published_table


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["slug"] = lambda title: title.lower().replace(" ", "-")
    return environment


def _breakable(text: str) -> Markup:
    """A name such as `model.flash_attention` that may go on in the next line after a dot or so."""
    return Markup(re.sub(r"([._/-])", r"\1<wbr>", html.escape(text, quote=True)))


def render_page(
    results: RunResults,
    conditions: Mapping[str, Conditions],
    drawings: Sequence[Drawing],
    figures_missing: str | None = None,
) -> str:
    """The page.

    Args:
        conditions: by the heading that they stand under.
        figures_missing: why there are no figures, and what to do.
    """
    unfinished = partly_finished(results)
    warnings = [fact for fact in facts(results) if fact.startswith("WARNING: ")]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=results.run.run,
            facts=[fact for fact in facts(results) if fact not in (*warnings, unfinished)],
            alerts=[text for text in (unfinished, *warnings, figures_missing) if text],
            headlines=headlines(results),
            published=published_table(results),
            source=_source(results),
            summary=summary_table(results),
            notes=notes(results),
            legend=LEGEND,
            measured=measured_tables(results),
            figures=[_figure(drawing) for drawing in drawings],
            conditions=conditions,
            colours={
                cell.name: number % len(theme.CELLS) for number, cell in enumerate(results.cells)
            },
            cell_colours=theme.CELLS,
            theme=theme,
            figure_style=Markup(style_sheet()),
        )
    )


def _figure(drawing: Drawing) -> dict[str, object]:
    return {
        "name": drawing.name,
        "title": drawing.title,
        "caption": drawing.caption,
        "pictures": {
            "wide": _picture(drawing.wide, drawing.title),
            "narrow": _picture(drawing.narrow, drawing.title),
        },
    }


def _picture(svg: str, title: str) -> Markup:
    # Our own SVG; what it holds of the run was escaped when it was drawn.
    said = html.escape(title, quote=True)
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{said}" ', 1))


def _source(results: RunResults) -> str | None:
    sources = {setting.published_source for setting in results.settings.values()} - {None}
    return sources.pop() if len(sources) == 1 else None
