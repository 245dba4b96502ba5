"""The comparison with Megatron-Core: its formula, commands, parsing, tables and exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.proofs import peer
from bench.proofs.megatron import MARK, flops_per_token, options_of


def test_operations_of_a_token() -> None:
    """Counted by hand: attention 6 projections, 1 dense layer, 7 or 2 MoE layers, the output."""
    whole = 8 * (2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048) + 3 * 2048 * 10_944
    whole += 7 * (8 * 3 * 2048 * 1408 + 2048 * 64) + 2048 * 102_400
    assert flops_per_token("16b") == 6 * (whole + 8 * 16 * 320 * 4096)
    cut = 3 * (7168 * 1536 + 1536 * 24_576 + 7168 * 576 + 512 * 32_768 + 16_384 * 7168)
    cut += 3 * 7168 * 18_432 + 2 * (9 * 3 * 7168 * 2048 + 7168 * 16) + 7168 * 129_280
    assert flops_per_token("slice") == 6 * (cut + 3 * 128 * 320 * 4096)


def test_both_sides_train_the_same(tmp_path: Path) -> None:
    run = peer.Run("slice", 2, 3, "random", "")
    words = peer.cell_command("recipe.yaml", "float8+deepep", run, tmp_path, ["a.b=1"])
    settings = dict(word[6:].split("=") for word in words if word.startswith("--set="))
    assert settings["training.global_batch_size"] == "12"
    assert settings["debug.moe_routing"] == "random" and settings["a.b"] == "1"
    assert settings["debug.moe_force_load_balance"] == "false"
    assert "float8" in words and "deepep" in words
    theirs = " ".join(peer.peer_command("python", "deepep+flash", run))
    assert "torch.distributed.run --standalone --nproc-per-node=2 -m bench.proofs.meg" in theirs
    assert theirs.endswith("deepep+flash --model slice --microbatches 3 --routing random")
    options = options_of("deepep+blockwise+padded", "slice")
    assert options["moe_layer_freq"] == [0, 1, 1] and options["fp8"] == "e4m3"
    with pytest.raises(SystemExit):
        peer.main(["out", "--peers", "cudnn+fp9"])


@pytest.mark.parametrize(
    ("flash", "speed", "shown"),
    [
        (11.931, 110.0, "1.100x; 1.100x |"),
        (11.9367, 110.0, "DISAGREE"),
        (float("nan"), 110.0, "DISAGREE"),
        (11.931, 0.0, "- bf16+standard, round 2: bf16: stopped: NaN"),
    ],
)
def test_a_run(
    tmp_path: Path, monkeypatch: Any, capsys: Any, flash: float, speed: float, shown: str
) -> None:
    asked: list[str] = []

    def output(words: list[str], **environment: str) -> str:
        asked.append(words[3])
        if words[2] == "run":
            (Path(environment["COOKBOOK_RUNS"]) / "run").mkdir(parents=True)
            (Path(environment["COOKBOOK_RUNS"]) / "run/run.json").touch()
        speeds = {"tokens_per_second_per_gpu": speed, "memory_gib": 1}
        cell = {"name": "bf16", "status": "finished" if speed else "stopped"}
        if words[2] == "report":
            return json.dumps({"cells": [{**cell, **speeds, "reason": "NaN"}]})
        made = {"losses": [flash if "flash" in words else 11.93], "memory_gib": 2.0}
        versions = {"versions": {"cuDNN": "91900"}}
        return "noise\n" + MARK + json.dumps({**made, **versions, "tokens_per_second": 100.0})

    monkeypatch.setattr(peer, "_output", output)
    monkeypatch.setattr(peer, "_joined_corpus", lambda folder: folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert peer.main([str(tmp_path)]) == (not shown.startswith("1.1"))
    assert asked[2:4] == ["cudnn", "flash"] and len(asked) == 8
    assert shown in capsys.readouterr().out
    (run,) = peer.read_runs((tmp_path / "peer.json").read_text())
    assert run.versions["cuDNN"] == "91900" and len(run.trainings) == 6
    assert ("| lead | 16B, 8 layers, BF16, one GPU" in peer.summary([run])) == bool(speed)
