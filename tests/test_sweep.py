"""Sweep files and command lines become cells, which TorchTitan takes as they were meant."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell, train_argv
from cookbook.config.cluster import load_cluster
from cookbook.config.options import Setting, command_line_settings
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe, names_in
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.config.sweep import CellRequest, expand_sweep, in_rounds, load_sweep
from tests.cells import POINTS, RUNNABLE, STACK, Point, walked
from tests.check_cells import cell_of
from tests.titan_config import parse, typed

HEAD = "description: mine\nrecipes: [debug]\n"


def _request(
    *words: str,
    cluster: str = "soperator-b200",
    precision: str | None = None,
    ep_backend: str | None = None,
) -> CellRequest:
    return CellRequest(
        cluster=load_cluster(cluster),
        precision=precision,
        ep_backend=ep_backend,
        overrides=command_line_settings(words),
    )


def _expand(folder: Path, text: str, request: CellRequest | None = None) -> list[Cell]:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return expand_sweep(load_sweep(str(path)), request or _request())


@pytest.mark.parametrize("name", walked(names_in("sweep")))
@pytest.mark.parametrize("cluster", ["soperator-b200", "local"])
def test_every_sweep_expands(name: str, cluster: str) -> None:
    sweep = load_sweep(name)
    cells = expand_sweep(sweep, _request(cluster=cluster))
    assert cells and len({cell.name for cell in cells}) == len(cells)
    assert {cell.name for cell in cells} >= {cell.baseline for cell in cells if cell.baseline}
    assert {bool(cell.baseline) for cell in cells} == {bool(sweep.baseline)}


def test_the_matrix_is_the_published_one() -> None:
    cells = expand_sweep(load_sweep("matrix"), _request())
    assert [cell.name for cell in cells] == [
        "671b-bf16-standard",
        "671b-bf16-deepep",
        "671b-mxfp8-standard",
        "671b-mxfp8-deepep",
    ]
    assert [cell.published for cell in cells] == [651, 859, None, 918]
    assert {cell.baseline for cell in cells} == {"671b-bf16-standard"}
    assert all(cell.steps == 20 for cell in cells)


def test_axes_multiply_and_share_a_baseline(tmp_path: Path) -> None:
    cells = _expand(
        tmp_path,
        HEAD + "precision: [bf16, mxfp8]\nbaseline: {precision: bf16, ep_backend: standard}\n"
        "vary: {training.local_batch_size: [1, 2], training.seq_len: [256, 512]}\n",
    )
    assert len(cells) == 8
    assert cells[0].name == "debug-bf16-standard-local_batch_size_1-seq_len_256"
    baselines = [cell.name.replace("-mxfp8-", "-bf16-") for cell in cells]
    assert [cell.baseline for cell in cells] == baselines


def test_the_command_line_holds_an_axis_to_one_value(tmp_path: Path) -> None:
    text = HEAD + "precision: [bf16, mxfp8]\nvary: {training.steps: [1, 2], optimizer.lr: [0.1]}\n"
    cells = _expand(tmp_path, text, _request("training.steps=9"))
    assert [cell.name for cell in cells] == [
        "debug-bf16-standard-lr_0.1",
        "debug-mxfp8-standard-lr_0.1",
    ]
    assert {cell.steps for cell in cells} == {9}
    (cell,) = _expand(
        tmp_path, text, _request("training.steps=9", "optimizer.lr=1", precision="bf16")
    )
    assert cell.name == "debug-bf16-standard"
    cells = _expand(tmp_path, text, _request(ep_backend="deepep"))
    assert {cell.ep_backend.name for cell in cells} == {"deepep"}
    assert len(cells) == 4


def test_synonyms_and_recipes_that_share_a_stand_in_make_no_cell_twice(tmp_path: Path) -> None:
    text = "description: d\nrecipes: [deepseek_v3_671b, deepseek_v3_16b]\nprecision: [bf16]\n"
    cells = _expand(tmp_path, text, _request(cluster="local"))
    assert [cell.name for cell in cells] == ["debug-bf16-standard"]
    cells = _expand(tmp_path, text)
    assert [cell.name for cell in cells] == ["671b-bf16-standard", "16b-bf16-standard"]
    cells = _expand(tmp_path, HEAD + "precision: [mxfp8, mxfp8_default]\n")
    assert [cell.name for cell in cells] == ["debug-mxfp8-standard"]


def test_two_recipes_of_one_short_name_are_told_apart_or_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text(load_recipe("debug").path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(InputError, match=r"two of its cells are called 'debug-bf16-standard'"):
        _expand(tmp_path, f"description: d\nrecipes: [debug, {copy}]\n")


def test_words_of_the_command_line_become_torchtitans_types() -> None:
    words = [
        *["training.steps=5", "optimizer.lr=1", "compile.enable=false", "model.converters=a,b"],
        *["training.dataset_path=a=b c", "debug.seed=None"],
    ]
    settings = command_line_settings(words)
    assert {name: setting.value for name, setting in settings.items()} == {
        "training.steps": 5,
        "optimizer.lr": 1.0,
        "compile.enable": False,
        "model.converters": ["a", "b"],
        "training.dataset_path": "a=b c",
        "debug.seed": None,
    }


SET_8 = "options: {training.steps: 8}\n"


@pytest.mark.parametrize(
    ("text", "words", "steps", "place"),
    [
        ("", (), 7, "the cluster"),
        (SET_8, (), 8, "mine.yaml"),
        (SET_8 + "vary: {training.steps: [9]}\n", (), 9, "mine.yaml"),
        (SET_8, ("training.steps=10",), 10, "--set"),
    ],
)
def test_the_later_of_cluster_sweep_axis_and_command_line_wins(
    text: str, words: tuple[str, ...], steps: int, place: str, tmp_path: Path
) -> None:
    request = _request(*words)
    settings = {**request.cluster.settings, "training.steps": Setting(7, "the cluster")}
    request = replace(request, cluster=replace(request.cluster, settings=settings))
    (cell,) = _expand(tmp_path, HEAD + text, request)
    assert cell.steps == steps and place in cell.options.origin("training.steps")


def test_precision_and_ep_backend_win_over_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ndescription: mine\nnodes: 1\n"
        "model: {name: deepseek_v3, flavor: debugmodel}\n"
        "training: {mixed_precision_param: float32}\n"
        "parallelism: {expert_parallel_comm_backend: deepep}\n"
    )
    cell = cell_of(str(path), precision="bf16", ep_backend="standard")
    assert cell.options["training.mixed_precision_param"] == "bfloat16"
    assert cell.options["parallelism.expert_parallel_comm_backend"] == "standard"


def test_a_repeat_takes_no_other_cells_name() -> None:
    cell = cell_of("debug")
    with pytest.raises(InputError, match=f"has a cell {cell.name}-r2 already"):
        in_rounds([cell, replace(cell, name=f"{cell.name}-r2")], 2)


def test_only_the_sweeps_own_cells_have_its_predictions() -> None:
    def predicted(request: CellRequest) -> int:
        return sum(bool(cell.prediction) for cell in expand_sweep(load_sweep("fast"), request))

    for word in ("training.steps=50", "optimizer.lr=1e-4"):
        assert predicted(_request()) == predicted(_request(word)) == 5
    # Not of its stand-in.
    assert predicted(_request(cluster="local")) == 0
    assert predicted(_request(ep_backend="standard")) == 0
    assert predicted(replace(_request(), nodes=16)) == 0
    assert predicted(_request("training.local_batch_size=128")) == 0


def _cell(
    recipe: str = "deepseek_v3_671b",
    precision: str = "bf16",
    ep_backend: str = "standard",
    cluster: str = "soperator-b200",
    nodes: int | None = None,
    **layers: dict[str, Any],
) -> Cell:
    of_sweep, asked = (
        {name: Setting(value, layer) for name, value in layers.get(layer, {}).items()}
        for layer in ("sweep", "asked")
    )
    overlays = load_precision(precision), load_ep_backend(ep_backend)
    parts = load_recipe(recipe), *overlays, load_cluster(cluster)
    return resolve_cell(merge_config(*parts, nodes, of_sweep=of_sweep, overrides=asked))


def nightly_but_for_one_cluster_each(points: Sequence[Point]) -> list[Any]:
    """All `points`; of each recipe's pair one runs in CI, the clusters taking turns."""
    pairs: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        pairs.setdefault((point.recipe, point.precision, point.ep_backend), []).append(point)
    in_ci = {alike[number % len(alike)] for number, alike in enumerate(pairs.values())}
    nightly = pytest.mark.nightly
    return [point if point in in_ci else pytest.param(point, marks=nightly) for point in points]


@pytest.mark.titan
@pytest.mark.parametrize("point", nightly_but_for_one_cluster_each(RUNNABLE), ids=str)
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
    cell = resolve_cell(merge_config(h200.recipe, h200.precision, h200.ep_backend, strict))
    assert not cell.emulated
    assert cell.refused == "mxfp8 needs a GPU of compute capability 10.0, H200 has 9.0"
    # An exchange alone may need emulation, too.
    quantized = _cell("debug", "bf16", "mxfp8_a2a", cluster="h200-node")
    assert [one.name for one in quantized.emulated_parts] == ["mxfp8_a2a"]
    assert "--cookbook.emulated" in train_argv(quantized) and quantized.refused is None
    parts = h200.recipe, quantized.precision, quantized.ep_backend, strict
    cell = resolve_cell(merge_config(*parts))
    assert cell.refused == "mxfp8_a2a needs a GPU of compute capability 10.0, H200 has 9.0"
    newer = replace(strict, gpu=Gpu("B300", 10.3, 268))
    parts = h200.recipe, h200.precision, h200.ep_backend, newer
    assert resolve_cell(merge_config(*parts)).refused is None


def test_a_large_recipe_has_a_stand_in_on_the_local_cluster() -> None:
    cell = _cell("deepseek_v3_671b", "mxfp8", cluster="local", sweep={"training.steps": 1500})
    assert (cell.recipe.name, cell.stand_in_for) == ("debug", "deepseek_v3_671b")
    # What a sweep says of the large recipe would take hours here.
    assert cell.left_out == ("training.steps",)
    assert cell.steps == _cell("debug", cluster="local").steps
    assert _cell("debug", cluster="local", sweep={"training.steps": 3}).steps == 3
    # What the user says holds.
    assert _cell("deepseek_v3_671b", cluster="local", asked={"training.steps": 5}).steps == 5


@pytest.mark.parametrize(
    ("arguments", "published"),
    [
        ({}, 651),
        ({"ep_backend": "deepep"}, 859),
        ({"precision": "mxfp8", "ep_backend": "deepep"}, 918),
        ({"precision": "mxfp8"}, None),
        ({"nodes": 16}, None),
        ({"asked": {"training.local_batch_size": 16}}, None),
        ({"sweep": {"training.local_batch_size": 16}}, None),
        ({"cluster": "local"}, None),
    ],
)
def test_published_numbers(arguments: dict[str, Any], published: float | None) -> None:
    assert _cell(**arguments).published == published
