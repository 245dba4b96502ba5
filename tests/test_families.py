"""The model families that the driver knows, those that it refuses, and the reasons."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.paths import ROOT
from cookbook.check.check import check_cells
from cookbook.check.report import render_text
from cookbook.cli.main import main
from cookbook.predict.facts import Documents
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import StepTime, predict_step
from tests.check_cells import STACK, cell_of, refusals

P = "parallelism"
TP, PP = (f"{P}.{word}_parallel_degree" for word in ("tensor", "pipeline"))
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
        (
            ONE_NODE,
            {f"{P}.context_parallel_degree": 2, "model.attention": "flash_attention_4"},
            "FlashAttention-4 computes a sequence on one rank",
        ),
    ],
)
def test_refusals_name_the_family(recipe: str, options: dict[str, Any], reason: str) -> None:
    found = refusals(recipe, options, nodes=8)
    assert reason in "\n".join(map(str, found))


def test_families_have_what_layouts_and_predictions_ask_for() -> None:
    qwen3 = STACK.families["qwen3"]
    assert list(STACK.families) == ["deepseek_v3", "qwen3"] and not qwen3.has_pipelines
    assert "gpt_oss" in STACK.refused_families
    model = qwen3.flavors["30B-A3B"]
    assert (model.heads, model.kv_heads, model.head_dims) == (32, 4, (128, 128))
    assert model.is_moe(0) and not STACK.families["deepseek_v3"].flavors["16B"].is_moe(0)


def test_a_family_is_named_in_its_own_file_alone() -> None:
    names = "|".join([*STACK.families, *STACK.refused_families])
    found = subprocess.run(
        ["grep", "-rlEw", "--include=*.py", names, "cookbook"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    folder = "cookbook/titan/tt_0_2_2/families"
    files = {*found.stdout.split()} - {f"{folder}/__init__.py"}
    assert files <= {f"{folder}/{name}.py" for name in STACK.families}


@pytest.mark.parametrize(
    ("flavor", "parameters"), [("30B-A3B", 30_532_122_624), ("235B-A22B", 235_093_634_560)]
)
def test_parameters_are_those_of_the_published_checkpoints(flavor: str, parameters: int) -> None:
    (rank,) = describe_ranks(cell_of(ONE_NODE, {"model.flavor": flavor}))
    assert rank.parameters == parameters


def test_lengths_of_documents_matter_where_attention_ends_with_them() -> None:
    short, long = (Documents(mean, mean / 2, "") for mean in (400, 40_000))

    def step(recipe: str, documents: Documents | None) -> StepTime:
        return predict_step(cell_of(recipe, cluster="h200-node"), documents=documents)

    by_document, whole = "deepseek_v3_16b_fast", ONE_NODE
    assert step(by_document, long).step_ms > 1.1 * step(by_document, short).step_ms
    assert step(whole, long) == step(whole, short) == step(whole, None)
    assert step(whole, None).documents is None


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
