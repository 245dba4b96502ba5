"""A cluster: a scheduler, its nodes and its settings, from a YAML file."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from cookbook.base.errors import InputError, described
from cookbook.base.gpus import Gpu, visible_gpus
from cookbook.base.yamlfile import (
    Count,
    Flag,
    Natural,
    Number,
    Text,
    Texts,
    Words,
    YamlFile,
    fill,
    read_yaml,
)
from cookbook.config.options import Settings, check_environment, read_sections
from cookbook.config.recipe import find_file, names_in
from cookbook.config.stack import load_stack
from cookbook.run import slurm
from cookbook.run.record import CellRecord


@dataclass(frozen=True)
class _GpuKeys:
    name: Text
    compute_capability: Number
    memory_gib: Number


@dataclass(frozen=True)
class Container:
    """A pyxis container that the job's tasks run in, instead of the virtual environment."""

    image: Text
    mounts: Texts = ()


@dataclass(frozen=True)
class Bandwidth:
    """Bus bandwidths that the network test must reach, in GB/s as nccl-tests defines them."""

    all_reduce: Number
    all_to_all: Number


OptionValue = str | int | bool


@dataclass(frozen=True)
class Cluster:
    """A scheduler, its nodes and its settings."""

    name: str
    description: Text
    scheduler: Literal["slurm", "local"]
    settings: Settings
    path: Path
    nodes: Count = 1
    gpus_per_node: Count | None = None
    cpu_ranks_per_node: Count = field(default=1, metadata={"key": "ranks_per_node"})
    gpu: Gpu | None = None  # None if ranks run on the CPU (gloo)
    emulate: Flag = False
    partition: Text | None = None
    account: Text | None = None
    time: Text | None = None
    exclude: Texts = ()
    cpus_per_task: Count | None = None
    exclusive: Flag = True
    requeue: Flag = True
    max_restarts: Natural = 3
    seconds_to_stop: Count = 300
    node_failure_days: Number | None = None  # mean days between two failures of a node
    write_gb_per_s: Number | None = None  # write bandwidth of all nodes together to shared storage
    sbatch: Words = field(default_factory=Words)
    environment: Words = field(default_factory=Words)
    source: Texts = ()  # shell files that a job sources, which must exist
    source_if_exists: Texts = ()  # shell files that a job sources if they exist
    rendezvous_port: Count = 29500
    container: Container | None = None
    price_per_gpu_hour: Number | None = None
    bandwidth: Bandwidth | None = None
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def grace_seconds(self) -> int:
        """Seconds from the stop signal to the time limit: at most a quarter of the limit."""
        limit = seconds_of(self.time) if self.time else None
        return min(self.seconds_to_stop, limit // 4) if limit else self.seconds_to_stop

    @property
    def late_seconds(self) -> int:
        """Seconds from the stop signal until the job is requeued even if ranks are still saving."""
        return self.grace_seconds * 3 // 4

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node: its GPUs, or on CPUs `cpu_ranks_per_node`."""
        return self.gpus_per_node or self.cpu_ranks_per_node

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    @property
    def ranks(self) -> str:
        """A node's devices as messages show them: `8 B200` or `2 CPU ranks`."""
        return f"{self.ranks_per_node} {self.gpu.name if self.gpu else 'CPU ranks'}"

    def slurm_options(self, exclude: Sequence[str] = ()) -> dict[str, OptionValue]:
        """Return sbatch's and srun's options by long name; True marks an option without a value.

        `exclude`: nodes to exclude, in addition to those that the cluster's YAML file excludes.
        """
        options: dict[str, OptionValue | None] = {
            "gpus-per-node": self.ranks_per_node if self.gpu else None,
            "cpus-per-task": self.cpus_per_task,
            "exclusive": self.exclusive,
            # 0 requests all of the node's memory; the default is a share per CPU.
            "mem": 0 if self.exclusive else None,
            "partition": self.partition or None,
            "account": self.account or None,
            "time": self.time or None,
            "exclude": ",".join(dict.fromkeys([*self.exclude, *exclude])) or None,
            **self.sbatch,
        }
        # In YAML, true adds an option without a value, and false removes an option.
        return {n: one for n, one in options.items() if one is not None and one is not False}


# sbatch options that users may not set: they come from the profile's keys or are fixed.
_TAKEN = frozenset(
    {"partition", "account", "time", "exclude", "cpus-per-task", "exclusive", "requeue", "nodes"}
    | {"gpus-per-node", "job-name", "ntasks", "ntasks-per-node", "mem", "no-requeue", "output"}
    | {"error", "open-mode", "array", "wrap", "chdir", "export", "signal"}
)


def default_cluster() -> str:
    """Return COOKBOOK_CLUSTER, else the profile that fits Slurm's nodes; `local` without Slurm."""
    if name := os.environ.get("COOKBOOK_CLUSTER"):
        return name
    groups = slurm.node_groups()
    if groups is None:
        return "local"
    profiles = [one for one in map(load_cluster, names_in("cluster")) if one.scheduler == "slurm"]
    known = [profile.name for profile in profiles]
    fitting = [one.name for one in profiles if _slurm_has(one, one.nodes)]
    if len(fitting) == 1:
        return fitting[0]
    nodes = ", ".join(f"{count} nodes with {gres}" for count, gres in groups)
    found = f"fits {len(fitting)} of {', '.join(known)}" if fitting else "fits no profile"
    found = f"is not given, and what Slurm reports ({nodes or 'nothing'}) {found}"
    choices = ", ".join([*(fitting or known), "local"])
    raise InputError("--cluster", found, f"name one, here or in COOKBOOK_CLUSTER: {choices}")


def runs_here(cluster: Cluster) -> bool:
    """Return whether a job on `cluster` would use this machine's packages and files.

    Jobs that Slurm takes from this machine do: they run in this checkout.
    """
    is_job = bool(os.environ.get("SLURM_JOB_ID"))
    return cluster.scheduler == "local" or is_job or slurm.node_groups() is not None


def _slurm_has(cluster: Cluster, nodes: int) -> bool:
    found = 0
    for count, gres in slurm.node_groups() or ():
        # `gres` lists generic resources: `gpu:b200:8(S:0-1)`, `gpu:8`, `(null)`.
        match = re.search(r"gpu:(?:([^:(,]+):)?([0-9]+)", gres)
        kind, gpus = match.groups() if match else (None, 0)
        is_alike = not kind or not cluster.gpu or cluster.gpu.name.lower() in kind.lower()
        if is_alike and int(gpus) == (cluster.gpus_per_node or 0):
            found += count
    return found >= nodes


@functools.cache
def load_cluster(name: str) -> Cluster:
    """Read a profile by name or path; `local` gets this machine's GPUs."""
    path = find_file("cluster", name)
    return read_cluster(read_yaml(path), path)


def read_cluster(file: YamlFile, path: Path) -> Cluster:
    """Read the profile that stands in `file`, a copy of `path`."""
    cluster = _read_cluster(file, path)
    gpus = visible_gpus() if cluster.scheduler == "local" else ()
    # Use only GPUs of the first GPU's type: in a mixed job the slowest GPU would set the pace.
    return replace(cluster, gpu=gpus[0], gpus_per_node=gpus.count(gpus[0])) if gpus else cluster


def cluster_from_record(record: CellRecord) -> Cluster:
    path = Path(f"{record.cluster}.yaml")
    return _read_cluster(YamlFile(path, record.profile, {}, {}), path)


def _read_cluster(file: YamlFile, path: Path) -> Cluster:
    own: dict[str, Any] = {"name": path.stem, "path": path, "content": file.content}
    if file.content.get("gpu") is not None:
        own["gpu"] = Gpu(**vars(fill(_GpuKeys, file, ("gpu",))))
    beside = {"gpu", *load_stack().sections}
    cluster = fill(Cluster, file, beside=beside, settings=read_sections(file), **own)
    for key, reason, remedy in _problems(file, cluster):
        raise InputError(file.place(*key), reason, remedy)
    check_environment(file, cluster.environment)
    return cluster


def _problems(file: YamlFile, cluster: Cluster) -> Iterator[tuple[tuple[str, ...], str, str]]:
    if cluster.scheduler == "slurm" and (cluster.gpus_per_node is None) != (cluster.gpu is None):
        yield ("gpus_per_node",), "goes with `gpu`", "set both, or neither for CPU"
    if "ranks_per_node" in file.content and cluster.gpu is not None:
        yield ("ranks_per_node",), "is for CPU nodes", "there is a rank for each GPU"
    # A common mistake is to write 90, as in sm_90, instead of 9.0.
    if cluster.gpu and cluster.gpu.compute_capability >= 20:
        found = f"found {cluster.gpu.compute_capability:g}, allowed: MAJOR.MINOR"
        remedy = f"write {cluster.gpu.compute_capability / 10:.1f}"
        yield ("gpu", "compute_capability"), found, remedy
    is_word = cluster.time and cluster.time.upper() in ("INFINITE", "UNLIMITED")
    if cluster.time and not is_word and seconds_of(cluster.time) is None:
        allowed = "MINUTES, HH:MM:SS, D-HH:MM:SS or UNLIMITED"
        yield ("time",), f"found {described(cluster.time)}, allowed: {allowed}", ""
    for key, low, high, why in (
        ("rendezvous_port", 1024, 32767, "below the ephemeral ports"),
        ("seconds_to_stop", 60, 65535, "sbatch --signal"),
    ):
        if not low <= (value := getattr(cluster, key)) <= high:
            yield (key,), f"found {value}, allowed: {low} to {high} ({why})", ""
    for option in cluster.sbatch:
        name = option.replace("_", "-")
        if name in _TAKEN:
            key = name.replace("-", "_")
            is_key = key in {field.name for field in fields(Cluster)}
            remedy = f"set the profile's own key `{key}`" if is_key else "leave it out"
            yield ("sbatch", option), "is set by the cookbook itself", remedy
        elif not re.fullmatch("[a-z][a-z-]+", option):
            name = name.lstrip("-")
            remedy = f"write {name}" if re.fullmatch("[a-z][a-z-]+", name) else "see man sbatch"
            yield ("sbatch", option), "is not the long name of an sbatch option", remedy
    one_line = {key: [getattr(cluster, key)] for key in ("partition", "account", "time")}
    one_line |= {"exclude": [*cluster.exclude], "sbatch": [*cluster.sbatch.values()]}
    for key, texts in one_line.items():
        for text in texts:
            if isinstance(text, str) and not text.isprintable():
                yield (key,), f"found {described(text)}, allowed: text of one line", ""


def seconds_of(limit: str) -> int | None:
    """Return an sbatch time limit (`1:30:00`, `1-12`) in seconds; None if unlimited or invalid."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+(?::[0-9]+){0,2})", limit)
    if match is None:
        return None
    days, parts = match[1], [int(part) for part in match[2].split(":")]
    # `1-12` and `1:30:00` contain hours; `90` and `90:00` start with minutes.
    if days is None and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
