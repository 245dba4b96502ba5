"""Weights, texts and validation that would fail in a job are refused before it is queued."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.paths import ROOT
from cookbook.check.check import check_cells
from cookbook.config.validate.training import training_files
from tests.check_cells import STACK, cell_of, refusals

C, V, D = "checkpoint", "validation", "data"
ON = {f"{C}.enable": True}
TEXTS = {"training.dataset": "text"}


@pytest.mark.parametrize(
    ("recipe", "options", "option", "words"),
    [
        ("debug", {f"{V}.enable": True}, f"{V}.steps", "found -1"),
        (
            "debug",
            {f"{V}.enable": True, f"{V}.steps": 1, f"{V}.freq": 0},
            f"{V}.freq",
            "found 0",
        ),
        (
            "debug",
            {f"{V}.enable": True, f"{V}.steps": 1, f"{V}.seq_len": 64},
            f"{V}.seq_len",
            "found 64",
        ),
        ("debug", TEXTS, f"{D}.files", "is empty"),
        ("debug", {f"{D}.files": ["x"]}, f"{D}.files", "training.dataset is c4"),
        (
            "debug",
            {f"{V}.enable": True, f"{V}.steps": 1, f"{V}.dataset": "text"},
            f"{D}.validation_files",
            "is empty",
        ),
        ("debug", ON | {f"{C}.folder": "s3://bucket/x"}, f"{C}.folder", "found s3://bucket/x"),
        ("debug", ON | {f"{C}.folder": "../mine"}, f"{C}.folder", "leaves the cell's folder"),
        ("debug", {f"{C}.initial_load_in_hf": True}, f"{C}.initial_load_in_hf", "no effect"),
        (
            "debug",
            ON | {f"{C}.initial_load_in_hf_quantized": True},
            f"{C}.initial_load_in_hf_quantized",
            "is for published weights",
        ),
        (
            "debug",
            ON | {f"{C}.initial_load_in_hf": True, f"{C}.initial_load_model_only": False},
            f"{C}.initial_load_model_only",
            "hold the model alone",
        ),
        (
            "deepseek_v3_671b",
            ON | {f"{C}.last_save_in_hf": True},
            f"{C}.last_save_in_hf",
            "rank 0 would write 2,",
        ),
    ],
)
def test_options_that_would_end_a_job_are_refused(
    recipe: str, options: dict[str, Any], option: str, words: str
) -> None:
    found = refusals(recipe, options, cluster="local" if recipe == "debug" else "soperator-b200")
    assert any(option in one.option and words in one.reason for one in found), found


def test_a_small_model_may_be_saved_for_transformers() -> None:
    assert not refusals("debug", ON | {f"{C}.last_save_in_hf": True}, cluster="local")


def save(folder: Path, shapes: dict[str, list[int]], index: bool = True) -> None:
    """Headers of safetensors files, as far as the rules read them."""
    folder.mkdir(exist_ok=True)
    entry = {"dtype": "F32", "data_offsets": [0, 0]}
    header = json.dumps({name: entry | {"shape": shape} for name, shape in shapes.items()}).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    if index:
        text = json.dumps({"weight_map": dict.fromkeys(shapes, "a.safetensors")})
        (folder / "model.safetensors.index.json").write_text(text)


def shapes_of(flavor: str, **changes: Any) -> dict[str, list[int]]:
    model = replace(STACK.families["deepseek_v3"].flavors[flavor], **changes)
    norms = {f"model.layers.{n}.input_layernorm.weight": [1] for n in range(model.n_layers)}
    return {"model.embed_tokens.weight": [model.vocab, model.dim]} | norms


def faults(options: dict[str, Any]) -> list[str]:
    cell = cell_of("debug", options, cluster="local")
    return [str(finding) for finding in training_files(cell)]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("changes", "extra", "options", "says"),
    [
        ({}, {}, {}, ""),
        ({"n_layers": 7}, {}, {}, ""),
        ({"n_layers": 27}, {}, {}, "has 27 layers, DeepSeek-V3 debugmodel has 6"),
        ({"vocab": 99}, {}, {}, "is [99, 256], DeepSeek-V3 debugmodel has [2048, 256]"),
        ({}, {"model.layers.0.x.weight_scale_inv": [1]}, {}, "is quantized in blocks of FP8"),
        ({}, {}, {f"{C}.initial_load_in_hf_quantized": True}, "is not quantized"),
    ],
)
def test_published_weights_that_do_not_fit_are_refused(
    changes: dict[str, int],
    extra: dict[str, list[int]],
    options: dict[str, Any],
    says: str,
    index: bool,
    tmp_path: Path,
) -> None:
    save(tmp_path / "hf", shapes_of("debugmodel", **changes) | extra, index)
    path = {f"{C}.initial_load_path": str(tmp_path / "hf"), f"{C}.initial_load_in_hf": True}
    found = faults(ON | path | options)
    assert len(found) == bool(says) and says in "".join(found), found


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    path = {f"{C}.initial_load_path": str(folder), f"{C}.initial_load_in_hf": True}
    folder.mkdir()
    assert "has no *.safetensors files" in faults(ON | path)[0]
    save(folder, shapes_of("debugmodel"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of its files, b.safetensors first" in faults(ON | path)[0]
    (folder / "model.safetensors.index.json").unlink()
    (folder / "a.safetensors").write_bytes(b"<html>not found</html>")
    assert "cannot be read" in faults(ON | path)[0]


def test_texts_are_read_before_the_job(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"content": "x"}\n')
    files = TEXTS | {f"{D}.files": [str(path)]}
    (found,) = faults(files)
    assert f"{path}:2: has no key 'text'" in found and "data.text_key" in found
    path.write_text('{"text": "x"}\n')
    assert not faults(files)
    assert "matches no file" in faults(files | {f"{D}.files": [f"{tmp_path}/b*.jsonl"]})[0]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    def tokenizer(size: int) -> dict[str, Any]:
        vocab = {f"t{number}": number for number in range(size - 1)}
        added = [{"id": size - 1, "content": "<eos>"}]
        content = {"model": {"vocab": vocab}, "added_tokens": added}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return {"model.hf_assets_path": str(tmp_path)}

    assert not faults(tokenizer(2048))
    (found,) = faults(tokenizer(2049))
    assert "has tokens up to 2048, DeepSeek-V3 debugmodel takes tokens up to 2047" in found


def test_relative_texts_start_at_the_cookbook(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.jsonl").write_text('{"text": "x"}\n')
    (found,) = faults(TEXTS | {f"{D}.files": ["README.jsonl"]})
    assert "matches no file" in found and not (ROOT / "README.jsonl").exists()


def test_cells_share_no_absolute_checkpoint_folder() -> None:
    cells = [
        cell_of("debug", ON | {f"{C}.folder": "/data/mine"}, cluster="local", precision=precision)
        for precision in ("bf16", "mxfp8")
    ]
    folders = [cell.options[f"{C}.folder"] for cell in cells]
    assert folders == [f"/data/mine/{cell.name}" for cell in cells]


def advice(options: dict[str, Any]) -> dict[str, str]:
    (check,) = check_cells([cell_of("debug", options, cluster="local")], build=False)
    return {one.rule: one.reason for one in check.advice}


def test_a_warm_up_longer_than_the_run_is_warned_of() -> None:
    warm_up = {"lr_scheduler.warmup_steps": 9}
    assert "9 steps are longer than the run" in advice(warm_up)["warm_up_ends"]
    assert "warm_up_ends" not in advice({"lr_scheduler.warmup_steps": 8})
    assert "warm_up_ends" not in advice(warm_up | {"lr_scheduler.total_steps": 9})
    assert "warm_up_ends" not in advice(warm_up | {"debug.moe_force_load_balance": True})


def test_check_says_how_much_is_read(tmp_path: Path) -> None:
    save(tmp_path / "hf", shapes_of("debugmodel"))
    with (tmp_path / "hf/a.safetensors").open("ab") as file:
        file.truncate(30_000_000)
    path = {f"{C}.initial_load_path": str(tmp_path / "hf"), f"{C}.initial_load_in_hf": True}
    assert "0.03 GB are read from" in advice(ON | path)["weights_are_read"]
