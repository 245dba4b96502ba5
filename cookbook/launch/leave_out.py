"""Which nodes a new job leaves out: those of the list that failed a job before."""

from __future__ import annotations

from cookbook.base.errors import JobError
from cookbook.base.yamlfile import shown_path
from cookbook.config.cell import Cell
from cookbook.run.excluded import Choice, choose, excluded_file, read_excluded
from cookbook.run.slurm import partition_nodes


def leave_out(cell: Cell) -> Choice:
    """What to tell sbatch of the nodes on the list.

    Raises:
        JobError: too few nodes are left, and the recipe does not wait for them.
    """
    excluded = read_excluded()
    if not excluded:
        return Choice(())
    needed = cell.nodes + cell.spare_nodes
    never = set(cell.cluster.exclude)
    nodes = [node for node in partition_nodes(cell.cluster.partition) if node not in never]
    choice = choose(needed, nodes, excluded)
    if choice.short and cell.recipe.too_few_nodes == "stop":
        raise JobError(
            f"too few nodes are left: {choice.short} of {needed} missing; "
            f"look at {shown_path(excluded_file())}, or ask for fewer with --nodes"
        )
    return choice
