"""Copy and edit, from end to end: everything renamed, then listed, checked, trained and reported.

The real Trainer runs on the CPU; low precision is emulated there, and what is active is observed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cookbook.base.paths import ROOT
from tests.cells import PRECISIONS
from tests.checkout import copy_checkout
from tests.submit import environment

pytestmark = [pytest.mark.titan, pytest.mark.nightly]

# What the precisions that train here turn on: (grouped GEMMs, linear layers).
TURNED_ON = {
    "bf16": ("bf16", "bf16"),
    "mxfp8_wgrad_hp": ("mxfp8_wgrad_with_hp", "bf16"),
    "mxfp8_linear": ("mxfp8", "mx"),
}
TRAINED = [*TURNED_ON, "float8"]
# TorchAO computes FP8 rowwise on GPUs alone.
NO_FLOAT8 = "my-float8 needs a GPU of compute capability 9.0, there is no CUDA GPU"


class Copies:
    """A checkout in which every recipe, overlay, cluster and sweep that a test uses is a copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_checkout(folder / "moe-cookbook", assets=True)
        shutil.rmtree(self.folder / "assets")
        (self.folder / "assets").symlink_to(ROOT / "assets")
        self.new("my-debug", "debug", "training:\n", "training:\n  # of mine\n")
        self.new("my-machine", "local", "OMP_NUM_THREADS: 1", "OMP_NUM_THREADS: 2")
        for name in PRECISIONS:
            self.new(f"my-{name}", name, "description:", "optimizer: {lr: 4e-4}\ndescription:")
        self.new("my-exchange", "standard", "description:", "optimizer: {eps: 1e-7}\ndescription:")
        self.sweep("all-of-mine", PRECISIONS)
        self.sweep("some-of-mine", TRAINED)

    def new(self, name: str, source: str, line: str, change: str) -> None:
        """Copy with `submit.py new`, and edit a line of the copy."""
        done = self.run("new", name, "--from", source)
        assert done.returncode == 0, done.stderr
        (path,) = (self.folder / "recipes").rglob(f"{name}.yaml")
        text = path.read_text(encoding="utf-8")
        assert line in text
        path.write_text(text.replace(line, change, 1), encoding="utf-8")

    def sweep(self, name: str, precisions: Sequence[str]) -> None:
        self.new(name, "smoke", "recipes: [debug]", "recipes: [my-debug]")
        path = self.folder / "recipes" / "sweep" / f"{name}.yaml"
        mine = "precision: [" + ", ".join(f"my-{one}" for one in precisions) + "]"
        text = re.sub(r"(?m)^precision: .*", mine, path.read_text(encoding="utf-8"))
        text = re.sub(r"(?m)^ep_backend: .*", "ep_backend: [my-exchange]", text)
        text = re.sub(r"(?m)^baseline: .*\n", "", text)
        text += "options: {training.steps: 2, training.seq_len: 64}\n"
        path.write_text(text, encoding="utf-8")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.folder / "submit.py"), *words],
            cwd=self.folder,
            env=environment(self.folder / "runs"),
            capture_output=True,
            text=True,
            timeout=900,
        )

    def trained(self, *words: str) -> list[dict[str, Any]]:
        """The cells of the report of what `submit.py WORDS` trained."""
        done = self.run(*words, "--cluster", "my-machine")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        report = self.run("report", "--format", "json")
        cells: list[dict[str, Any]] = json.loads(report.stdout)["cells"]
        return cells


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    return Copies(tmp_path_factory.mktemp("copies"))


def test_copies_are_listed_and_shown(copies: Copies) -> None:
    listed = copies.run("list").stdout
    for name in ("my-debug", "my-machine", "my-exchange", "all-of-mine"):
        assert re.search(rf"(?m)^  {name} ", listed), listed
    words = ("my-debug", "--precision", "my-float8", "--ep-backend", "my-exchange")
    shown = copies.run("show", *words, "--cluster", "my-machine", "--origins")
    assert "name: my-debug-my-float8-my-exchange" in shown.stdout
    assert "recipes/precision/my-float8.yaml" in shown.stdout


def test_copies_are_checked_by_what_they_turn_on(copies: Copies) -> None:
    words = ("check", "all-of-mine", "--cluster", "my-machine", "--json")
    cells = json.loads(copies.run(*words).stdout)["cells"]
    assert [cell["precision"] for cell in cells] == [f"my-{name}" for name in PRECISIONS]
    for cell in cells:
        assert cell["built"] is cell["may_run"] is (cell["precision"] != "my-float8"), cell
        if not cell["may_run"]:
            assert cell["summary"] == NO_FLOAT8


def test_copies_train_and_are_reported_under_their_own_names(copies: Copies) -> None:
    cells = copies.trained("sweep", "some-of-mine", "--no-check")
    assert [cell["name"] for cell in cells] == [
        f"my-debug-my-{name}-my-exchange" for name in TRAINED
    ]
    for cell, name in zip(cells, TRAINED, strict=True):
        if name == "float8":
            assert (cell["status"], cell["reason"]) == ("refused", NO_FLOAT8)
            continue
        active = cell["active"]
        assert (cell["status"], cell["steps"]) == ("finished", 2)
        assert (active["precision"], active["ep_backend"]) == (f"my-{name}", "my-exchange")
        assert (active["grouped_gemms"], active["linear_layers"]) == TURNED_ON[name]
        assert active["dispatch"] == "standard"
        assert active["emulated"] is (name != "bf16")
