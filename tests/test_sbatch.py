"""What sbatch is told about the jobs of cells, in the words that it reads."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from cookbook.base.schema import Words
from cookbook.launch.script import sbatch_lines, sbatch_options
from tests.cells import POINTS, Point

ON_SLURM = [point for point in POINTS if point.cell().cluster.scheduler == "slurm"]


@pytest.mark.parametrize("point", ON_SLURM, ids=str)
def test_one_task_a_node_sees_all_of_its_gpus(point: Point) -> None:
    cell = point.cell()
    options = sbatch_options(cell)
    assert options["nodes"] == cell.nodes
    assert options["ntasks-per-node"] == 1
    if cell.cluster.gpu:
        # Untyped, and never by task: a task must see all GPUs of its node.
        assert options["gpus-per-node"] == 8
    else:
        assert "gpus-per-node" not in options
    assert not {"gpus-per-task", "gres", "gpus"} & set(options)
    # Its other processes would die of it.
    assert str(options["signal"]).startswith("B:USR1@")
    assert ("requeue" in options) != ("no-requeue" in options)
    # A share of the memory for each CPU is too little for nodes that are one's own.
    assert (options.get("exclusive"), options.get("mem")) == (
        (True, 0) if cell.cluster.exclusive else (None, None)
    )
    # What a job wrote before it was requeued stays.
    assert options["open-mode"] == "append"
    assert options["job-name"] == cell.name
    assert sbatch_options(cell, "671b")["job-name"] == "671b"


@pytest.mark.parametrize("point", ON_SLURM, ids=str)
def test_lines_are_read_back_as_the_options(point: Point) -> None:
    cell = point.cell()
    expected = {
        name: True if value is True else str(value) for name, value in sbatch_options(cell).items()
    }
    read = {}
    for line in sbatch_lines(cell):
        assert "\n" not in line
        (word,) = shlex.split(line)
        name, equals, value = word.removeprefix("--").partition("=")
        read[name] = value if equals else True
    assert read.pop("output") == "%x-%j.log"
    assert read == expected


def test_extra_options_of_the_profile_are_added_and_false_leaves_one_out() -> None:
    cell = ON_SLURM[0].cell()
    extra: dict[str, str | bool] = {
        "reservation": "moe",
        "spread-job": True,
        "contiguous": False,
        "nice": "10",
    }
    options = sbatch_options(replace(cell, cluster=replace(cell.cluster, sbatch=Words(extra))))
    assert options["reservation"] == "moe"
    assert options["spread-job"] is True
    assert options["nice"] == "10"
    assert "contiguous" not in options


def test_nodes_of_the_list_are_left_out_beside_those_of_the_profile() -> None:
    cell = ON_SLURM[0].cell()
    cell = replace(cell, cluster=replace(cell.cluster, exclude=("worker-7", "worker-9")))
    assert sbatch_options(cell)["exclude"] == "worker-7,worker-9"
    left_out = sbatch_options(cell, leave_out=["worker-9", "worker-1"])["exclude"]
    assert left_out == "worker-7,worker-9,worker-1"
