"""The report of a run: the answer in three sentences, conditions, notes; as Markdown and as a page.

The page needs nothing else: no network, no other file. Every text is escaped, and a value that the
template lacks is an error. The template lays out, and its script draws the charts.
"""

from __future__ import annotations

import html
import json
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import jinja2
from markupsafe import Markup

from cookbook.base.files import write_whole
from cookbook.base.paths import TEMPLATES
from cookbook.observe.metrics import StepMetrics
from cookbook.results.charts import COLOURS, NAMES, Chart, charts_of, draw_chart
from cookbook.results.columns import (
    CELLS,
    LEGENDS,
    TITLES,
    UNKNOWN,
    Table,
    gain_text,
    interval_text,
    report_tables,
    tokens_text,
)
from cookbook.results.result import Result, RunResults, masks_differ, unlike
from cookbook.results.run_differences import Conditions, configuration, environment
from cookbook.results.verdicts import CANNOT_TELL, DIFFERENT, EQUIVALENT, LEVEL, MARGIN, NOISE
from cookbook.run.run import Run
from cookbook.run.status import CANCELLED, FINISHED, REFUSED

# The model's worst error; a cell beyond it has a cause of its own.
_PREDICTION_MARGIN = 0.15
# A loss spike: over so many logged steps before it, by this part and by so many spreads.
_BEFORE, _SPIKE_PART, _SPIKE_SPREADS = 20, 0.1, 10


def render_markdown(results: RunResults) -> str:
    """Return the report as Markdown whose table also reads well in a terminal."""
    parts = [
        f"# {results.run.run}",
        bullets(headlines(results)),
        bullets(facts(results)),
        report_tables(results)[CELLS].markdown(),
        bullets(notes(results)),
        textwrap.fill(LEGENDS[CELLS].format(unit=results.unit), 80),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def partly_finished(results: RunResults) -> str | None:
    """Return the number of cells by state, where some have not ended; else None."""
    counts = Counter(cell.status or "of unknown status" for cell in results.cells)
    if not counts.keys() - {FINISHED, REFUSED}:
        return None
    done = f"{counts.pop(FINISHED, 0)} of {len(results.cells)} cells finished"
    rest = [f"{count} {state}" for state, count in counts.items()]
    return f"partly finished: {', '.join([done, *rest])}; their numbers are those so far"


def headlines(results: RunResults) -> list[str]:
    """Return the answer in at most three sentences: fastest cell, cells not compared, losses."""
    return [*_fastest(results), *_not_compared(results.cells), *_losses(results.cells)]


def _fastest(results: RunResults) -> Iterator[str]:
    groups: dict[str | None, list[Result]] = {}
    for cell in results.cells:
        if cell.speedup is not None:
            groups.setdefault(cell.baseline, []).append(cell)
    title = "fastest" if partly_finished(results) is None else "fastest so far"
    found = []
    for base, cells in groups.items():
        if len(cells) < 2:
            continue
        first, second, *_ = sorted(cells, key=lambda cell: cell.speedup or 0.0, reverse=True)
        if first.is_baseline:
            text = f"no cell is faster than the baseline {base}"
            is_close = second.speed is None or second.speed.verdict in (NOISE, None)
        else:
            interval = f"{LEVEL:.0%} interval {interval_text(first)}"
            if first.speed is None or first.speed.low is None:
                interval = "too few steps for an interval"
            elif first.speed.verdict == NOISE:
                interval += ", inside the noise"
            tokens = f"{tokens_text(first.tokens_per_second_per_gpu)} tokens/s/{results.unit}"
            gain = f"{gain_text(first.speedup)} over {base}"
            text = f"{title}: {first.name} at {tokens}, {gain} ({interval})"
            # An interval of the two fastest against one another would need their own comparison.
            low = first.speed.low if first.speed else None
            high = second.speed.high if second.speed else None
            is_close = low is not None and high is not None and low <= high
        if is_close:
            text += f"; {second.name} ({gain_text(second.speedup)}) may be as fast"
        found.append(text)
    if found:
        text = "; ".join(found)
        yield f"{text[0].upper()}{text[1:]}."


def _not_compared(cells: Sequence[Result]) -> Iterator[str]:
    by_name = {cell.name: cell for cell in cells}
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        base = by_name.get(cell.baseline or "")
        if cell.status != FINISHED or cell is base or cell.speedup is not None:
            continue
        where = f"its baseline {cell.baseline}"
        reason = f"{where} is not in this run"
        if base is not None and base.status != FINISHED:
            reason = f"{where} is {base.status or 'of unknown status'}"
        elif base is not None:
            reason = unlike(cell, base, f"in {where}") or "too few steps were measured"
        elif cell.baseline is None:
            continue
        reasons.setdefault(reason, []).append(cell.name)
    if reasons:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
        yield f"No speed-up for {'; '.join(parts)}."


def _losses(cells: Sequence[Result]) -> Iterator[str]:
    names: dict[str, list[str]] = {EQUIVALENT: [], DIFFERENT: [], CANNOT_TELL: []}
    for cell in cells:
        found = {one.verdict for one in (cell.loss, cell.loss_last_tenth) if one is not None}
        # The worse of the whole curve and its last tenth.
        if worst := next((one for one in (DIFFERENT, CANNOT_TELL, *found) if one in found), None):
            names[worst].append(cell.name)
    margin = {EQUIVALENT: f" within ±{MARGIN:.2%}"}
    parts = [f"{one}{margin.get(one, '')}: {', '.join(names[one])}" for one in names if names[one]]
    if parts:
        yield f"Loss against the baseline: {'; '.join(parts)}."


def facts(results: RunResults) -> list[str]:
    """Return the conditions of the run, and warnings."""
    run, cells = results.run, results.cells
    started = f", started {run.created}" if run.created else ""
    by = f" by {run.user}" if run.user else ""
    lines = [
        f"sweep: {run.sweep or UNKNOWN}{started}{by}",
        f"cluster: {run.cluster or UNKNOWN}, stack: {run.stack or UNKNOWN}, "
        f"commit: {run.commit or UNKNOWN}",
    ]
    if run.baseline:
        lines.append(f"baseline: {run.baseline}")
    if unfinished := partly_finished(results):
        lines.append(unfinished)
    lines += dict.fromkeys(
        f"stand-in: {cell.recipe or UNKNOWN} ran instead of {cell.stand_in_for}, which does not "
        f"fit here; the published numbers are {cell.stand_in_for}'s"
        for cell in cells
        if cell.stand_in_for
    )
    if "cpu" in {cell.device for cell in cells}:
        lines.append("device: cpu; throughput is a CPU's, says nothing about GPUs and has no MFU")
    if any(cell.emulated for cell in cells):
        lines.append("emulated: software in place of a kernel; the loss counts, the speed does not")
    return [*lines, *_routings(cells), *_attention(cells), *_self_check(cells)]


def _routings(cells: Sequence[Result]) -> Iterator[str]:
    """Yield the routing of the cells, and their names where it differs."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell.routing:
            found.setdefault(cell.routing, []).append(cell.name)
    if len(found) == 1:
        yield f"routing: {next(iter(found))}"
    elif found:
        parts = [f"{routing} in {', '.join(names)}" for routing, names in found.items()]
        yield f"routing: {'; '.join(parts)}"


def _attention(cells: Sequence[Result]) -> Iterator[str]:
    lengths = {cell.name: cell.mean_attended_length for cell in cells if cell.mean_attended_length}
    kinds = {cell.attention for cell in cells if cell.attention}
    shown = {f"{length:,.0f}" for length in lengths.values()}
    shared = [*kinds] if len(kinds) == 1 else []
    if len(shown) == 1:
        (seq_len, *others) = {_whole_sequence(cell) for cell in cells if cell.name in lengths}
        of = f", in whole sequences of {int(seq_len):,}" if seq_len and not others else ""
        shared.append(f"a token attends to {shown.pop()} tokens on average{of}")
    if shared:
        yield f"attention: {'; '.join(shared)}"
    by_length = sorted(
        (cell for cell in cells if cell.name in lengths), key=lambda c: lengths[c.name]
    )
    if by_length and masks_differ(by_length[0], by_length[-1]):
        least, most = by_length[0].name, by_length[-1].name
        yield (
            "WARNING: cells were trained on different masks: a token attends to "
            f"{lengths[most]:,.0f} tokens in {most} and to {lengths[least]:,.0f} in {least}; "
            "do not compare their speed"
        )


def _whole_sequence(cell: Result) -> str | None:
    """Return the length of the sequences where each token attends to all before it."""
    seq_len, mean = cell.asked.get("training.seq_len"), cell.mean_attended_length
    return seq_len if mean and seq_len == f"{2 * mean - 1:.0f}" else None


def _self_check(cells: Sequence[Result]) -> Iterator[str]:
    """Yield the largest error of kernels against their reference, and cells without the check."""
    checks = {
        c.name: c.active["self_check"] for c in cells if c.active and "self_check" in c.active
    }
    done = {name: check for name, check in checks.items() if check}
    if done:
        name, check = max(done.items(), key=lambda item: float(item[1]["worst"]))
        yield (
            "self-check: every kernel was compared with a reference before the first step; the "
            f"largest error is {check['worst']:.0%} of the error that its format allows "
            f"({check['worst_kernel']} in {name})"
        )
    if unchecked := [name for name in checks if name not in done]:
        yield f"self-check: switched off in {', '.join(unchecked)}"


def notes(results: RunResults) -> list[str]:
    """Return reasons, continued attempts, profiling, and cells that are slower than predicted."""
    lines = []
    for cell in results.cells:
        reason = " ".join((cell.reason or "").split())
        if cell.status == CANCELLED:
            # The signal by which a job is cancelled is no reason.
            reason = reason.removeprefix("SIGTERM").lstrip("; ")
        if reason:
            lines.append(f"{cell.name} ({cell.status or 'status unknown'}): {reason}")
    runs = [run for cell in results.cells for run in cell.runs]
    lines += [
        f"{run.name}: {line}" for run in runs for one in run.resumptions for line in one.lines
    ]
    lines += [f"{run.name}: {line}" for run in runs for line in run.history.lines]
    lines += [
        f"{cell.name}: profiled, which slows the host down; take its speed from a run without "
        "profiling.enable_profiling"
        for cell in results.cells
        if cell.profiled
    ]
    for run in runs:
        lines += [f"{run.name}: {line}" for line in _troubled_steps(run.curve)]
    for cell in results.cells:
        if cell.prediction:
            tokens = cell.tokens_per_second_per_gpu
            speed = f"{tokens_text(tokens)} tokens/s/{results.unit}" if tokens else "not measured"
            lines.append(f"{cell.name}: {speed}; {cell.prediction}")
        predicted = cell.predicted_tokens_per_second_per_gpu
        measured = cell.tokens_per_second_per_gpu
        if measured and predicted and measured < (1 - _PREDICTION_MARGIN) * predicted:
            lines.append(
                f"{cell.name}: {1 - measured / predicted:.0%} slower than predicted "
                f"({tokens_text(predicted)} tokens/s/{results.unit}; within "
                f"{_PREDICTION_MARGIN:.0%} is usual); look first at {cell.predicted_largest}: "
                "submit.py profile"
            )
    return lines


def _troubled_steps(curve: Sequence[StepMetrics]) -> Iterator[str]:
    """Name steps that were skipped, and loss spikes.

    A spike is a loss that lies above the median of the 20 logged steps before it by a tenth and by
    ten times the median distance of these steps from that median (docs/reference/statistics.md).
    """
    skipped = sum(
        max((one.skipped_steps or 0 for one in curve if one.attempt == attempt), default=0)
        for attempt in {one.attempt for one in curve}
    )
    if skipped:
        yield f"{skipped:.0f} steps were skipped, since their gradients were not finite"
    losses = [(one.step, one.loss) for one in curve if one.loss is not None]
    spikes = []
    for number in range(_BEFORE, len(losses)):
        before = [loss for _, loss in losses[number - _BEFORE : number]]
        middle = statistics.median(before)
        spread = statistics.median(abs(loss - middle) for loss in before)
        step, found = losses[number]
        if found > middle + max(_SPIKE_PART * middle, _SPIKE_SPREADS * spread):
            spikes.append(f"{found:.4g} at step {step} (before: {middle:.4g})")
    if spikes:
        more = f" and {len(spikes) - 3} more" if len(spikes) > 3 else ""
        yield f"the loss spikes: {', '.join(spikes[:3])}{more}"


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
