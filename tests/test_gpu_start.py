"""The benchmark of starts: what it reads from a log, and all of it tried out on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_start
from bench.gpu_start import job_of, measure, parts_of
from cookbook.base.gpus import Gpu
from cookbook.base.paths import ROOT
from cookbook.config.resolve import this_machine
from cookbook.config.validate import validation_errors
from cookbook.titan.common import kernel_cache

H200 = this_machine(2, Gpu("NVIDIA H200", 9.0, 139.8))
COMMAND = [sys.executable, "-m", "bench.gpu_start"]
LOG = """\
[rank0]:[titan] 2026-01-01 10:00:12,000 - root - INFO - Starting job: a
[rank0]:[titan] 2026-01-01 10:00:13,000 - root - INFO - Building device mesh with parallelism: pp=1
[rank0]:[titan] 2026-01-01 10:00:14,500 - root - INFO - Building deepseek_v3 16B_8layerswith {
[rank0]:[titan] 2026-01-01 10:00:20,500 - root - INFO - Self-check: 9 kernels proved in 6.0 s
[rank0]:[titan] 2026-01-01 10:00:24,000 - root - INFO - Training starts at step 1
[rank0]:[titan] 2026-01-01 10:00:40,000 - root - INFO - \x1b[31mstep:  1  loss: 12.0
[rank0]:[titan] 2026-01-01 10:00:40,500 - root - INFO - \x1b[31mstep:  2  loss: 11.9
"""


def test_the_parts_of_a_start_are_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    parts = parts_of(log, 50.5)
    assert list(parts.values()) == [22.0, 2.5, 6.0, 3.5, 16.0, 0.5]
    assert sum(parts.values()) == 50.5
    # As released there is no self-check.
    log.write_text("".join(line for line in LOG.splitlines(True) if "Self-check" not in line))
    assert parts_of(log, 50.5)["model and optimizer"] == 9.5


def test_each_start_has_its_cell_and_empty_caches_but_the_last(tmp_path: Path) -> None:
    jobs = {start: job_of(start, tmp_path, H200) for start in gpu_start.STARTS}
    assert [job.released for job in jobs.values()] == [True, False, False, False]
    assert len({job.caches for job in jobs.values()}) == 3
    assert jobs["again"].caches == jobs["compiled"].caches
    assert {job.cell.options["model.flavor"] for job in jobs.values()} == {"16B_8layers"}
    assert jobs["fast"].cell.options["model.attention"] == "flash_attention_4"
    assert jobs["fast"].cell.options["parallelism.expert_parallel_degree"] == 2


def test_one_gpu_starts_the_same_without_deepep(tmp_path: Path) -> None:
    alone = this_machine(1, H200.gpu)
    jobs = {start: job_of(start, tmp_path, alone) for start in gpu_start.STARTS}
    assert {job.cell.ep_backend.name for job in jobs.values()} == {"standard"}
    assert [job.released for job in jobs.values()] == [True, False, False, False]
    assert all(validation_errors(job.cell) == [] for job in jobs.values() if not job.released)
    own, other = jobs["fast"].cell.options, job_of("fast", tmp_path, H200).cell.options
    names = own.settings.keys() | other.settings.keys()
    apart = {name for name in names if own[name] != other[name]}
    assert {name.partition(".")[0] for name in apart} <= {
        "parallelism",
        "deepep",
        "job",
        "cookbook",
        "activation_checkpoint",
    }


def test_kernels_that_are_there_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "COMPILED", tmp_path)
    (tmp_path / "sm90-cuda13").mkdir()
    with pytest.raises(SystemExit, match="take them away first"):
        measure(["fast"], tmp_path / "out", H200, 0.0)


@pytest.mark.titan
def test_it_can_be_tried_out_on_a_cpu(tmp_path: Path) -> None:
    words = [str(tmp_path), "compiled", "again", "--device", "cpu"]
    done = subprocess.run(
        [*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "start.json").read_text())
    first, again = content["starts"].values()
    assert content["gpu"] is None and "kernels" not in content
    for note in (first, again):
        assert list(note["parts"]) == [*gpu_start.ENDS]
        assert sum(note["parts"].values()) == pytest.approx(note["start_seconds"], abs=0.5)
        assert note["proofs"] and len(note["losses"]) == 3
    assert first["losses"] == again["losses"]


def test_no_start_is_measured_that_compiles_what_it_imports(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*COMMAND, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not any(tmp_path.iterdir())
    assert "PYTHONDONTWRITEBYTECODE is set" in done.stderr and "unset it" in done.stderr


def test_a_wrong_word_ends_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(tmp_path), "warm"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "found warm, allowed: released, fast, compiled, again" in done.stderr
