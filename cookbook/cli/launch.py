"""The verbs `run` and `sweep`: cells submitted, watched until they end, and their report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from cookbook.base.errors import InputError
from cookbook.base.tables import terminal_width, text_table
from cookbook.base.yamlfile import shown_path
from cookbook.cli.check import refuse_by_check
from cookbook.cli.request import requested_cell, requested_sweep
from cookbook.cli.watch import wait_for
from cookbook.config.cell import Cell
from cookbook.config.expand import in_rounds
from cookbook.config.validate.here import missing_here
from cookbook.launch.create import create_run
from cookbook.run.excluded import read_excluded
from cookbook.run.run import Run


def run_cell(arguments: argparse.Namespace) -> int:
    """Train one cell."""
    cell = requested_cell(arguments)
    run = start_run(cell.recipe.short_name, [cell], arguments)
    return wait_for(run) if isinstance(run, Run) else run


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train every cell of a sweep that can run."""
    sweep, cells = requested_sweep(arguments)
    if arguments.repeat < 1:
        raise InputError("--repeat", f"found {arguments.repeat}, allowed: 1 and up")
    if arguments.one_allocation:
        refuse_unlike_sizes(cells)
    run = start_run(sweep.name, cells, arguments, arguments.repeat, arguments.one_allocation)
    return wait_for(run) if isinstance(run, Run) else run


def refuse_unlike_sizes(cells: Sequence[Cell]) -> None:
    """Raise where cells do not fill one allocation alike."""
    nodes = sorted({cell.nodes for cell in cells})
    if len(nodes) > 1:
        raise InputError(
            "--one-allocation",
            f"the cells ask for {', '.join(map(str, nodes))} nodes",
            "name one number with --nodes",
        )


def start_run(
    name: str,
    cells: Sequence[Cell],
    arguments: argparse.Namespace,
    num_repeats: int = 1,
    one_allocation: bool = False,
) -> Run | int:
    """Submit the cells, saying what will run; the exit status where there is nothing to wait for.

    Args:
        arguments: with `dry_run`, `no_check` and `detach`.
    """
    cells = [refused_here(cell, arguments.dry_run) for cell in cells]
    if not arguments.no_check:
        # A dry run answers at once, by the rules alone; `check` tells all.
        cells = refuse_by_check(cells, build=not arguments.dry_run)
    print(describe_plan(name, cells, terminal_width()))
    cells = in_rounds(cells, num_repeats)
    cluster = cells[0].cluster
    if one_allocation and cluster.scheduler == "slurm":
        limit = f", which has {cluster.time} for all of them" if cluster.time else ""
        print(f"  one after another in one job{limit}")
    if num_repeats > 1:
        order = ", ".join(cell.name for cell in cells if not cell.refused)
        print(f"  each {num_repeats} times, in this order: {order}")
    if arguments.dry_run:
        return 0
    if all(cell.refused for cell in cells):
        print(f"{name}: no cell can run here; nothing was submitted", file=sys.stderr)
        return 1
    # submitit takes a moment to import, which a dry run need not wait for.
    from cookbook.launch.executor import submit_run

    if cells[0].cluster.scheduler == "slurm":
        # A mistake in the list is to be found before anything is written.
        for node in read_excluded():
            print(f"left out: {node}")
    run = create_run(name, cells)
    return (
        run if say_submitted(run, submit_run(run, cells, one_allocation), arguments.detach) else 0
    )


def say_submitted(run: Run, job_ids: Sequence[str], is_detached: bool) -> bool:
    """Say where the jobs are; whether somebody is to wait for them."""
    kind = "Slurm job" if run.scheduler == "slurm" else "process"
    shown = ", ".join(job_ids[:8]) + (", ..." if len(job_ids) > 8 else "")
    print(f"submitted as {kind} {shown}: {shown_path(run.folder)}\n", flush=True)
    if is_detached:
        print(f"follow it: python submit.py status --watch {run.name}")
    return not is_detached


def refused_here(cell: Cell, is_dry: bool) -> Cell:
    """The job trains with this very environment and these files, unless it has a container."""
    missing = [] if cell.refused else missing_here(cell)
    # Whoever plans for a cluster from elsewhere need not have its tokenizers.
    missing = [finding for finding in missing if not is_dry or finding.rule != "files"]
    return replace(cell, refused=str(missing[0])) if missing else cell


def describe_plan(name: str, cells: Sequence[Cell], width: int | None = None) -> str:
    """What will run and what not, a line a cell; lines fit into `width` where it is given."""
    first = cells[0]
    cluster = first.cluster
    lines = [f"{name} on cluster {cluster.name}: {first.nodes} node(s) x {cluster.ranks}"]
    stand_ins = {cell.stand_in_for: cell.recipe.name for cell in cells if cell.stand_in_for}
    for original, stand_in in stand_ins.items():
        lines.append(f"  {original} is too large here: its stand-in {stand_in} runs instead")
    if first.left_out:
        lines.append(f"  left out, being made for the large recipe: {', '.join(first.left_out)}")
    rows = []
    for cell in cells:
        layout = cell.layout
        degrees = f"TP {layout.tp} PP {layout.pp} DP {layout.dp_shard} EP {layout.ep}"
        text = f"refused: {cell.refused}" if cell.refused else f"{cell.steps} steps, {degrees}"
        if cell.emulated and not cell.refused:
            text += ", MXFP8 emulated (numerics only)"
        if cell.attends_by_reference and not cell.refused:
            text += ", FlashAttention-4's reference (numerics only)"
        rows.append([cell.name, text])
    return "\n".join([*lines, text_table(rows, width=width, indent=2)])
