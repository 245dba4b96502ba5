"""Write the report of a run, or of many, as a page: one HTML file that loads nothing."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cookbook.base.files import write_whole
from cookbook.base.paths import TEMPLATES
from cookbook.results.charts import COLOURS, Chart, chart_data, charts_of
from cookbook.results.columns import CELLS, Table, report_tables
from cookbook.results.recorded import UNKNOWN, asked_facts, asked_value, seen_facts
from cookbook.results.result import RunResults
from cookbook.results.summary import facts, headlines, notes, render_markdown
from cookbook.run.run import Run, RunRecord

MARKDOWN, PAGE = "report.md", "report.html"


@dataclass(frozen=True)
class Conditions:
    """Facts of a run's cells: those that all cells share, and a table of those that differ."""

    shared: Sequence[tuple[str, str]]  # name and value of each fact
    differing: Table | None
    is_known: bool = True


def configuration(results: RunResults) -> Conditions:
    """Return the recipe, layout and options requested for each cell's newest attempt."""
    asked = {cell.name: asked_facts(cell.record) for cell in results.cells}
    names = dict.fromkeys(name for own in asked.values() for name in own)
    cells = {
        cell: {name: asked_value(own, name) for name in names} if own else {}
        for cell, own in asked.items()
    }
    return _conditions("option", cells)


def environment(results: RunResults) -> Conditions:
    """Return versions, GPUs, driver and nodes of the cells that have reached their first step."""
    active = {cell.name: cell.measured.environment for cell in results.cells}
    found = _conditions("fact", {name: seen_facts(one) for name, one in active.items() if one})
    if commit := results.run.commit:
        found = replace(found, shared=(("commit of the cookbook", commit), *found.shared))
    return found


def _conditions(title: str, cells: Mapping[str, Mapping[str, str]]) -> Conditions:
    names = dict.fromkeys(name for facts in cells.values() for name in facts)
    rows: list[tuple[str, ...]] = [
        (name, *(facts.get(name, UNKNOWN) for facts in cells.values())) for name in names
    ]
    shared = [(row[0], row[1]) for row in rows if len({*row[1:]}) == 1 and row[1] != UNKNOWN]
    differing = [row for row in rows if len({*row[1:]}) > 1]
    table = Table((title, *cells), differing, "l" * (1 + len(cells))) if differing else None
    return Conditions(shared, table, any(cells.values()))


def save_report(run: Run, results: RunResults) -> None:
    """Write report.md and report.html into the run's folder; may raise OSError."""
    parts = [render_markdown(results).rstrip("\n")]
    tables = report_tables(results)
    for name, table in tables.items():
        if name != CELLS:
            parts += [f"## {table.title}", table.markdown(), table.legend]
    conditions = {"Configuration": configuration(results), "Environment": environment(results)}
    for title, found in conditions.items():
        parts.append(f"## {title}")
        if found.differing is not None:
            parts += ["Where cells differ:", found.differing.markdown()]
        if found.shared:
            parts += ["What all cells share:", Table(("", "value"), found.shared, "ll").markdown()]
    write_whole(run.folder / MARKDOWN, "\n\n".join(filter(None, parts)) + "\n")
    known = facts(results)
    alerts = [fact for fact in known if fact.startswith(("WARNING: ", "partly finished: "))]
    sources = {cell.record.published_source for cell in results.cells} - {None}
    page = _render_page(
        results,
        charts_of(results),
        tables,
        files=_files(run, run.folder),
        alerts=alerts,
        headlines=headlines(results),
        notes=notes(results),
        facts=[fact for fact in known if fact not in alerts],
        source=sources.pop() if len(sources) == 1 else None,
        conditions=conditions,
    )
    write_whole(run.folder / PAGE, page)


def save_all(runs: Mapping[Run, RunResults], folder: Path) -> Path:
    """Write one page over many runs into `folder`, the newest run first; return its path."""
    cells, files = [], dict[str, Mapping[str, str]]()
    for run, results in runs.items():
        for cell in results.cells:
            record = replace(cell.record, name=f"{run.name}/{cell.name}")
            cells.append(replace(cell, record=record))
        files |= {f"{run.name}/{name}": of for name, of in _files(run, folder).items()}
    names = tuple(cell.name for cell in cells)
    every = RunResults(RunRecord("local", names, f"All {len(runs)} runs"), tuple(cells))
    tables = {CELLS: report_tables(every)[CELLS]}
    path, charts = folder / PAGE, charts_of(every)
    write_whole(path, _render_page(every, [one for one in charts if one.lines], tables, files))
    return path


def _files(run: Run, folder: Path) -> dict[str, Mapping[str, str]]:
    """Return links, relative to `folder`, to each cell's files that exist, by title."""
    found = dict[str, Mapping[str, str]]()
    for cell in run.cells:
        paths = {"log": cell.newest_log(), "recipe": cell.record, "script": cell.script}
        found[cell.name] = {
            title: path.relative_to(folder).as_posix()
            for title, path in paths.items()
            if path is not None and path.exists()
        }
    return found


def _render_page(
    results: RunResults,
    charts: Sequence[Chart],
    tables: Mapping[str, Table],
    files: Mapping[str, Mapping[str, str]],
    **parts: Any,
) -> str:
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Names such as `model.flash_attention` may wrap after punctuation.
    jinja.filters["breakable"] = lambda text: Markup(
        re.sub(r"([._/-])", r"\1<wbr>", html.escape(text, quote=True))
    )
    # Indents and comments of the script and the style sheet are a tenth of a page.
    jinja.filters["lean"] = lambda text: re.sub(r"(?m)^\s*(//.*|/\*.*\*/)\n|^\s+", "", text)
    empty: dict[str, Any] = dict.fromkeys(("alerts", "headlines", "notes", "facts"), ())
    return jinja.get_template("report.html.j2").render(
        **empty | {"source": None, "conditions": {}} | parts,
        run=results.run.run,
        command=" ".join(results.run.command),
        charts=charts,
        # Escape `<`: `</script>` in a text would close the script element that holds the JSON.
        chart_data=Markup(chart_data(results, charts).replace("<", "\\u003c")),
        tables=tables,
        files=files,
        colours={cell.name: number % len(COLOURS) for number, cell in enumerate(results.cells)},
        cell_colours=COLOURS,
    )
