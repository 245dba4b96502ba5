"""In: the name of a cluster profile. Out: what its nodes have, and what to say to its scheduler."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu, has_slurm, visible_gpus
from cookbook.base.yamlfile import Key, YamlFile, described, read_keys, read_yaml
from cookbook.cells.recipe import Settings, environment_of, find_file, split_keys
from cookbook.stack.stack import Stack


@dataclass(frozen=True)
class Container:
    """A pyxis container that the job's tasks run in, instead of the virtual environment."""

    image: str
    mounts: tuple[str, ...]


@dataclass(frozen=True)
class Cluster:
    """A scheduler, its nodes and what must be said to it.

    `gpu` is None where ranks run on the CPU (gloo); `ranks_per_node` is one torchrun worker each.
    """

    name: str
    description: str
    scheduler: str
    nodes: int
    ranks_per_node: int
    gpu: Gpu | None
    emulate: bool
    partition: str | None
    account: str | None
    time: str | None
    exclude: tuple[str, ...]
    cpus_per_task: int | None
    exclusive: bool
    requeue: bool
    max_restarts: int
    sbatch: Mapping[str, Any]
    environment: Mapping[str, str]
    source: tuple[str, ...]
    rendezvous_port: int
    container: Container | None
    settings: Settings
    path: Path

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.gpu else "cpu"


_KEYS = {
    "description": Key(required=True),
    "scheduler": Key(required=True, choices=("slurm", "local")),
    "nodes": Key("int", default=1),
    "gpus_per_node": Key("int"),
    "ranks_per_node": Key("int"),
    "gpu": Key("mapping"),
    "emulate": Key("bool", default=False),
    "partition": Key(),
    "account": Key(),
    "time": Key(),
    "exclude": Key("texts", default=[]),
    "cpus_per_task": Key("int"),
    "exclusive": Key("bool", default=True),
    "requeue": Key("bool", default=True),
    "max_restarts": Key("int", default=3),
    "sbatch": Key("scalars", default={}),
    "environment": Key("scalars", default={}),
    "source": Key("texts", default=[]),
    "rendezvous_port": Key("int", default=29500),
    "container": Key("mapping"),
}
_GPU_KEYS = {
    "name": Key(required=True),
    "compute_capability": Key("number", required=True),
    "memory_gib": Key("number", required=True),
}
_CONTAINER_KEYS = {"image": Key(required=True), "mounts": Key("texts", default=[])}
# What one function of this package already says to sbatch, in `sbatch_options`.
_TAKEN = frozenset(
    [
        *[
            "job-name",
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "gpus-per-node",
            "cpus-per-task",
            "mem",
        ],
        *["exclusive", "requeue", "no-requeue", "partition", "account", "time", "exclude"],
        *["output", "error", "open-mode", "array", "wrap", "chdir", "export", "signal"],
    ]
)
# Texts that stand on a line of the script's header, which must stay one line.
_ONE_LINE = ("partition", "account", "time", "exclude", "sbatch")


def default_cluster() -> str:
    """COOKBOOK_CLUSTER where it is set, else a Slurm profile where sbatch is found, or `local`."""
    return os.environ.get("COOKBOOK_CLUSTER") or ("soperator-b200" if has_slurm() else "local")


@functools.cache
def load_cluster(name: str, stack: Stack) -> Cluster:
    """Read the profile called `name`, or at the path `name`; `local` is filled in from here."""
    path = find_file("cluster", name, "cluster")
    file = read_yaml(path)
    own, settings = split_keys(file, _KEYS, stack)
    gpu = Gpu(**read_keys(file, _GPU_KEYS, ("gpu",))) if own["gpu"] is not None else None
    box = read_keys(file, _CONTAINER_KEYS, ("container",)) if own["container"] is not None else None
    if own["scheduler"] == "slurm" and (own["gpus_per_node"] is None) != (gpu is None):
        raise InputError(
            file.place("gpus_per_node"), "goes with `gpu`", "set both, or neither for CPU"
        )
    if own["ranks_per_node"] is not None and gpu is not None:
        raise InputError(
            file.place("ranks_per_node"), "is for CPU nodes", "there is a rank for each GPU"
        )
    _check_sbatch(file, own)
    if not 1024 <= own["rendezvous_port"] < 32768:
        raise InputError(
            file.place("rendezvous_port"),
            f"found {own['rendezvous_port']}, allowed: 1024 to 32767 (below the ephemeral ports)",
        )
    cluster = Cluster(
        name=path.stem,
        description=own["description"],
        scheduler=own["scheduler"],
        nodes=own["nodes"],
        ranks_per_node=own["gpus_per_node"] or own["ranks_per_node"] or 1,
        gpu=gpu,
        emulate=own["emulate"],
        partition=own["partition"],
        account=own["account"],
        time=own["time"],
        exclude=tuple(own["exclude"]),
        cpus_per_task=own["cpus_per_task"],
        exclusive=own["exclusive"],
        requeue=own["requeue"],
        max_restarts=own["max_restarts"],
        sbatch=own["sbatch"],
        environment=environment_of(file, own["environment"]),
        source=tuple(own["source"]),
        rendezvous_port=own["rendezvous_port"],
        container=Container(box["image"], tuple(box["mounts"])) if box else None,
        settings=settings,
        path=path,
    )
    return _fill_in(cluster) if cluster.scheduler == "local" else cluster


def _check_sbatch(file: YamlFile, own: Mapping[str, Any]) -> None:
    for option in own["sbatch"]:
        place = file.place("sbatch", option)
        name = option.replace("_", "-")
        if name in _TAKEN:
            key = name.replace("-", "_")
            remedy = f"set the profile's own key `{key}`" if key in _KEYS else "leave it out"
            raise InputError(place, "is said to sbatch by the cookbook itself", remedy)
        if not re.fullmatch(r"[a-z][a-z-]*", option):
            remedy = f"write {name}" if re.fullmatch(r"[a-z][a-z-]*", name) else ""
            raise InputError(place, "is not the long name of an sbatch option", remedy)
    for key in _ONE_LINE:
        values = own[key].values() if isinstance(own[key], dict) else own[key] or ()
        for value in [values] if isinstance(values, str) else values:
            if isinstance(value, str) and not value.isprintable():
                raise InputError(
                    file.place(key), f"found {described(value)}, allowed: text of one line"
                )


def _fill_in(cluster: Cluster) -> Cluster:
    gpus = visible_gpus()
    if not gpus:
        return cluster
    # Unlike GPUs in one job would run at the pace of the slowest: take those like the first.
    alike = [gpu for gpu in gpus if gpu == gpus[0]]
    return replace(cluster, gpu=gpus[0], ranks_per_node=len(alike))
