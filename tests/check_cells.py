"""Makes cells to check, also some that the driver would not let pass."""

import dataclasses
import functools
from typing import Any

from cookbook.base.errors import InputError
from cookbook.config.cell import ERROR, Cell, Finding
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.options import Setting
from cookbook.config.stack import load_stack
from cookbook.config.sweep import CellRequest, expand_sweep, sweep_of_recipe
from cookbook.config.validate import validation_errors

STACK = load_stack()


@functools.cache
def cluster_of(name: str) -> Cluster:
    return load_cluster(name)


def cell_of(
    recipe: str,
    options: dict[str, Any] | None = None,
    *,
    cluster: Cluster | str = "soperator-b200",
    precision: str | None = None,
    ep_backend: str | None = None,
    nodes: int | None = None,
) -> Cell:
    """The cell as `submit.py` resolves it; raises InputError as it does."""
    request = CellRequest(
        cluster=cluster_of(cluster) if isinstance(cluster, str) else cluster,
        precision=precision,
        ep_backend=ep_backend,
        nodes=nodes,
        overrides={
            name: Setting(value, f"--set {name}") for name, value in (options or {}).items()
        },
    )
    (cell,) = expand_sweep(sweep_of_recipe(recipe), request)
    return cell


def with_options(cell: Cell, options: dict[str, Any]) -> Cell:
    """`cell` with other options, unchecked."""
    extra = {name: Setting(value, name) for name, value in options.items()}
    return dataclasses.replace(cell, options=cell.options.override(extra))


def refusals(recipe: str, options: dict[str, Any], **where: Any) -> list[Finding]:
    """Why the cell may not run, said by the driver or by the rules."""
    try:
        cell = cell_of(recipe, options, **where)
    except InputError as error:
        return [Finding(ERROR, "input", error.place, error.found, error.remedy, "")]
    return validation_errors(cell)
