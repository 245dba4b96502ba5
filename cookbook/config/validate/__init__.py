"""Whether a cell can run: the one function that says so, by its final options.

The driver asks it of every cell, and the job of the words that it was started with, those at the
end of an sbatch line too. What TorchTitan itself refuses when it builds the model is asked of it
(`check/`); what stands here is seen without it, or only once the job runs, or never said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cookbook.config.cell import Cell
from cookbook.config.finding import Finding
from cookbook.config.validate import (
    attention,
    kernels,
    overlays,
    pipeline,
    recomputation,
    values,
)
from cookbook.config.validate.layout import impossible_findings, layout_findings

Rule = Callable[[Cell], Iterator[Finding]]

# In the order of the output.
RULES: tuple[Rule, ...] = (
    values.bounds,
    values.dataset,
    values.kept_checkpoints,
    values.pinned_memory,
    recomputation.selected,
    recomputation.save_list,
    recomputation.layers_kept,
    overlays.hardware,
    overlays.needs,
    overlays.declaration,
    kernels.deepep_size,
    kernels.deepep_etp,
    kernels.hooks_are_on,
    kernels.mxfp8_hardware,
    kernels.mxfp8_linear_compiles,
    attention.flash_attention_gpu,
    attention.flash_attention_heads,
    attention.context_parallel_attention,
    attention.flash_attention_hooks,
    pipeline.enough_microbatches,
    pipeline.splittable_backward,
    pipeline.two_stages,
    pipeline.dual_pipe_v_overlap,
)


def validation_errors(cell: Cell) -> list[Finding]:
    """Why the cell cannot run, wrong input first; where the layout does not divide, that alone."""
    problems = layout_findings(cell.options, cell.world)
    if problems:
        return problems
    found = [finding for rule in RULES for finding in rule(cell)]
    return sorted(found, key=lambda finding: not finding.is_input)


def wrong_value(cell: Cell, option: str) -> Finding | None:
    """What is wrong with the value of `option`, whatever the others are."""
    alone = (values.bounds, recomputation.selected)
    found = [*impossible_findings(cell.options), *(one for rule in alone for one in rule(cell))]
    return next((finding for finding in found if finding.option == option), None)
