"""A cell's script in a job of two nodes, with stand-ins for all that it starts."""

from pathlib import Path

import yaml

from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.resolve import resolve_cell
from cookbook.launch.script import render_script
from tests.script_run import ScriptRunner, Start

PROFILE = {
    "description": "two nodes without GPUs",
    "scheduler": "slurm",
    "nodes": 2,
    "ranks_per_node": 2,
    "max_restarts": 3,
    "environment": {"FROM_PROFILE": "yes"},
}


class Job:
    """A cell's script, rendered now, in a job of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "cookbook"
        self.root.mkdir()
        (self.root / "submit.py").touch()
        self.runner = ScriptRunner(folder / "stand-ins", python=None)
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

    def run(self, *words: str, **environment: str) -> Start:
        here = {"CELL_DIR": str(self.cell_dir), **environment}
        return self.runner.run(self.script, *words, root=self.root, environment=here)
