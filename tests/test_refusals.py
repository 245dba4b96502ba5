"""Wrong inputs are refused in one line that names the place, what was found and what to do."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.check.check import check_cells
from cookbook.check.report import render_text
from cookbook.cli.main import main
from cookbook.config.cell import Finding
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.recipe import load_precision, load_recipe
from cookbook.config.sweep import CellRequest, expand_sweep, load_sweep
from cookbook.predict.hardware import Documents
from cookbook.predict.rank import count_parameters, model_of
from cookbook.predict.step import StepTime, predict_step
from tests.check_cells import cell_of, cluster_of, refusals

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


@pytest.mark.parametrize("case", TABLE["remedies"], ids=lambda case: case[3])
def test_a_remedy_that_is_followed_works(
    case: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kind, wrong, words, says, right, followed = case
    monkeypatch.chdir(tmp_path)
    for status, text, line in ((2, wrong, words), (0, right, followed)):
        # A file that was read is kept by its name.
        path = tmp_path / str(status) / "mine.yaml"
        path.parent.mkdir()
        path.write_text(HEADS.get(kind, "") + text, encoding="utf-8")
        line = line.replace("MINE", str(path)).replace("ROOT", str(ROOT))
        assert main(line.split()) == status
        said = capfd.readouterr().err
        assert status == 0 or (says in said and len(said.splitlines()) == 1), said


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
    # The 16B's router scores by softmax, which is said wherever checkpoints are on.
    always = {"routing_bias_stays_here"} if case[0] == SMALL else set()
    assert {one.rule for one in _advice(*case)} <= always


@pytest.mark.parametrize("ep_backend", ["standard", "deepep", "mxfp8_a2a"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "mxfp8_wgrad_hp"])
@pytest.mark.parametrize("recipe", [BIG, SMALL])
def test_published_layouts_pass(recipe: str, precision: str, ep_backend: str) -> None:
    assert not refusals(recipe, {}, precision=precision, ep_backend=ep_backend)


TP, PP, CP = (f"{P}.{word}_parallel_degree" for word in ("tensor", "pipeline", "context"))
ONE_NODE = "qwen3_30b_a3b"


@pytest.mark.parametrize(
    ("recipe", "options", "reason"),
    [
        (ONE_NODE, {PP: 2}, "2: TorchTitan has no pipeline parallelism for Qwen3-MoE; try 1"),
        (ONE_NODE, {TP: 8}, "8 does not divide 4 key and value heads of Qwen3-MoE 30B-A3B; try 4"),
        (ONE_NODE, {"model.flavor": "8B"}, "Qwen3-MoE: found '8B', allowed: debugmodel_moe,"),
        (ONE_NODE, {"model.name": "gpt_oss"}, "TorchTitan's GPT-OSS has no pipelines, compilation"),
        (ONE_NODE, {"model.name": "llama3"}, "allowed: deepseek_v3, qwen3"),
        ("debug", {TP: 32}, "32 does not divide 16 attention heads of DeepSeek-V3 debugmodel"),
        (ONE_NODE, {CP: 2}, "context parallelism is unproved"),
    ],
)
def test_refusals_name_the_family(recipe: str, options: dict[str, Any], reason: str) -> None:
    found = refusals(recipe, options, nodes=8)
    assert reason in "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("flavor", "parameters"), [("30B-A3B", 30_532_122_624), ("235B-A22B", 235_093_634_560)]
)
def test_parameters_are_those_of_the_published_checkpoints(flavor: str, parameters: int) -> None:
    model = model_of(cell_of(ONE_NODE, {"model.flavor": flavor}))
    assert count_parameters(model)[0] == parameters


def test_lengths_of_documents_matter_where_attention_ends_with_them() -> None:
    short, long = (Documents(mean, mean / 2, "") for mean in (400, 40_000))

    def step(recipe: str, documents: Documents | None) -> StepTime:
        return predict_step(cell_of(recipe, cluster="h200-node"), documents=documents)

    by_document, whole = "deepseek_v3_16b_fast", ONE_NODE
    assert step(by_document, long).step_ms > 1.1 * step(by_document, short).step_ms
    assert step(whole, long) == step(whole, short) == step(whole, None)
    assert step(whole, None).documents is None


@pytest.mark.titan
def test_nobody_counts_documents_for_attention_to_whole_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n')
    texts = ["training.dataset=text", f"data.files=[{tmp_path}/*.jsonl]"]
    own = [word for one in texts for word in ("--set", one)]
    words = [ONE_NODE, "--cluster", "h200-node", *own]
    assert main(["plan", *words, "--vary", f"{TP}=1", "--best", "1"]) == 0
    assert "attention: whole sequences of 8,192 tokens, across docum" in capsys.readouterr().out
    assert main(["plan", *words, "--documents", "430:260"]) == 2
    said = capsys.readouterr().err
    assert "--documents: Qwen3-MoE 30B-A3B attends to whole sequences, across documents" in said
    options = {"training.dataset": "text", "data.files": [f"{tmp_path}/*.jsonl"]}
    (check,) = check_cells([cell_of(ONE_NODE, options, cluster="h200-node")])
    assert "attention: whole sequences of 8,192 tokens" in render_text(ONE_NODE, [check])
