"""The cell that a record tells of, with what is asked otherwise this time."""

from __future__ import annotations

from dataclasses import replace

from cookbook.base.errors import InputError, named_at
from cookbook.config.cell import Cell
from cookbook.config.cluster import load_cluster
from cookbook.config.options import Options, Setting, Settings
from cookbook.config.overlay import load_overlay
from cookbook.config.recipe import load_recipe
from cookbook.config.stack import load_stack
from cookbook.config.validate.refusals import refusals
from cookbook.run.record import CellRecord


def recorded_cell(
    name: str, record: CellRecord, place: str, nodes: int | None, overrides: Settings
) -> Cell:
    """The cell of `record` as it was asked for most recently, under `overrides`, and judged.

    Its options are the recorded ones, whatever became of the recipe; what an overlay declares and
    what is exported come from the files as they are now.

    Args:
        name: of the cell's folder.
        place: what an error names as the record's place.
        nodes: None leaves them.

    Raises:
        InputError: the record names nothing that is here, or the cell cannot run.
    """
    newest = record.newest
    parts = []
    for key in ("recipe", "precision", "ep_backend", "cluster"):
        part = record.files.get(key) or getattr(record, key)
        if not part:
            raise InputError(place, f"does not say its {key}", "start a new run")
        parts.append(str(part))
    stack = load_stack()
    if record.stack != stack.name:
        raise InputError(
            f"{place}: stack", f"found {record.stack}, and this is {stack.name}", "start a new run"
        )
    settings = {
        option: Setting(stack.setting(place, option).check(place, value), f"{place}: {option}")
        for option, value in newest.asked_options.items()
    }
    with named_at(place):
        cluster = load_cluster(parts[3])
        cell = Cell(
            name=name,
            recipe=load_recipe(parts[0]),
            precision=load_overlay("precision", parts[1]),
            ep_backend=load_overlay("ep_backend", parts[2]),
            cluster=cluster,
            nodes=nodes or newest.nodes,
            options=Options(stack, settings).over(overrides),
            hooks=stack.hooks,
            emulated=record.emulated,
            stand_in_for=record.stand_in_for,
            baseline=record.baseline,
        )
    if not 1 <= cell.nodes <= cluster.nodes - cell.spare_nodes:
        allowed = f"1 to {cluster.nodes - cell.spare_nodes} on cluster {cluster.name}"
        raise InputError("--nodes", f"found {cell.nodes}, allowed: {allowed}")
    if cluster.ranks_per_node != record.ranks_per_node:
        raise InputError(
            f"{place}: ranks_per_node",
            f"found {record.ranks_per_node}, and {cluster.name} has {cluster.ranks_per_node} here",
            "start a new run",
        )
    findings = refusals(cell)
    for finding in findings:
        if finding.is_input:
            raise InputError(cell.options.place(finding.option), finding.reason, finding.remedy)
    return replace(cell, refused=str(findings[0])) if findings else cell
