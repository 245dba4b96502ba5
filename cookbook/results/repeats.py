"""The repeats of a cell as one result: `sweep --repeat N` trains each cell N times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cookbook.observe.curve import CurveStep
from cookbook.observe.history import History
from cookbook.results.result import Repeat, Result
from cookbook.results.speed import measure
from cookbook.run.status import FINISHED


def merged(name: str, runs: Sequence[Result], curves: Mapping[str, Sequence[CurveStep]]) -> Result:
    """One result of all `runs` of a cell, in the order of their repeats; a single one as it is.

    Throughput is over the steps of all, TFLOPs, MFU and final loss are medians of those that are
    known, memory is the peak, and the state is the first that is not `finished`. Stalls, attempts
    and lost steps are those of all.
    """
    first = runs[0]
    if len(runs) == 1:
        return replace(first, name=name)
    throughput = measure(*(curves[run.name] for run in runs))
    reasons = [f"repeat {number}: {run.reason}" for number, run in enumerate(runs, 1) if run.reason]
    states = [run.status for run in runs]
    steps = [run.steps for run in runs if run.steps is not None]
    return replace(
        first,
        name=name,
        status=next((state for state in states if state != FINISHED), FINISHED),
        # What holds for all of them is said once.
        reason=first.reason if len({run.reason for run in runs}) == 1 else "; ".join(reasons),
        steps=min(steps) if steps else None,
        tokens_per_second_per_gpu=throughput.median if throughput else None,
        tflops_per_gpu=_median(run.tflops_per_gpu for run in runs),
        mfu=_median(run.mfu for run in runs),
        memory_gib=max((run.memory_gib for run in runs if run.memory_gib), default=None),
        final_loss=_median(run.final_loss for run in runs),
        profiled=any(run.profiled for run in runs),
        emulated=any(run.emulated for run in runs),
        active=next((run.active for run in runs if run.active), None),
        resumptions=tuple(one for run in runs for one in run.resumptions),
        history=merged_history([run.history for run in runs]),
        throughput=throughput,
        gpu_hours=sum(run.gpu_hours or 0.0 for run in runs) or None,
        cost_per_billion_tokens=_median(run.cost_per_billion_tokens for run in runs),
        repeats=tuple(
            Repeat(
                name=run.name,
                status=run.status,
                steps=run.steps,
                tokens_per_second_per_gpu=run.tokens_per_second_per_gpu,
                final_loss=run.final_loss,
                stalls=run.throughput.stalls if run.throughput else (),
                resumptions=run.resumptions,
                history=run.history,
            )
            for run in runs
        ),
    )


def merged_history(runs: Sequence[History]) -> History:
    """The attempts of all; their effective time is of the time that all took."""
    known = [(_effective_seconds(run), run.effective) for run in runs if run.effective]
    elapsed = sum(seconds / share for seconds, share in known)
    return History(
        attempts=tuple(attempt for run in runs for attempt in run.attempts),
        steps_lost=sum(run.steps_lost for run in runs),
        effective=sum(seconds for seconds, _ in known) / elapsed if elapsed else None,
    )


def _effective_seconds(history: History) -> float:
    return sum(attempt.effective_seconds for attempt in history.attempts)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
