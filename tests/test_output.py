"""Where `render` and `report` write, what they leave alone, and what they say if they cannot."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from tests.submit import listing, submit

RENDER = ("render", "debug", "--cluster", "local")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    return submit(*RENDER, runs=tmp_path_factory.mktemp("runs")).stdout


def test_a_dash_is_standard_output(tmp_path: Path, script: str) -> None:
    answer = submit(*RENDER, "-o", "-", runs=tmp_path / "runs")
    assert (answer.status, answer.stdout) == (0, script)
    assert not (ROOT / "-").exists()


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    null = tmp_path / "null"
    os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert submit(*RENDER, "-o", str(null), runs=tmp_path / "runs").status == 0
    assert stat.S_ISCHR(null.stat().st_mode)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/dev/full", "No space left on device"),
        ("{folder}", "Is a directory"),
        ("{folder}/file/x.sh", "File exists"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, path: str, reason: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "file").write_text("")
    path = path.format(folder=folder)
    answer = submit(*RENDER, "-o", path, runs=tmp_path / "runs")
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr == f"submit.py: --output {path}: cannot be written: {reason}\n"
    assert listing(folder) == ["file"]
