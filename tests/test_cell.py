"""The pinned TorchTitan takes every cell of the cookbook as it was meant, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell, train_argv
from cookbook.config.cluster import load_cluster
from cookbook.config.options import Setting
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.resolve import resolve_cell
from tests.cells import POINTS, RUNNABLE, STACK, Point
from tests.titan_config import parse, typed

B200 = "soperator-b200"


def _cell(
    recipe: str = "deepseek_v3_671b",
    precision: str = "bf16",
    ep_backend: str = "standard",
    cluster: str = B200,
    nodes: int | None = None,
    sweep: dict[str, Any] | None = None,
    **options: Any,
) -> Cell:
    """A cell; `options` with __ for a dot."""
    of_sweep = {name: Setting(value, "sweep") for name, value in (sweep or {}).items()}
    names = {name.replace("__", "."): value for name, value in options.items()}
    asked = {name: Setting(value, f"--set {name}") for name, value in names.items()}
    overlays = load_precision(precision), load_ep_backend(ep_backend)
    parts = load_recipe(recipe), *overlays, load_cluster(cluster)
    return resolve_cell(*parts, nodes=nodes, layers=(of_sweep, {}, asked))


@pytest.mark.titan
@pytest.mark.parametrize("point", RUNNABLE, ids=str)
def test_torchtitan_holds_what_the_cell_says(point: Point) -> None:
    cell = point.cell()
    parsed = parse(train_argv(cell))
    expected = {
        **{name: option.default for name, option in STACK.options.items()},
        **cell.options.values,
        "job.description": cell.description,
        "job.custom_config_module": "cookbook.titan.tt_0_2_2.job_config",
        "experimental.custom_import": "cookbook.titan.tt_0_2_2",
        "cookbook.precision": point.precision,
        "cookbook.ep_backend": point.ep_backend,
        "cookbook.emulated": cell.emulated,
        # What the overlays declare, which the job is held to.
        **{name: setting.value for name, setting in cell.precision.expect.items()},
        **{name: setting.value for name, setting in cell.ep_backend.expect.items()},
    }
    assert typed(parsed) == typed(expected)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_cell_yaml_reads_back_as_the_cell(point: Point) -> None:
    cell = point.cell()
    read = yaml.safe_load(cell.record().as_yaml())
    assert read["options"] == cell.options.values
    assert typed(read["options"]) == typed(cell.options.values)
    assert read["name"] == cell.name
    assert (read["precision"], read["ep_backend"]) == (point.precision, point.ep_backend)
    assert read["nodes"] * read["ranks_per_node"] == cell.world
    assert read["refused"] == cell.refused


def test_what_the_gpu_lacks_is_emulated_where_the_cluster_allows_it() -> None:
    h200 = _cell("debug", "mxfp8", cluster="h200-node")
    assert h200.emulated and h200.refused is None
    strict = replace(load_cluster("h200-node"), emulate=False)
    cell = resolve_cell(h200.recipe, h200.precision, h200.ep_backend, strict)
    assert not cell.emulated
    assert cell.refused == "mxfp8 needs a GPU of compute capability 10.0, H200 has 9.0"
    # An exchange alone may need emulation, too.
    quantized = _cell("debug", "bf16", "mxfp8_a2a", cluster="h200-node")
    assert [one.name for one in quantized.emulated_parts] == ["mxfp8_a2a"]
    assert "--cookbook.emulated" in train_argv(quantized) and quantized.refused is None
    cell = resolve_cell(h200.recipe, quantized.precision, quantized.ep_backend, strict)
    assert cell.refused == "mxfp8_a2a needs a GPU of compute capability 10.0, H200 has 9.0"
    newer = replace(strict, gpu=Gpu("B300", 10.3, 268))
    assert resolve_cell(h200.recipe, h200.precision, h200.ep_backend, newer).refused is None


def test_a_large_recipe_has_a_stand_in_on_the_local_cluster() -> None:
    cell = _cell("deepseek_v3_671b", "mxfp8", cluster="local", sweep={"training.steps": 1500})
    assert (cell.recipe.name, cell.stand_in_for) == ("debug", "deepseek_v3_671b")
    # What a sweep says of the large recipe would take hours here.
    assert cell.left_out == ("training.steps",)
    assert cell.steps == _cell("debug", cluster="local").steps
    assert _cell("debug", cluster="local", sweep={"training.steps": 3}).steps == 3
    # What the user says holds.
    assert _cell("deepseek_v3_671b", cluster="local", training__steps=5).steps == 5


@pytest.mark.parametrize(
    ("arguments", "published"),
    [
        ({}, 651),
        ({"ep_backend": "deepep"}, 859),
        ({"precision": "mxfp8", "ep_backend": "deepep"}, 918),
        ({"precision": "mxfp8"}, None),
        ({"nodes": 16}, None),
        ({"training__local_batch_size": 16}, None),
        ({"sweep": {"training.local_batch_size": 16}}, None),
        ({"cluster": "local"}, None),
    ],
)
def test_published_numbers(arguments: dict[str, Any], published: float | None) -> None:
    assert _cell(**arguments).published == published
