"""Wrong inputs are refused in one line that names the place, what was found and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.check.check import check_cells
from cookbook.cli.main import main
from cookbook.config.cell import Finding
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.recipe import load_precision, load_recipe
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep
from cookbook.config.validate import validation_errors
from tests.check_cells import cell_of, cluster_of, refusals, with_options

TABLE = yaml.safe_load((ROOT / "tests/refusals.yaml").read_text(encoding="utf-8"))
LOAD: dict[str, Callable[[str], object]] = {
    "recipe": load_recipe,
    "precision": load_precision,
    "cluster": load_cluster,
    "sweep": lambda path: expand_sweep(load_sweep(path), CellRequest(cluster_of("soperator-b200"))),
}
HEADS = {
    "recipe": "name: mine\ndescription: mine\nnodes: 1\n",
    "precision": "description: a\n",
    "cluster": "description: mine\nscheduler: slurm\n",
    "sweep": "description: mine\nrecipes: [debug]\n",
}
BIG, SMALL = "deepseek_v3_671b", "deepseek_v3_16b"
P = "parallelism"


@pytest.mark.parametrize("case", TABLE["files"], ids=lambda case: f"{case[0]}: {case[1][-40:]!r}")
def test_a_wrong_file_is_one_line_with_its_place(case: list[str], tmp_path: Path) -> None:
    kind, text, *says = case
    head = HEADS[kind[1:]] if kind[0] == "+" else ""
    path = tmp_path / "mine.yaml"
    path.write_text(head + text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        LOAD[kind.removeprefix("+")](str(path))
    message = str(caught.value)
    assert "mine" in message and "\n" not in message
    for words in says:
        assert words in message


def _cluster(name: str) -> Cluster:
    b200 = cluster_of("soperator-b200")
    assert b200.gpu
    match name:
        case "a100":
            old = dataclasses.replace(b200.gpu, name="A100", compute_capability=8.0)
            return dataclasses.replace(b200, gpu=old)
        case "b200 of 4":
            return dataclasses.replace(b200, gpus_per_node=4)
        case "cpu":
            # `local` as on a machine without GPUs, whatever this one has.
            return dataclasses.replace(cluster_of("local"), gpu=None, gpus_per_node=None)
    return cluster_of(name)


@pytest.mark.parametrize(("words", "says"), TABLE["commands"])
def test_a_wrong_command_is_status_2_and_one_line_and_leaves_nothing_behind(
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and says in said.err
    assert said.err.startswith("submit.py") and len(said.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.yaml"]


@pytest.mark.parametrize("case", TABLE["rules"], ids=lambda case: f"{case[3]}: {case[4]}")
def test_a_cell_that_cannot_run_is_refused_with_its_option_and_reason(case: list[Any]) -> None:
    recipe, options, where, option, words = case
    if "cluster" in where:
        where = {**where, "cluster": _cluster(where["cluster"])}
    found = refusals(recipe, options, **where)
    assert any(option in one.option and words in one.reason for one in found), found


def _advice(recipe: str, options: dict[str, Any], where: dict[str, Any]) -> list[Finding]:
    (check,) = check_cells([cell_of(recipe, options, **where)], build=False)
    assert not check.judged.rules
    return list(check.advice)


@pytest.mark.parametrize("case", TABLE["advice"], ids=lambda case: f"{case[4]}: {case[5]}")
def test_a_doubtful_cell_gets_advice_with_its_numbers(case: list[Any]) -> None:
    recipe, options, where, level, option, words = case
    found = [one for one in _advice(recipe, options, where) if one.option == option]
    assert any(one.level == level and words in one.reason for one in found), found


@pytest.mark.parametrize("case", TABLE["silent"], ids=str)
def test_nothing_is_said_at_the_other_side_of_each_edge(case: list[Any]) -> None:
    assert _advice(*case) == []


@pytest.mark.parametrize("ep_backend", ["standard", "deepep", "mxfp8_a2a"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "mxfp8_wgrad_hp"])
@pytest.mark.parametrize("recipe", [BIG, SMALL])
def test_published_layouts_pass(recipe: str, precision: str, ep_backend: str) -> None:
    assert not refusals(recipe, {}, precision=precision, ep_backend=ep_backend)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, [("error", "experimental.custom_import"), ("warning", "experimental.custom_import")]),
        ({"loss.num_chunks": 8}, [("error", "loss.num_chunks")]),
        ({"model.attention": "flash_attention_4"}, [("error", "model.attention")]),
    ],
)
def test_options_that_need_the_hooks(options: dict[str, Any], found: list[tuple[str, str]]) -> None:
    cell = cell_of(BIG, options, precision="mxfp8", ep_backend="deepep")
    on, off = check_cells([cell, dataclasses.replace(cell, hooks="mine")], build=False)
    rules = {"hooks_are_on", "released_torchtitan"}
    assert not [one for one in on.findings if one.rule in rules]
    assert {*found} <= {(one.level, one.option) for one in off.findings if one.rule in rules}


@pytest.mark.parametrize(
    ("ep_backend", "changes", "refused"),
    [
        ("deepep", {f"{P}.pipeline_parallel_schedule": "dualpipev"}, True),
        ("deepep", {f"{P}.pipeline_parallel_expert_parallel_overlap": False}, False),
        ("deepep", {f"{P}.pipeline_parallel_degree": 1}, False),
        ("mxfp8_a2a", {}, False),
    ],
)
def test_dual_pipe_v_and_exchanges(ep_backend: str, changes: dict[str, Any], refused: bool) -> None:
    options = {
        f"{P}.pipeline_parallel_schedule": "DualPipeV",
        "compile.components": ["loss"],
        "activation_checkpoint.mode": "none",
    }
    cell = cell_of(BIG, options | changes, ep_backend=ep_backend)
    rules = [one.rule for one in validation_errors(cell)]
    assert ("dual_pipe_v_overlap" in rules) is refused


@pytest.mark.parametrize("heads", [{"v_head": 64}, {"nope": 32}])
def test_flash_attention_is_refused_heads_that_nobody_compared(heads: dict[str, Any]) -> None:
    cell = cell_of(SMALL, {"model.attention": "flash_attention_4"})
    stack = cell.options.stack
    family = stack.families["deepseek_v3"]
    flavors = {"16B": dataclasses.replace(family.flavors["16B"], **heads)}
    changed = dataclasses.replace(
        stack, families={"deepseek_v3": dataclasses.replace(family, flavors=flavors)}
    )
    mine = dataclasses.replace(cell, options=dataclasses.replace(cell.options, stack=changed))
    (one,) = validation_errors(mine)
    assert one.reason.startswith("FlashAttention-4 is for heads of 192/128")
    assert validation_errors(with_options(mine, {"model.attention": "flavor"})) == []
