"""The step that was to be expected of a run's cell, to hold beside what was measured."""

from __future__ import annotations

from cookbook.base.errors import InputError
from cookbook.config.resolve import cell_from_record
from cookbook.predict.step import StepTime, predict_step
from cookbook.run.record import CellRecord

# A cell that is slower than predicted by more than the model's worst error has a cause of its own.
MARGIN = 0.15


def expected_step(name: str, record: CellRecord) -> StepTime | None:
    """The step of the cell as it was asked for last; None where it cannot be predicted.

    A cell that never ran, on the CPU, or emulated, has no time that would mean anything.
    """
    if record.device != "cuda" or record.emulated or record.refused:
        return None
    try:
        return predict_step(cell_from_record(name, record, name, None, {}))
    except InputError:
        # Its files are gone, its documents or its GPU are not known: the report goes without.
        return None


def shortfall(measured: float | None, predicted: float | None) -> float | None:
    """By which part a cell is slower than predicted, where that is beyond the margin."""
    if not measured or not predicted or measured >= (1 - MARGIN) * predicted:
        return None
    return 1 - measured / predicted
