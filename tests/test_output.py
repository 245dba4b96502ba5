"""Where `render` and `report` write, what they leave alone, and what they say if they cannot."""

from __future__ import annotations

import os
import shutil
import stat
import threading
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


def test_a_pipe_gets_the_script(tmp_path: Path, script: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert submit(*RENDER, "-o", str(pipe), runs=tmp_path / "runs").status == 0
    reader.join(10)
    assert read[0].splitlines()[-1] == script.splitlines()[-1]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "kept.sh").write_text("old")
    (tmp_path / "link.sh").symlink_to("kept.sh")
    assert submit(*RENDER, "-o", str(tmp_path / "link.sh"), runs=tmp_path / "runs").status == 0
    assert (tmp_path / "link.sh").is_symlink()
    assert (tmp_path / "kept.sh").read_text().startswith("#!/bin/bash")
    assert os.access(tmp_path / "kept.sh", os.X_OK)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/dev/full", "No space left on device"),
        ("{folder}", "Is a directory"),
        ("{folder}/file/x.sh", "Not a directory"),
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


@pytest.mark.parametrize("form", ["md", "json", "html"])
def test_a_report_that_cannot_be_kept_is_printed_and_a_page_is_not(
    tmp_path: Path, form: str
) -> None:
    run = tmp_path / "runs" / "matrix-20261121-192057"
    shutil.copytree(ROOT / "tests" / "old_run", run)
    (run / "report.md" / "x").mkdir(parents=True)
    answer = submit("report", "--format", form, runs=tmp_path / "runs")
    (said,) = answer.stderr.splitlines()
    if form == "html":
        assert (answer.status, answer.stdout) == (1, "")
        assert said == f"submit.py: {run / 'report.md'}: Is a directory"
    else:
        assert answer.status == 0 and "debug-mxfp8-standard" in answer.stdout
        assert said == f"submit.py: not kept: {run / 'report.md'}: Is a directory"
