"""A cell's script in a job of two nodes, with stand-ins for all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import yaml

from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.overlay import load_ep_backend, load_precision
from cookbook.config.recipe import load_recipe
from cookbook.config.resolve import resolve_cell
from cookbook.launch.render import render_script
from tests.script_run import ScriptRunner, Start

# Stands for torchrun: it keeps its words in the attempt's folder.
NOTES_WORDS = 'printf "%s\\0" "$@" >"${COOKBOOK_ATTEMPT_DIR}/argv"\n'
PROFILE = {
    "description": "two nodes without GPUs",
    "scheduler": "slurm",
    "nodes": 2,
    "ranks_per_node": 2,
    "max_restarts": 3,
    "environment": {"FROM_PROFILE": "yes"},
}
# The script waits between attempts; a test need not.
NO_WAIT = '[[ "$1" == 5 ]] || exec /bin/sleep "$@"\n'


class Job:
    """A cell's script, rendered now, in a job of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "cookbook"
        self.root.mkdir()
        (self.root / "submit.py").touch()
        self.runner = ScriptRunner(folder / "stand-ins", python=None)
        self.runner.replace("sleep", NO_WAIT)
        self.cell_dir = folder / "runs" / "mine" / "cell"
        self.script = folder / "train.sh"
        self.render()

    def cluster(self, **profile: object) -> Cluster:
        # A file is read once, so each has a name of its own.
        path = self.folder / f"mine-{len(list(self.folder.glob('mine-*')))}.yaml"
        path.write_text(yaml.safe_dump(PROFILE | profile))
        return load_cluster(str(path))

    def render(
        self, recipe: str = "debug", ep_backend: str = "standard", **profile: object
    ) -> Cell:
        cell = resolve_cell(
            load_recipe(recipe),
            load_precision("bf16"),
            load_ep_backend(ep_backend),
            self.cluster(**profile),
        )
        self.script.write_text(render_script(cell, self.root))
        return cell

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        here = {"CELL_DIR": str(self.cell_dir), **environment}
        return self.runner.start(self.script, *words, root=self.root, environment=here)

    def run(self, *words: str, **environment: str) -> Start:
        return self.runner.end(self.start(*words, **environment))

    def ends(self, start: Start) -> list[list[str]]:
        """What the script notes of its attempts' ends."""
        return [words[4:] for words in start.asked if words[2] == "end"]

    def argv(self, attempt: int) -> list[str]:
        return (self.cell_dir / f"attempt-{attempt}" / "argv").read_text().split("\0")

    def torchrun_is_there(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 20
        while not (self.cell_dir / "attempt-0" / "begun").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def end_all(self) -> None:
        """End what a script that is told to stop leaves to Slurm."""
        mark = os.fsencode(f"RECORDS={self.runner.folder / 'records'}")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
