"""What is known to cost a cell more than it brings: warnings and hints, each a small function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cookbook.check import advice_kernels, advice_run
from cookbook.config.cell import Cell
from cookbook.config.finding import Finding

Rule = Callable[[Cell], Iterator[Finding]]

# In the order of the output.
RULES: tuple[Rule, ...] = (
    advice_run.paths_are_here,
    advice_run.fewer_nodes,
    advice_kernels.router_gradient,
    advice_run.pipeline_bubble,
    advice_run.loss_is_logged,
    advice_run.checkpoints_resume,
    advice_run.balance_is_real,
    advice_run.parameters_are_sharded,
    advice_run.replicas_are_summed,
    advice_run.tp_in_a_node,
    advice_kernels.deepep_within_a_node,
    advice_kernels.few_sms_for_all,
    advice_kernels.emulated_has_no_speed,
    advice_kernels.reference_has_no_speed,
)


def advice(cell: Cell) -> list[Finding]:
    """All that there is to say of a cell that can run."""
    return [finding for rule in RULES for finding in rule(cell)]
