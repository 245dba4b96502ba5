"""The cell that a run's record tells of: made again as it was asked for last, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.config.cell import Cell
from cookbook.config.options import Setting
from cookbook.config.resolve import cell_from_record
from cookbook.run.record import CellRecord
from tests.cells import CLUSTER_FILES, Point

(CPU_NODES,) = [str(path) for path in CLUSTER_FILES if path.stem == "cpu-nodes"]


def debug() -> Cell:
    return Point("debug", "bf16", "standard", CPU_NODES).cell()


def settings(options: dict[str, Any]) -> dict[str, Setting]:
    return {name.replace("__", "."): Setting(value, "") for name, value in options.items()}


def asked(cell: Cell, **options: Any) -> CellRecord:
    """The record of `cell` with other options, as a change of it has them."""
    return replace(cell, options=cell.options.override(settings(options))).record()


def again(record: CellRecord, nodes: int | None = None, **options: Any) -> Cell:
    return cell_from_record("mine", record, "cell.yaml", nodes, settings(options))


def test_the_recorded_cell_comes_back_and_new_requests_win() -> None:
    cell = debug()
    assert again(cell.record()).record() == replace(cell, name="mine").record()
    changed = replace(asked(debug(), training__steps=20), nodes=2)
    assert (again(changed).steps, again(changed).nodes) == (20, 2)
    assert again(changed, training__steps=30).steps == 30
    assert again(changed, nodes=1).nodes == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"stack": "2025.01"}, "cell.yaml: stack: found 2025.01, and this is "),
        ({"ranks_per_node": 4}, "cell.yaml: ranks_per_node: found 4, and cpu-nodes has 2 here"),
        ({"recipe": "", "files": {}}, "cell.yaml: does not say its recipe; start a new run"),
        ({"cluster": "locl", "files": {}}, "cell.yaml: unknown cluster 'locl'"),
    ],
)
def test_a_record_of_something_else_is_named(other: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        again(replace(debug().record(), **other))
    assert str(caught.value).startswith(said)


def test_spare_nodes_are_no_nodes_to_train_on(tmp_path: Path) -> None:
    recipe = tmp_path / "spare.yaml"
    text = debug().recipe.path.read_text(encoding="utf-8")
    recipe.write_text(f"{text}\nspare_nodes: 1\n", encoding="utf-8")
    record = Point(str(recipe), "bf16", "standard", CPU_NODES).cell().record()
    assert again(record).nodes == 1
    with pytest.raises(InputError, match="--nodes: found 2, allowed: 1 to 1 on cluster cpu-nodes"):
        again(record, nodes=2)


def test_more_steps_keep_the_schedule_of_the_learning_rate() -> None:
    total = "lr_scheduler.total_steps"
    first = asked(debug(), training__steps=10)
    assert again(first).options[total] is None
    longer = again(first, training__steps=30)
    assert (longer.steps, longer.options[total]) == (30, 10)
    longest = again(longer.record(), training__steps=50)
    assert (longest.steps, longest.options[total]) == (50, 10)
    stretched = again(first, training__steps=30, lr_scheduler__total_steps=30)
    assert stretched.options[total] == 30
