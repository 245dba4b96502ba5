"""The comparison with Megatron-Core: its formula, commands, parsing, tables and exit status."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench.proofs import peer
from bench.proofs.megatron import MARK, flops_per_token
from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT


def test_operations_of_a_token() -> None:
    whole = 8 * (2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048) + 3 * 2048 * 10_944
    whole += 7 * (8 * 3 * 2048 * 1408 + 2048 * 64) + 2048 * 102_400
    assert flops_per_token("16b") == 6 * (whole + 8 * 16 * 320 * 4096)
    cut = 3 * (7168 * 1536 + 1536 * 24_576 + 7168 * 576 + 512 * 32_768 + 16_384 * 7168)
    cut += 3 * 7168 * 18_432 + 2 * (9 * 3 * 7168 * 2048 + 7168 * 16) + 7168 * 129_280
    assert flops_per_token("slice") == 6 * (cut + 3 * 128 * 320 * 4096)


def test_both_sides_train_the_same(tmp_path: Path) -> None:
    run = peer.Run("slice", 2, 3, "random", "")
    ours = " ".join(peer.cell_command("slice.yaml", "float8+deepep", run, tmp_path, ["a.b=1"]))
    assert "run slice.yaml --cluster local --precision float8 --ep-backend deepep" in ours
    assert "global_batch_size=12 " in ours and ours.endswith("--set=a.b=1")
    assert "--set=debug.moe_force_load_balance=false --set=debug.moe_routing=random" in ours
    theirs = " ".join(peer.peer_command("python", "deepep+flash", run))
    assert "torch.distributed.run --standalone --nproc-per-node=2 -m bench.proofs.meg" in theirs
    assert theirs.endswith("deepep+flash --model slice --microbatches 3 --routing random")
    with pytest.raises(SystemExit):
        peer.main(["out", "--peers", "cudnn+fp9"])


STOPPED = "- bf16+standard, round 2: bf16: stopped: NaN"
RUNS = [(11.931, 110, "1.100x; 1.100x |"), (11.9367, 110, "DISAGREE"), (11.931, 0, STOPPED)]


@pytest.mark.parametrize(("flash", "speed", "shown"), [*RUNS, (math.nan, 110, "loss is nan")])
def test_a_run(
    tmp_path: Path, monkeypatch: Any, capsys: Any, flash: float, speed: int, shown: str
) -> None:
    asked: list[str] = []

    def output(words: list[str], log: Path, **environment: str) -> str:
        asked.append(words[3])
        if words[2] == "run":
            write_whole(Path(environment["COOKBOOK_RUNS"]) / "run/run.json", "")
        cell = {"name": "bf16", "status": "finished" if speed else "stopped", "reason": "NaN"}
        if words[2] == "report":
            speeds = {"tokens_per_second_per_gpu": speed, "memory_gib": 1}
            return json.dumps({"cells": [cell | speeds]})
        made: dict[str, Any] = {"tokens_per_second": 100.0, "versions": {"cuDNN": "91900"}}
        made |= {"first_loss": flash if "flash" in words else 11.93, "memory_gib": 2.0}
        return "noise\n" + MARK + json.dumps(made)

    monkeypatch.setattr(peer, "_output", output)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert peer.main([str(tmp_path)]) == (not shown.startswith("1.1"))
    assert asked[2:4] == ["cudnn", "flash"] and len(asked) == 8
    assert shown in capsys.readouterr().out
    run = peer.read_run(tmp_path / "peer.json")
    assert run.versions["cuDNN"] == "91900" and len(run.trainings) == 6
    assert ("| lead | 16B, 8 layers, BF16, one GPU" in peer.summary([run])) == bool(speed)


@pytest.mark.parametrize("page", ["README.md", "docs/evidence/performance.md"])
def test_claims_repeat_the_data_within_2_percent(page: str) -> None:
    folder = ROOT / "docs/evidence/performance/beside-megatron"
    run = peer.read_run(folder / "16b-round-robin.json")
    text = " ".join((ROOT / page).read_text().split())
    (claim,) = re.findall(r"([\d.]+) times Megatron-Core's speed", text)
    ratios = run.ratios("bf16+standard")
    assert ratios and ratios == pytest.approx([float(claim)] * len(ratios), rel=0.02)
