"""The report of a run: the answer in three sentences, facts, notes, and Markdown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from cookbook.results.columns import (
    CELLS,
    LEGENDS,
    UNKNOWN,
    gain_text,
    interval_text,
    report_tables,
    tokens_text,
)
from cookbook.results.loss import CANNOT_TELL, DIFFERENT, EQUIVALENT, MARGIN
from cookbook.results.result import Result, RunResults, masks_differ
from cookbook.results.speed import FASTER, LEVEL, NOISE
from cookbook.run.status import CANCELLED, FINISHED, REFUSED

# The model's worst error; a cell beyond it has a cause of its own.
_PREDICTION_MARGIN = 0.15


def render_markdown(results: RunResults) -> str:
    """The report as Markdown whose table also reads well in a terminal."""
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
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def partly_finished(results: RunResults) -> str | None:
    """The number of cells by state, where some have not ended; else None."""
    counts = Counter(cell.status or "of unknown status" for cell in results.cells)
    if not counts.keys() - {FINISHED, REFUSED}:
        return None
    done = f"{counts.pop(FINISHED, 0)} of {len(results.cells)} cells finished"
    rest = [f"{count} {state}" for state, count in counts.items()]
    return f"partly finished: {', '.join([done, *rest])}; their numbers are those so far"


def headlines(results: RunResults) -> list[str]:
    """The answer in at most three sentences: the fastest cell, what is not compared, the losses."""
    return [*_fastest(results), *_not_compared(results), *_losses(results)]


def _fastest(results: RunResults) -> Iterator[str]:
    groups: dict[str | None, list[Result]] = {}
    for cell in results.cells:
        if cell.speedup is not None:
            groups.setdefault(results.settings[cell.name].baseline, []).append(cell)
    title = "Fastest" if partly_finished(results) is None else "Fastest so far"
    found = []
    for base, cells in groups.items():
        if len(cells) < 2:
            continue
        first, second, *_ = sorted(cells, key=lambda cell: cell.speedup or 0.0, reverse=True)
        if first.name == base:
            close = second.speed is None or second.speed.verdict in (NOISE, None)
            doubt = f"; {second.name} may be as fast ({interval_text(second)})" if close else ""
            text = f"no cell is faster than the baseline {base}{doubt}"
        else:
            over = f"{gain_text(first.speedup)} over {base}"
            interval = interval_text(first)
            # An interval of the two fastest against one another would need their own comparison.
            overlap = (
                first.speed is not None
                and second.speed is not None
                and (first.speed.low or 0.0) <= (second.speed.high or 0.0)
            )
            sure = first.speed is not None and first.speed.verdict == FASTER
            tokens = f"{tokens_text(first.tokens_per_second_per_gpu)} tokens/s/{results.unit}"
            known = f"{LEVEL:.0%} interval {interval}" if interval != UNKNOWN else "too few steps"
            text = f"{title}: {first.name} at {tokens}, {over} ({known})"
            if not sure:
                text += ", inside the noise" if interval != UNKNOWN else " for an interval"
            if overlap:
                text += f"; {second.name} ({gain_text(second.speedup)}) may be as fast"
        found.append(text)
    if found:
        text = "; ".join(found)
        yield f"{text[0].upper()}{text[1:]}."


def _not_compared(results: RunResults) -> Iterator[str]:
    by_name = {cell.name: cell for cell in results.cells}
    reasons: dict[str, list[str]] = {}
    for cell in results.cells:
        base = by_name.get(results.settings[cell.name].baseline or "")
        if cell.status != FINISHED or cell is base or cell.speedup is not None:
            continue
        if cell.emulated:
            reason = "emulated, so that only the loss counts"
        elif base is None:
            if results.settings[cell.name].baseline is None:
                continue
            reason = f"its baseline {results.settings[cell.name].baseline} is not in this run"
        elif base.status != FINISHED:
            reason = f"its baseline {base.name} is {base.status or 'of unknown status'}"
        elif base.emulated:
            reason = f"its baseline {base.name} is emulated"
        elif masks_differ(cell, base):
            reason = "it trained on other texts than its baseline"
        else:
            reason = "too few steps were measured"
        reasons.setdefault(reason, []).append(cell.name)
    if reasons:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
        yield f"No speed-up for {'; '.join(parts)}."


def _losses(results: RunResults) -> Iterator[str]:
    parts = []
    for verdict, words in (
        (EQUIVALENT, f"equivalent within ±{MARGIN:.2%}"),
        (DIFFERENT, "different"),
        (CANNOT_TELL, "cannot tell"),
    ):
        names = [cell.name for cell in results.cells if worst_verdict(cell) == verdict]
        if names:
            parts.append(f"{words}: {', '.join(names)}")
    if parts:
        yield f"Loss against the baseline: {'; '.join(parts)}."


def worst_verdict(cell: Result) -> str | None:
    """The worse verdict of the whole loss curve and its last tenth."""
    found = [one.verdict for one in (cell.loss, cell.loss_last_tenth) if one is not None]
    return min(found, key=(DIFFERENT, CANNOT_TELL, EQUIVALENT).index) if found else None


def facts(results: RunResults) -> list[str]:
    """The conditions of the run, and warnings."""
    run = results.run
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
    stand_ins = {
        f"stand-in: {cell.recipe or UNKNOWN} ran instead of {asked}, which does not fit here; "
        f"the published numbers are {asked}'s": None
        for cell in results.cells
        if (asked := results.settings[cell.name].stand_in_for)
    }
    lines += stand_ins
    if "cpu" in {results.settings[cell.name].device for cell in results.cells}:
        lines.append("device: cpu; throughput is a CPU's, says nothing about GPUs and has no MFU")
    if any(cell.emulated for cell in results.cells):
        lines.append("emulated: software computed what a kernel would; loss counts, speed doesn't")
    return [*lines, *_attention(results.cells), *_self_check(results.cells)]


def _attention(cells: Sequence[Result]) -> Iterator[str]:
    lengths = {cell.name: cell.mean_attended_length for cell in cells if cell.mean_attended_length}
    kinds = {cell.attention for cell in cells if cell.attention}
    shown = {f"{length:,.0f}" for length in lengths.values()}
    shared = [*kinds] if len(kinds) == 1 else []
    if len(shown) == 1:
        shared.append(f"a token attends to {shown.pop()} tokens on average")
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


def _self_check(cells: Sequence[Result]) -> Iterator[str]:
    """The largest error of kernels against their reference, and cells that skipped the check."""
    checks = {
        c.name: c.active["self_check"] for c in cells if c.active and "self_check" in c.active
    }
    done = {name: check for name, check in checks.items() if check}
    if done:
        name, check = max(done.items(), key=lambda item: float(item[1]["worst"]))
        yield (
            "self-check: every kernel was compared with a reference before the first step; the "
            f"largest error is {check['worst']:.0%} of what its format allows "
            f"({check['worst_kernel']} in {name})"
        )
    if unchecked := [name for name in checks if name not in done]:
        yield f"self-check: switched off in {', '.join(unchecked)}"


def notes(results: RunResults) -> list[str]:
    """What the table has no room for: reasons, continued attempts, profiling, slow cells."""
    runs = [run for cell in results.cells for run in results.runs_of(cell)]
    return [
        *(
            f"{cell.name} ({cell.status or 'status unknown'}): {reason}"
            for cell in results.cells
            if (reason := _reason(cell))
        ),
        *(f"{run.name}: {line}" for run in runs for one in run.resumptions for line in one.lines),
        *(f"{run.name}: {line}" for run in runs for line in run.history.lines),
        *(
            f"{cell.name}: profiled, which slows the host down; take its speed from a run without "
            "profiling.enable_profiling"
            for cell in results.cells
            if cell.profiled
        ),
        *_slower_than_predicted(results),
    ]


def _reason(cell: Result) -> str:
    """The reason in one line; the signal by which a job is cancelled is none."""
    reason = " ".join((cell.reason or "").split())
    return reason.removeprefix("SIGTERM").lstrip("; ") if cell.status == CANCELLED else reason


def _slower_than_predicted(results: RunResults) -> Iterator[str]:
    for cell in results.cells:
        predicted = cell.predicted_tokens_per_second_per_gpu
        measured = cell.tokens_per_second_per_gpu
        if measured and predicted and measured < (1 - _PREDICTION_MARGIN) * predicted:
            yield (
                f"{cell.name}: {1 - measured / predicted:.0%} slower than predicted "
                f"({tokens_text(predicted)} tokens/s/{results.unit}; within "
                f"{_PREDICTION_MARGIN:.0%} is usual); look first at {cell.predicted_largest}: "
                "submit.py profile"
            )
