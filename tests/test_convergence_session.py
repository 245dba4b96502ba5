"""A command of the convergence experiment starts the training, waits for it, and packs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench import gpu_convergence
from bench.convergence_plan import TRIAL
from bench.convergence_runs import CURVES, Place
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


def test_how_ranks_share_gpus_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()
    monkeypatch.setattr(gpu_convergence, "session", lambda out, words, *_: asked.append([*words]))
    words = ["x", "--data", str(tmp_path), "session", "/tmp/c", "--results", "r"]
    for more in ([], ["--share", "--beside", "10"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert gpu_convergence.main() == 0
    plain, shared = asked
    assert shared[: len(plain)] == plain
    assert sorted(shared[len(plain) :]) == sorted(["--share", "--beside", "10"])
    # The trainer's own command takes them, and makes its place by them.
    places = list[tuple[int, bool]]()
    chosen = {"steps": 10, "beside": 2, "text": "abc", "longest_run": 9}
    (tmp_path / "steps.json").write_text(json.dumps(chosen))
    monkeypatch.setattr(gpu_convergence, "make_text", lambda *_: "abc")
    monkeypatch.setattr(gpu_convergence, "train", lambda *_: 0)

    def here(out: Path, text: str, beside: int, shares: bool) -> Place:
        places.append((beside, shares))
        return Place(out, text, None, [], beside)

    monkeypatch.setattr(Place, "here", here)
    for found in asked:
        monkeypatch.setattr(sys, "argv", ["x", *found])
        assert gpu_convergence.main() == 0
    assert places == [(2, False), (10, True)]
