"""A command of the convergence experiment starts the training, waits for it, and packs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench import gpu_convergence
from bench.convergence_plan import TRIAL
from bench.convergence_runs import CURVES
from bench.gpu_convergence import ARCHIVE, session
from cookbook.base.errors import InputError

pytestmark = pytest.mark.bench


def test_a_command_starts_the_training_waits_and_packs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    (out / CURVES).mkdir(parents=True)
    (out / CURVES / "bf16-seed1.csv").write_text("step,loss\n1,4.0\n")
    # Another process has the number of a trainer that is gone.
    (out / "trainer.pid").write_text(f"{os.getpid()} 1.0")
    words = ["--trial", "--data", str(tmp_path), "train", str(out), "--seconds", "1"]
    session(out, words, results, 60)
    shown = capsys.readouterr().out
    assert "steps.json: is not there" in shown
    assert "1 runs finished; the training has ended" in shown
    assert [path.name for path in results.iterdir()] == [ARCHIVE]


def test_a_later_command_waits_for_the_same_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"
    script = f"""
import pathlib, sys, time
path = pathlib.Path({str(started)!r})
path.write_text(path.read_text() + "x" if path.exists() else "x")
time.sleep(float(sys.argv[-1]))
"""
    command = tmp_path / "python"
    (tmp_path / "script.py").write_text(script)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "script.py"} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setattr("bench.gpu_convergence.sys.executable", str(command))
    session(tmp_path / "out", ["train", "4"], tmp_path / "results", 0.5)
    assert "the training goes on" in capsys.readouterr().out
    session(tmp_path / "out", ["train", "4"], tmp_path / "results", 60)
    assert "the training has ended" in capsys.readouterr().out
    assert started.read_text() == "x"


def test_the_runs_need_the_text_of_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_convergence, "make_text", lambda *_: "abc")
    chosen = {"steps": 10, "beside": 2, "text": "xyz", "longest_run": 9}
    (tmp_path / "steps.json").write_text(json.dumps(chosen))
    with pytest.raises(InputError, match="not those of the rehearsal"):
        gpu_convergence.make_runs(TRIAL, tmp_path / "out", None, tmp_path, 60)
