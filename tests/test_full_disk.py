"""A disk that fills up while a cell trains costs its logs, and not what is said of its end."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cookbook.launch.script import render_script
from tests.cells import Point
from tests.programs import PYTHON, write_program
from tests.submit import ROOT

# More than a disk of this size holds; the training itself writes nothing else and ends well.
_TORCHRUN = """\
#!/bin/bash
echo "[rank0]: step 1"
head -c 4M /dev/zero >"${DISK}/runs/a-file-of-somebody-else"
for i in {1..2000}; do echo "[rank0]: a line of the log, the last step is far away ${i}"; done
exit "${TORCHRUN_STATUS:-0}"
"""


@pytest.fixture
def _is_root() -> None:
    if os.geteuid() == 0:
        return
    if os.environ.get("CI") == "true":
        pytest.fail("a disk of its own needs root, which CI must have", pytrace=False)
    pytest.skip("a disk of its own needs root")


@pytest.mark.usefixtures("_is_root")
@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (1, "failed")])
def test_a_full_disk_changes_nothing_of_the_end(tmp_path: Path, status: int, state: str) -> None:
    disk, binaries = tmp_path / "disk", tmp_path / "venv" / "bin"
    disk.mkdir()
    write_program(binaries / "torchrun", _TORCHRUN)
    write_program(binaries / "python", PYTHON)
    script = tmp_path / "train.sh"
    script.write_text(render_script(Point("debug", "bf16", "standard", "local").cell()))
    cell = disk / "runs" / "r" / "a"
    # The mount is this process's own, and gone with it.
    shell = (
        'mount -t tmpfs -o size=256k disk "${DISK}" && bash "$1"; echo "code=$?"; '
        'cat "${CELL_DIR}/status.json"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", shell, "bash", str(script)],
        cwd=ROOT,
        env={
            **os.environ,
            "DISK": str(disk),
            "CELL_DIR": str(cell),
            "COOKBOOK_RUNS": str(disk / "runs"),
            "VENV": str(tmp_path / "venv"),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TORCHRUN_STATUS": str(status),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    words, _, found = done.stdout.rpartition("code=")
    code, _, written = found.partition("\n")
    assert json.loads(written)["state"] == state, done
    assert int(code) == status, done
    assert "Traceback" not in done.stderr + words
    # The job's own log is elsewhere, and whole.
    assert "far away 2000" in words
