"""Whether a cell can run: the one function that says so, by its final options.

The driver asks it of every cell, and a job of the options that it was started with, those at the
end of an sbatch line too. What TorchTitan refuses when it builds the model is asked of TorchTitan
(`check/`); a rule stands here where that cannot see it, or would see it only in the job.
"""

from __future__ import annotations

from cookbook.config.cell import Cell
from cookbook.config.finding import Finding
from cookbook.config.validate import kernels, layout, pipeline, values


def validation_errors(cell: Cell) -> list[Finding]:
    """Why the cell cannot run, wrong input first; where the layout does not divide, that alone."""
    problems = layout.layout_findings(cell.options, cell.world)
    if problems:
        return problems
    rules = (*values.RULES, *kernels.RULES, *pipeline.RULES)
    found = [finding for rule in rules for finding in rule(cell)]
    return sorted(found, key=lambda finding: not finding.is_input)


def wrong_value(cell: Cell, option: str) -> Finding | None:
    """What is wrong with the value of `option`, whatever the others are."""
    found = layout.impossible_findings(cell.options)
    found += [*values.bounds(cell), *values.selected(cell)]
    return next((finding for finding in found if finding.option == option), None)
