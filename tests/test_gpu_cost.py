"""The benchmark of padding and splitting, tried out on two CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.titan

ROOT = Path(__file__).resolve().parent.parent


def bench(*words: str, ranks: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    return subprocess.run(
        [sys.executable, *torchrun, "--rdzv-endpoint=localhost:0", "-m", "bench.gpu_cost", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_one_command_writes_what_both_cost(tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    ended = bench("--device=cpu", "--step-ms=1000", "-o", str(output), ranks=2)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(output.read_text())
    assert found["device"] == "cpu (tried out, not a result)"
    layer, step = found["milliseconds_per_layer"], found["milliseconds_per_step"]
    # The 16B model has 26 MoE layers; the figures are rounded to 0.0001 ms.
    padding = layer["permute, padded to 32"] - layer["permute, not padded"]
    assert step["padding"] == pytest.approx(26 * padding, abs=0.005)
    splitting = layer["in and out, split"] - layer["in and out, not split"]
    assert step["splitting"] == pytest.approx(26 * splitting, abs=0.005)
    together = (step["padding"] + step["splitting"]) / 1000 * 100
    assert found["percent_of_step"]["together"] == pytest.approx(together, abs=0.005)


def test_one_rank_is_told_that_tp_needs_two() -> None:
    ended = bench("--device=cpu", ranks=1)
    assert ended.returncode != 0
    assert "torchrun --nproc-per-node=2" in ended.stderr
