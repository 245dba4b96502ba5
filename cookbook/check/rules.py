"""In: a cell. Out: what is known to go wrong with it, or to cost more than it brings, and what to
do.

Each rule is a small function. What TorchTitan itself refuses when it builds the model is asked of
it in the dry run; what stands here is seen without it, or only once the job runs, or never said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cookbook.cells.cell import Cell
from cookbook.cells.layout_rules import layout_problems
from cookbook.check import rules_kernels, rules_run
from cookbook.check.facts import TORCHTITAN
from cookbook.check.finding import ERROR, Finding

Rule = Callable[[Cell], Iterator[Finding]]


def layout(cell: Cell) -> Iterator[Finding]:
    """Ranks, layers, experts, heads, sequence, batch and microbatches must divide."""
    for problem in layout_problems(cell.stack, cell.options, cell.world):
        yield Finding(
            ERROR,
            "layout",
            problem.option,
            problem.found,
            problem.remedy,
            f"{TORCHTITAN}/distributed/parallel_dims.py",
        )


def refused(cell: Cell) -> Iterator[Finding]:
    """What the overlays need and the cluster lacks: GPUs, their generation, EP, another overlay."""
    if cell.refused:
        yield Finding(
            ERROR,
            "refused",
            "",
            cell.refused,
            "choose another precision, EP backend or cluster",
            f"{TORCHTITAN}/components/quantization/mx.py"
            if "MXFP8" in cell.refused or "capability" in cell.refused
            else f"{TORCHTITAN}/models/deepseek_v3/infra/parallelize.py",
        )


# In the order of the output.
RULES: tuple[Rule, ...] = (
    layout,
    refused,
    rules_kernels.deepep_size,
    rules_kernels.deepep_etp,
    rules_kernels.corrections_are_on,
    rules_kernels.mxfp8_hardware,
    rules_kernels.precision_is_its_converters,
    rules_run.pipeline_microbatches,
    rules_run.pipeline_schedule,
    rules_run.checkpoints_resume,
    rules_run.balance_is_real,
    rules_run.parameters_are_sharded,
    rules_run.tp_in_a_node,
    rules_kernels.deepep_within_a_node,
    rules_kernels.emulated_has_no_speed,
)


def apply_rules(cell: Cell) -> list[Finding]:
    """All that the rules find; where the layout does not divide, that alone."""
    problems = list(layout(cell))
    return problems or [finding for rule in RULES for finding in rule(cell)]
