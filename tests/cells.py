"""Every cell that the files of the cookbook can make, for tests to walk through."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cookbook.config.cell import Cell
from cookbook.config.cluster import Cluster, load_cluster
from cookbook.config.options import Setting
from cookbook.config.recipe import Recipe, load_ep_backend, load_precision, load_recipe, names_in
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.config.stack import load_stack

STACK = load_stack()
# Beside the cookbook's own profiles: a container with every key set, and nodes without GPUs.
CLUSTER_FILES = sorted((Path(__file__).parent / "clusters").glob("*.yaml"))


Name = TypeVar("Name")


def walked(names: Sequence[Name]) -> list[Name]:
    """`names`, which must not be empty: a test of nothing would pass."""
    assert names, "nothing to walk through"
    return list(names)


RECIPES = walked(names_in(""))
PRECISIONS = walked(names_in("precision"))
EP_BACKENDS = walked(names_in("ep_backend"))
CLUSTERS = walked(names_in("cluster")) + walked([str(path) for path in CLUSTER_FILES])


@dataclass(frozen=True)
class Point:
    """A recipe, a precision, an EP backend and a cluster, by name."""

    recipe: str
    precision: str
    ep_backend: str
    cluster: str

    def __str__(self) -> str:
        cluster = Path(self.cluster).stem
        return f"{self.recipe}-{self.precision}-{self.ep_backend}-{cluster}"

    def cell(self) -> Cell:
        """The cell; a recipe for many nodes is laid out anew where the cluster has few."""
        recipe, cluster = load_recipe(self.recipe), load_cluster(self.cluster)
        overlays = load_precision(self.precision), load_ep_backend(self.ep_backend)
        asked = _smaller_layout(recipe, cluster)
        return resolve_cell(merge_config(recipe, *overlays, cluster, overrides=asked))


def _smaller_layout(recipe: Recipe, cluster: Cluster) -> Mapping[str, Setting]:
    nodes = min(recipe.nodes, cluster.nodes)
    world = nodes * cluster.ranks_per_node
    ep = recipe.settings["parallelism.expert_parallel_degree"].value
    if cluster.scheduler == "local" or (nodes == recipe.nodes and world % ep == 0):
        return {}
    degrees = {
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.tensor_parallel_degree": 1,
        "parallelism.expert_parallel_degree": world,
    }
    return {name: Setting(degree, f"--set {name}") for name, degree in degrees.items()}


POINTS = [Point(*names) for names in itertools.product(RECIPES, PRECISIONS, EP_BACKENDS, CLUSTERS)]
# Refused cells are rendered like the others, but nothing starts them.
RUNNABLE = [point for point in POINTS if not point.cell().refused]
assert RUNNABLE, "every cell is refused"
