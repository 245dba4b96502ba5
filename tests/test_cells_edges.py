"""Which of two settings wins, which baseline a cell has, and numbers at the edges of sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.finding import Finding
from cookbook.config.options import Options, Setting
from cookbook.config.sweep import CellRequest, expand_sweep, in_rounds, load_sweep
from cookbook.config.validate.layout import layout_findings
from tests.cells import STACK
from tests.check_cells import cell_of

HEAD = "description: mine\nprecision: [bf16, mxfp8]\nep_backend: [standard]\n"
STEPS = "training.steps"


def cluster_that_sets(steps: int) -> Cluster:
    cluster = load_cluster("soperator-b200")
    return replace(cluster, settings={**cluster.settings, STEPS: Setting(steps, "the cluster")})


def write_sweep(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(HEAD + text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "overrides", "steps", "place"),
    [
        ("recipes: [debug]\n", {}, 7, "the cluster"),
        ("recipes: [debug]\noptions: {training.steps: 8}\n", {}, 8, "mine.yaml"),
        (
            "recipes: [debug]\noptions: {training.steps: 8}\nvary: {training.steps: [9]}\n",
            {},
            9,
            "mine.yaml",
        ),
        ("recipes: [debug]\noptions: {training.steps: 8}\n", {STEPS: 10}, 10, "--set"),
    ],
)
def test_the_later_of_cluster_sweep_axis_and_command_line_wins(
    text: str, overrides: dict[str, int], steps: int, place: str, tmp_path: Path
) -> None:
    request = CellRequest(
        cluster=cluster_that_sets(7),
        overrides={name: Setting(value, "--set") for name, value in overrides.items()},
    )
    cells = expand_sweep(load_sweep(write_sweep(tmp_path, text)), request)
    assert len(cells) == 2
    for cell in cells:
        assert cell.steps == steps
        assert place in cell.options.origin(STEPS)


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


def test_two_recipes_of_a_sweep_have_a_baseline_each(tmp_path: Path) -> None:
    text = (
        "recipes: [deepseek_v3_16b, deepseek_v3_671b]\n"
        "baseline: {precision: bf16, ep_backend: standard}\n"
    )
    request = CellRequest(cluster=load_cluster("soperator-b200"))
    cells = expand_sweep(load_sweep(write_sweep(tmp_path, text)), request)
    assert {cell.name: cell.baseline for cell in cells} == {
        "16b-bf16-standard": "16b-bf16-standard",
        "16b-mxfp8-standard": "16b-bf16-standard",
        "671b-bf16-standard": "671b-bf16-standard",
        "671b-mxfp8-standard": "671b-bf16-standard",
    }


def of_batch(world: int, **options: Any) -> list[Finding]:
    settings = {"model.name": "deepseek_v3", "model.flavor": "16B"} | {
        name.replace("__", "."): value for name, value in options.items()
    }
    given = {name: Setting(value, f"--set {name}") for name, value in settings.items()}
    return layout_findings(Options(STACK, given), world)


@pytest.mark.parametrize("replicate", [1, 4])
def test_a_global_batch_is_a_multiple_of_all_replicas_local_batches(replicate: int) -> None:
    batches = {
        "training__local_batch_size": 2,
        "parallelism__data_parallel_replicate_degree": replicate,
    }
    # 384 is a multiple of 128 ranks and of 2 sequences, and not of 256.
    (finding,) = of_batch(128, training__global_batch_size=384, **batches)
    assert finding.option == "training.global_batch_size"
    assert "384 is not a multiple of local batch 2 x 128 data-parallel ranks" in finding.reason
    assert finding.remedy == "try 256"
    for total in (256, 512, -1):
        assert not of_batch(128, training__global_batch_size=total, **batches)


def test_rounds_turn_and_leave_out_what_is_refused() -> None:
    cells = [replace(cell_of("debug"), name=name) for name in "abc"]
    cells[1] = replace(cells[1], refused="no GPU")
    names = [cell.name for cell in in_rounds(cells, 3)]
    assert names == ["a", "b", "c", "c-r2", "a-r2", "a-r3", "c-r3"]
