"""The report of a run in words: headlines, conditions, notes, and the table of its cells."""

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta

from cookbook.config.facts import Facts, facts_of
from cookbook.config.pins import read_pins
from cookbook.observe.metrics import StepMetrics
from cookbook.results import verdicts
from cookbook.results.columns import (
    CELLS,
    gain_text,
    report_tables,
    tokens_text,
)
from cookbook.results.recorded import UNKNOWN, routing_of
from cookbook.results.result import Result, RunResults, masks_differ, unlike
from cookbook.run.status import CANCELLED, FINISHED, REFUSED

# The usual relative error of a predicted throughput. Report cells that fall short by more.
_PREDICTION_MARGIN = 0.15
_BEFORE, _SPIKE_PART, _SPIKE_SPREADS = 20, 0.1, 10


def render_markdown(results: RunResults) -> str:
    """Return the report as Markdown that also reads well in a terminal."""
    answer, conditions, below = (
        "\n".join(f"- {line}" for line in part(results)) for part in (headlines, facts, notes)
    )
    table = report_tables(results)[CELLS]
    legend = textwrap.fill(table.legend, 80)
    parts = [f"# {results.run.run}", answer, conditions, table.markdown(), below, legend]
    return "\n\n".join(part for part in parts if part) + "\n"


def partly_finished(results: RunResults) -> str | None:
    """Return the number of cells by status; None if all have finished or were refused."""
    counts = Counter(cell.measured.status or "of unknown status" for cell in results.cells)
    if not counts.keys() - {FINISHED, REFUSED}:
        return None
    done = f"{counts.pop(FINISHED, 0)} of {len(results.cells)} cells finished"
    rest = [f"{count} {state}" for state, count in counts.items()]
    return f"partly finished: {', '.join([done, *rest])}; their numbers are those so far"


def headlines(results: RunResults) -> list[str]:
    """Sum up the run in at most three sentences, or each cell if nothing is compared."""
    if any(cell.record.stand_in_for for cell in results.cells):
        # How fast a stand-in is says nothing of the recipe.
        return [*_trained(results)][:3]
    compared = [*_fastest(results), *_not_compared(results.cells), *_losses(results.cells)]
    return compared or [*_trained(results)][:3]


def _trained(results: RunResults) -> Iterator[str]:
    for cell in results.cells:
        measured, total = cell.measured, cell.record.steps
        if not (curve := measured.curve):
            continue
        done = f"{measured.steps:,}"
        if total and measured.steps and measured.steps < total:
            done += f" of {total:,}"
        parts = [f"{cell.name}: {done} steps"]
        known = [attempt.seconds for attempt in measured.history.attempts if attempt.seconds]
        if seconds := sum(known) or (curve[-1].time or 0.0) - (curve[0].time or 0.0):
            parts[0] += f" in {timedelta(seconds=round(seconds))}"
        if curve[0].loss is not None and measured.final_loss is not None:
            parts.append(f"loss {curve[0].loss:.4f} -> {measured.final_loss:.4f}")
        if measured.validation_loss is not None:
            parts.append(f"validation loss {measured.validation_loss:.4f}")
        yield f"{', '.join(parts)}."


def _fastest(results: RunResults) -> Iterator[str]:
    groups = defaultdict[str | None, list[Result]](list)
    for cell in results.cells:
        if cell.judged.speedup is not None:
            groups[cell.judged.baseline].append(cell)
    title = "fastest" if partly_finished(results) is None else "fastest so far"
    found = []
    for base, cells in groups.items():
        if len(cells) < 2:
            continue
        first, second, *_ = sorted(cells, key=lambda cell: -(cell.judged.speedup or 0.0))
        best, next_best = first.judged.speed, second.judged.speed
        if first.is_baseline:
            text = f"no cell is faster than the baseline {base}"
            is_close = next_best is None or next_best.verdict in (verdicts.NOISE, None)
        else:
            # The two fastest cells were not compared directly: check if their intervals overlap.
            interval, is_close = "too few steps for an interval", False
            if best is not None and best.low is not None:
                noise = ", inside the noise" if best.verdict == verdicts.NOISE else ""
                ends = f"{gain_text(best.low)} to {gain_text(best.high)}"
                interval = f"{verdicts.LEVEL:.0%} interval {ends}{noise}"
                is_close = next_best is not None and best.low <= (next_best.high or 0.0)
            tokens = (
                f"{tokens_text(first.measured.tokens_per_second_per_gpu)} tokens/s/{results.unit}"
            )
            gain = f"{gain_text(first.judged.speedup)} over {base}"
            text = f"{title}: {first.name} at {tokens}, {gain} ({interval})"
        if is_close:
            text += f"; {second.name} ({gain_text(second.judged.speedup)}) may be as fast"
        found.append(text)
    if text := "; ".join(found):
        yield f"{text[0].upper()}{text[1:]}."


def _not_compared(cells: Sequence[Result]) -> Iterator[str]:
    by_name = {cell.name: cell for cell in cells}
    reasons = defaultdict[str, list[str]](list)
    for cell in cells:
        base = by_name.get(cell.judged.baseline or "")
        if cell.measured.status != FINISHED or cell is base or cell.judged.speedup is not None:
            continue
        where = f"its baseline {cell.judged.baseline}"
        reason = f"{where} is not in this run"
        if base is not None and base.measured.status != FINISHED:
            reason = f"{where} is {base.measured.status or 'of unknown status'}"
        elif base is not None:
            reason = unlike(cell, base, f"in {where}") or "too few steps were measured"
        elif cell.judged.baseline is None:
            continue
        reasons[reason].append(cell.name)
    if reasons:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
        yield f"No speed-up for {'; '.join(parts)}."


def _losses(cells: Sequence[Result]) -> Iterator[str]:
    names = defaultdict[tuple[str, str], list[str]](list)
    order = (verdicts.EQUIVALENT, verdicts.CANNOT_TELL, verdicts.DIFFERENT)
    for cell in cells:
        found = [one for one in (cell.judged.loss, cell.judged.loss_last_tenth) if one is not None]
        if worst := max(found, key=lambda one: order.index(one.verdict), default=None):
            reason = ""
            if worst.verdict == verdicts.CANNOT_TELL:
                where = f"{verdicts.LAST_TENTH}: " if worst.window == verdicts.LAST_TENTH else ""
                reason = f" ({where}{worst.reason or 'the interval crosses the margin'})"
            names[worst.verdict, reason].append(cell.name)
    margin = {verdicts.EQUIVALENT: f" within ±{verdicts.MARGIN:.2%}"}
    parts = [
        f"{verdict}{margin.get(verdict, '')}: {', '.join(of)}{reason}"
        for shown in (verdicts.EQUIVALENT, verdicts.DIFFERENT, verdicts.CANNOT_TELL)
        for (verdict, reason), of in names.items()
        if verdict == shown
    ]
    if parts:
        yield f"Loss against the baseline: {'; '.join(parts)}."


def facts(results: RunResults) -> list[str]:
    """Return lines of text on the run's setup, progress and self-check, and warnings."""
    run, cells = results.run, results.cells
    started = f", started {run.created}" if run.created else ""
    by = f" by {run.user}" if run.user else ""
    lines = [
        f"sweep: {run.sweep or UNKNOWN}{started}{by}",
        f"cluster: {run.cluster or UNKNOWN}, stack: {run.stack or UNKNOWN}, "
        f"commit: {run.commit or UNKNOWN}",
    ]
    pinned = next(pin.value for pin in read_pins() if pin.name == "torch")
    used = {str((one.measured.environment.get("versions") or {}).get("torch")) for one in cells}
    if other := sorted(one for one in used - {"None"} if one.partition("+")[0] != pinned):
        lines.append(f"WARNING: trained by torch {', '.join(other)}; the pin is {pinned}")
    if run.baseline:
        lines.append(f"baseline: {run.baseline}")
    if unfinished := partly_finished(results):
        lines.append(unfinished)
    lines += dict.fromkeys(
        f"stand-in: {one.recipe or UNKNOWN} ran instead of {one.stand_in_for}, which does not "
        f"fit here; the published numbers are {one.stand_in_for}'s"
        for one in (cell.record for cell in cells)
        if one.stand_in_for
    )
    if "cpu" in {cell.record.device for cell in cells}:
        lines.append("device: cpu; throughput is a CPU's, says nothing about GPUs and has no MFU")
    if any(cell.measured.emulated for cell in cells):
        lines.append("emulated: software in place of a kernel; the loss counts, the speed does not")
    routings = defaultdict[str, list[str]](list)
    for cell in cells:
        if routing := routing_of(cell.record):
            routings[routing].append(cell.name)
    if parts := [f"{routing} in {', '.join(names)}" for routing, names in routings.items()]:
        lines.append(f"routing: {'; '.join(parts if len(parts) > 1 else routings)}")
    return [*lines, *_attention(cells), *_self_check(cells)]


def _attention(cells: Sequence[Result]) -> Iterator[str]:
    found = ((cell.measured.mean_attended_length or 0.0, cell) for cell in cells)
    known = sorted((one for one in found if one[0]), key=lambda one: one[0])
    kinds = {cell.measured.attention for cell in cells if cell.measured.attention}
    shared = [*kinds] if len(kinds) == 1 else []
    if len(shown := {f"{length:,.0f}" for length, _ in known}) == 1:
        # Without document masks, causal attention over n tokens has a mean of (n + 1) / 2 keys.
        whole = {round(2 * length - 1) for length, _ in known}
        is_whole = len(whole) == 1 and whole == {facts_of(one.record).seq_len for _, one in known}
        of = f", in whole sequences of {whole.pop():,}" if is_whole else ""
        shared.append(f"a token attends to {shown.pop()} tokens on average{of}")
    if shared:
        yield f"attention: {'; '.join(shared)}"
    if known and masks_differ(known[0][1], known[-1][1]):
        (least, cell), (most, other) = known[0], known[-1]
        yield (
            "WARNING: cells were trained on different masks: a token attends to "
            f"{most:,.0f} tokens in {other.name} and to {least:,.0f} in {cell.name}; "
            "do not compare their speed"
        )


def _self_check(cells: Sequence[Result]) -> Iterator[str]:
    active = {cell.name: cell.measured.active or {} for cell in cells}
    checks = {name: one["self_check"] for name, one in active.items() if "self_check" in one}
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
    """Return notes: failures, resumptions, profiling, skipped steps, loss spikes and slow cells."""
    lines = []
    for cell in results.cells:
        status, reason = cell.measured.status, " ".join((cell.measured.reason or "").split())
        if status == CANCELLED:
            # SIGTERM is how a job is cancelled, not why.
            reason = reason.removeprefix("SIGTERM").lstrip("; ")
        if reason:
            lines.append(f"{cell.name} ({status or 'status unknown'}): {reason}")
    runs = [run for cell in results.cells for run in cell.runs]
    lines += [
        f"{one.name}: a cell of its own, because it ran with other options than {one.repeat_of}"
        for one in (cell.record for cell in results.cells)
        if one.repeat_of not in (None, one.name)
    ]
    lines += [
        f"{run.name}: {line}"
        for run in runs
        for resumption in run.measured.resumptions
        for line in resumption.lines
    ]
    lines += [f"{run.name}: {line}" for run in runs for line in run.measured.history.lines]
    lines += [
        f"{cell.name}: profiled, which slows the host down; take its speed from a run without "
        f"{Facts.profiles}"
        for cell in results.cells
        if cell.measured.profiled
    ]
    lines += [f"{run.name}: {line}" for run in runs for line in _troubled_steps(run.measured.curve)]
    unit = f"tokens/s/{results.unit}"
    for cell in results.cells:
        measured, step = cell.measured.tokens_per_second_per_gpu, cell.judged.predicted
        if cell.record.prediction:
            speed = f"{tokens_text(measured)} {unit}" if measured else "not measured"
            lines.append(f"{cell.name}: {speed}; {cell.record.prediction}")
        predicted = step.tokens_per_second_per_gpu if step else 0.0
        if step and measured and measured < (1 - _PREDICTION_MARGIN) * predicted:
            lines.append(
                f"{cell.name}: {1 - measured / predicted:.0%} slower than predicted "
                f"({tokens_text(predicted)} {unit}; within {_PREDICTION_MARGIN:.0%} is usual); "
                f"look first at {step.largest}: submit.py profile"
            )
    return lines


def _troubled_steps(curve: Sequence[StepMetrics]) -> Iterator[str]:
    # docs/reference/statistics.md says which losses count as spikes.
    skipped = defaultdict[int, float](float)
    for one in curve:
        skipped[one.attempt] = max(skipped[one.attempt], one.skipped_steps or 0)
    if total := sum(skipped.values()):
        yield f"{total:.0f} steps were skipped, since their gradients were not finite"
    losses = verdicts.losses_of(curve)
    steps, values, spikes = [*losses], [*losses.values()], []
    for number in range(_BEFORE, len(values)):
        before = values[number - _BEFORE : number]
        middle = statistics.median(before)
        spread = statistics.median(abs(loss - middle) for loss in before)
        if values[number] > middle + max(_SPIKE_PART * middle, _SPIKE_SPREADS * spread):
            spikes.append(f"{values[number]:.4g} at step {steps[number]} (before: {middle:.4g})")
    if spikes:
        more = f" and {len(spikes) - 3} more" if len(spikes) > 3 else ""
        yield f"the loss spikes: {', '.join(spikes[:3])}{more}"
