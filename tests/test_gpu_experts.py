"""The benchmark of the experts' GEMMs, tried out on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cookbook.base.paths import ROOT

pytestmark = pytest.mark.titan

SMALL = ("--device=cpu", "--rows=256", "--experts=4", "--dim=64", "--hidden=32", "--rounds=1")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu_experts", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_both_ways_compute_the_same_and_every_product_is_timed() -> None:
    ended = bench(*SMALL)
    assert ended.returncode == 0, ended.stderr
    apart = {name: float(by) for name, by in re.findall(r"(.+): apart by (\S+)", ended.stdout)}
    # The gradient of the rows is rounded once where it was rounded twice and added.
    assert 1e-3 < apart.pop("rows") < 4e-3
    assert len(apart) == 5 and set(apart.values()) == {0.0}
    assert len(re.findall(r": \d+\.\d\d ms, \d+ TFLOP/s", ended.stdout)) == 2 + 8


def test_groups_that_no_gemm_takes_are_refused_in_one_line() -> None:
    ended = bench(*SMALL[:1], "--rows=100")
    assert ended.returncode == 2 and "a multiple of 8 for each of --experts" in ended.stderr
