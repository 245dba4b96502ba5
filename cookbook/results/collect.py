"""Collect the results of a run, finished or not, and judge its cells beside their baseline."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.resolve import cell_from_record
from cookbook.predict.step import StepTime, predict_step
from cookbook.results import verdicts
from cookbook.results.recorded import repeated_facts
from cookbook.results.result import (
    Judged,
    Result,
    RunResults,
    furthest,
    have_same_texts,
    masks_differ,
    measure_cell,
    of_repeats,
    unlike,
)
from cookbook.run.folder import CellFolder
from cookbook.run.record import CellRecord, read_record
from cookbook.run.run import Run
from cookbook.run.states import CellState
from cookbook.run.status import FINISHED, REFUSED, UNKNOWN


def collect_results(run: Run, states: Iterable[CellState]) -> RunResults:
    """Collect the results of a run from its metrics and logs, given the states of its cells."""
    known = {state.cell: state for state in states}
    cells = [_collect_cell(folder, known[folder.name], run.record.baseline) for folder in run.cells]
    return RunResults(run.record, tuple(_against_baseline(cells)))


def _collect_cell(folder: CellFolder, state: CellState, run_baseline: str | None) -> Result:
    problem = None
    try:
        record = read_record(folder.record)
    except InputError as error:
        record, problem = CellRecord(), str(error)
    status = None if state.state == UNKNOWN else state.state
    reasons = [state.reason, problem]
    if status is None and record.refused:
        status, reasons = REFUSED, [record.refused]
    return Result(
        record=replace(record, name=folder.name),
        measured=measure_cell(folder, record, status, reasons),
        judged=Judged(_expected_step(folder.name, record), record.baseline or run_baseline),
    )


def _expected_step(name: str, record: CellRecord) -> StepTime | None:
    """Return the step time predicted for a cell; None if there is no valid prediction."""
    if record.device != "cuda" or record.emulated or record.refused:
        return None
    try:
        return predict_step(cell_from_record(name, record, name, None, {}))
    except InputError:
        return None


def _against_baseline(folders: Iterable[Result]) -> list[Result]:
    """Merge each cell's repeats into one Result; add speed-up and loss verdict where comparable."""
    runs = defaultdict[Any, list[Result]](list)
    for result in folders:
        # A repeat that was resumed with other options is a cell of its own.
        options = frozenset(repeated_facts(result.record).items())
        runs[result.record.repeat_of or result.name, options].append(result)
    groups = [_merge_repeats(own) for own in runs.values()]
    merged = {cell.name: _with_baseline(cell, groups) for cell in groups}
    cells = []
    for cell in merged.values():
        judged = cell.judged
        if base := merged.get(judged.baseline or ""):
            found = speed_up_over(cell, base)
            whole, last = (None, None) if cell.is_baseline else loss_verdict(cell, base)
            published, of_base = (
                one.record.published_tokens_per_second_per_gpu for one in (cell, base)
            )
            judged = replace(
                judged,
                speedup=found.ratio if found else None,
                speed=None if cell.is_baseline else found,
                loss=whole,
                loss_last_tenth=last,
                published_speedup=published / of_base if published and of_base else None,
            )
        cells.append(replace(cell, judged=judged))
    return cells


def _with_baseline(cell: Result, groups: Sequence[Result]) -> Result:
    # If the baseline's repeats form several cells, compare with the one that shares most rounds.
    rounds, base = {run.record.repeat for run in cell.runs}, cell.judged.baseline
    own = [one for one in groups if base and base in (one.name, one.record.repeat_of)]
    if not own:
        return cell
    best = max(own, key=lambda one: len(rounds & {run.record.repeat for run in one.runs}))
    return replace(cell, judged=replace(cell.judged, baseline=best.name))


def _merge_repeats(runs: Sequence[Result]) -> Result:
    """Merge the results of a cell's repeats, in order, into one result of the first one's name."""
    measured = [run.measured for run in runs]
    first = runs[furthest(measured)]
    if len(runs) == 1:
        return first
    return replace(
        first,
        record=replace(first.record, name=runs[0].name),
        measured=of_repeats(measured, [run.record.repeat for run in runs]),
        repeats=tuple(runs),
    )


def speed_up_over(cell: Result, base: Result) -> verdicts.SpeedUp | None:
    """Return the speed-up over the pairs of finished repeats, or over the first pair's steps."""
    if unlike(cell, base, ""):
        return None
    # Compare finished runs only: a failed cell's few steps may be slow or broken.
    of_base = {run.record.repeat: run.measured for run in base.runs}
    pairs = [
        (run.measured, of_base[run.record.repeat])
        for run in cell.runs
        if run.record.repeat in of_base
    ]
    pairs = [pair for pair in pairs if {run.status for run in pair} == {FINISHED}]
    speeds = [[run.tokens_per_second_per_gpu for run in pair] for pair in pairs]
    paired = verdicts.paired_speed_up([(one, other) for one, other in speeds if one and other])
    if paired or not pairs:
        return paired
    return verdicts.speed_up(*([*verdicts.speeds_of(one.timed).values()] for one in pairs[0]))


def loss_verdict(cell: Result, base: Result) -> Sequence[verdicts.LossVerdict | None]:
    """Judge the loss of the first finished repeats with the same texts, whole and last tenth."""
    finished = (
        (own, other)
        for own in cell.runs
        for other in base.runs
        if {own.measured.status, other.measured.status} == {FINISHED}
        and have_same_texts(own, other)
    )
    pair = next(finished, None)
    if pair is None or masks_differ(cell, base):
        return None, None
    return verdicts.judge_curves(*(verdicts.losses_of(run.measured.curve) for run in pair))
