"""What sbatch is told about a cell's job: for its script's header and for submitit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cookbook.config.cell import Cell

OptionValue = str | int | bool


def sbatch_options(
    cell: Cell, job_name: str | None = None, leave_out: Sequence[str] = ()
) -> dict[str, OptionValue]:
    """sbatch's options by long name; True stands for an option without a value.

    One task a node: torchrun starts the ranks. GPUs are asked for per node and untyped, since a
    task must see all of its node's GPUs, and GRES names differ among clusters.

    Args:
        leave_out: nodes to leave out beside those of the profile.
    """
    cluster = cell.cluster
    options: dict[str, OptionValue] = {
        "job-name": job_name or cell.name,
        "nodes": cell.nodes + cell.spare_nodes,
        "ntasks-per-node": 1,
    }
    if cluster.gpu is not None:
        options["gpus-per-node"] = cluster.ranks_per_node
    if cluster.cpus_per_task is not None:
        options["cpus-per-task"] = cluster.cpus_per_task
    if cluster.exclusive:
        # All of the node's memory: the default is a share for each CPU.
        options |= {"exclusive": True, "mem": 0}
    if cluster.partition:
        options["partition"] = cluster.partition
    if cluster.account:
        options["account"] = cluster.account
    if cluster.time:
        options["time"] = cluster.time
    if left_out := dict.fromkeys([*cluster.exclude, *leave_out]):
        options["exclude"] = ",".join(left_out)
    options["requeue" if cluster.requeue else "no-requeue"] = True
    # To the batch shell alone: a rank's helper processes would die of it.
    options["signal"] = f"B:USR1@{cluster.grace_seconds}"
    # The log of a requeued job continues that of the job before.
    options["open-mode"] = "append"
    # YAML's false leaves an option out, as its true stands for one without a value.
    return options | {name: value for name, value in cluster.sbatch.items() if value is not False}


def sbatch_lines(cell: Cell, job_name: str | None = None) -> list[str]:
    """The words after `#SBATCH`, in order; the log goes to the folder that sbatch is called in."""
    if cell.cluster.scheduler != "slurm":
        return []
    options = sbatch_options(cell, job_name) | {"output": "%x-%j.log"}
    return [option_word(name, value) for name, value in options.items()]


def option_word(name: str, value: OptionValue) -> str:
    """`--nodes=32`, or `--exclusive` for True; quoted as sbatch reads its comment lines."""
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
