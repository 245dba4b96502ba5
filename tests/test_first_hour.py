"""The commands of docs/guide/first-hour.md, one after another, on a CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cookbook.base.paths import ROOT
from tests.cells import walked
from tests.checkout import copy_checkout

pytestmark = pytest.mark.titan

PAGE = (ROOT / "docs/guide/first-hour.md").read_text(encoding="utf-8")


def commands(section: str) -> list[str]:
    """The commands of a numbered section."""
    text = PAGE.split(f"\n## {section}.")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return walked([line for block in blocks for line in block.splitlines()])


def test_a_reader_trains_validates_exports_and_continues(tmp_path: Path) -> None:
    folder = copy_checkout(tmp_path / "checkout")
    (folder / "assets").symlink_to(ROOT / "assets")
    (folder / ".venv").symlink_to(Path(sys.prefix))
    environment = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    for name in ("COOKBOOK_CLUSTER", "COOKBOOK_RUNS"):
        environment.pop(name, None)

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def metrics(name: str) -> list[dict[str, float]]:
        """What the newest run of the cell wrote."""
        newest = max((folder / "runs").glob("my-model-*"), key=lambda path: path.stat().st_mtime)
        lines = (newest / name / "attempt-0/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    assert "documents  400" in [run(command) for command in commands("2")][-1]
    for command in commands("3"):
        run(command)
    recipe = folder / "recipes/my-model.yaml"
    edits = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[0])
    merged = yaml.safe_load(recipe.read_text())
    del merged["training"]["dataset"], merged["training"]["dataset_path"]
    for section, values in edits.items():
        merged[section] = merged.get(section, {}) | values
    recipe.write_text(yaml.safe_dump(merged))
    for section in ("4", "5"):
        for command in commands(section):
            run(command)
    (first,) = (folder / "runs").glob("my-model-*")
    cell = json.loads(run("python submit.py report --format json"))["cells"][0]
    assert cell["status"] == "finished" and cell["steps"] == 8
    trained = metrics(cell["name"])
    validated = {one["step"]: one["validation_loss"] for one in trained if "validation_loss" in one}
    assert list(validated) == [1, 4, 8] and validated[8] < validated[1]
    export, again = commands("6")
    assert "exported" in run(export.replace("RUN", first.name))
    assert (folder / "my-export/model.safetensors.index.json").exists()
    run(again)
    # The first step of the second run sees the weights of the first run's last.
    assert metrics(cell["name"])[0]["loss"] < trained[0]["loss"] - 0.05
