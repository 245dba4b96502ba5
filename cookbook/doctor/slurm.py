"""The doctor's checks of Slurm: its controller, the partition that jobs go to, and accounting."""

from __future__ import annotations

import re

from cookbook.base.errors import InputError
from cookbook.doctor.check import Finding, State, check
from cookbook.doctor.surroundings import (
    SLURM_CONFIG,
    SLURM_HISTORY,
    SLURM_PARTITIONS,
    SLURM_PING,
    Surroundings,
)


@check(local=False)
def slurm(here: Surroundings) -> list[Finding]:
    if not here.has_slurm:
        if here.cluster:
            found = f"no sbatch, which {here.cluster.name} needs"
            return [Finding("slurm", "problem", found, "log in to the cluster")]
        return [Finding("slurm", "not here", "no sbatch: runs use this machine (--cluster local)")]
    if here.which("srun") is None:
        return [
            Finding("slurm", "problem", "sbatch without srun", "install Slurm's client commands")
        ]
    ping = here.answer(SLURM_PING)
    if "dns_srv" in ping.error or "configuration source" in ping.error:
        found = "Slurm's commands are here without a configuration (slurm.conf)"
        state: State = "problem" if here.cluster else "warning"
        return [Finding("slurm", state, found, "use --cluster local, or set SLURM_CONF")]
    if not ping.works or " UP" not in ping.output:
        said = (ping.output or ping.error).strip().splitlines()
        return [
            Finding(
                "slurm",
                "problem",
                f"the controller does not answer{': ' + said[0] if said else ''}",
                "ask who runs the cluster; --cluster local works without Slurm",
            )
        ]
    config = here.answer(SLURM_CONFIG).output
    version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", config, re.MULTILINE)
    return [
        Finding("slurm", "ok", f"{version[1] if version else ''} controller answers".strip()),
        _partition(here),
        _accounting(here, config),
    ]


@check(local=False)
def excluded_nodes(here: Surroundings) -> list[Finding]:
    """The nodes that jobs leave out since they failed one before."""
    if not here.has_slurm:
        return []
    name, runs = "left out", here.repository / (here.environment.get("COOKBOOK_RUNS") or "runs")
    try:
        # Only here: the list is YAML, and the doctor answers also where nothing is installed.
        from cookbook.run.excluded import excluded_file, read_excluded

        listed = read_excluded(runs)
    except ModuleNotFoundError:
        return []
    except InputError as error:
        return [Finding(name, "problem", str(error))]
    if not listed:
        return [Finding(name, "ok", "no node is left out of new jobs")]
    remedy = f"to use a node again, delete its entry in {excluded_file(runs)}"
    found = "; ".join(map(str, listed[:8])) + (" ..." if len(listed) > 8 else "")
    return [Finding(name, "warning", f"{len(listed)} node(s): {found}", remedy)]


def _partition(here: Surroundings) -> Finding:
    rows = [line.split("|") for line in here.answer(SLURM_PARTITIONS).output.splitlines()]
    partitions: dict[str, list[list[str]]] = {}
    for row in rows:
        if len(row) == 5:
            partitions.setdefault(row[0].rstrip("*"), []).append(row)
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), None)
    name = here.partition or (here.cluster.partition if here.cluster else None) or default
    if name is None or name not in partitions:
        found = f"no partition {name!r}" if name else "no default partition"
        known = ", ".join(sorted(partitions)) or "none"
        return Finding(
            "partition",
            "problem",
            f"{found}; there are: {known}",
            "name one in the cluster profile",
        )
    nodes = sum(int(row[2]) for row in partitions[name] if row[2].isdigit())
    resources = sorted({row[3] for row in partitions[name]} - {"(null)"})
    found = f"{name}: {nodes} nodes, {' '.join(resources) or 'no GPUs declared'}"
    if any(row[1] != "up" for row in partitions[name]):
        return Finding("partition", "problem", f"{found}, not up", "ask who runs the cluster")
    if here.cluster and here.cluster.gpu:
        profile, gpus = here.cluster.name, here.cluster.ranks_per_node
        fitting = [row for row in partitions[name] if row[2].isdigit() and _gpus(row[3]) >= gpus]
        count = sum(int(row[2]) for row in fitting)
        if not count:
            return Finding(
                "partition",
                "problem",
                f"{found}: no node has the {gpus} GPUs that {profile} asks for",
                "name another partition in the profile, or correct its `gpus_per_node`",
            )
        if count < here.cluster.nodes:
            return Finding(
                "partition",
                "warning",
                f"{found}: {count} have {gpus} GPUs, and {profile} says {here.cluster.nodes} nodes",
                "correct `nodes` in the profile, or pass --nodes",
            )
    return Finding("partition", "ok", f"{found}, time limit {partitions[name][0][4]}")


def _gpus(resources: str) -> int:
    """The GPUs of a node whose generic resources are e.g. `gpu:nvidia_b200:8(S:0-1)`."""
    return sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:([0-9]+)", resources)))


def _accounting(here: Surroundings, config: str) -> Finding:
    match = re.search(r"^AccountingStorageType\s*=\s*(\S+)", config, re.MULTILINE)
    kind = match[1] if match else "unknown"
    if "slurmdbd" not in kind:
        return Finding(
            "accounting", "ok", "off: states come from squeue and each run's status file"
        )
    if not here.answer(SLURM_HISTORY).works:
        return Finding(
            "accounting",
            "warning",
            "on, but sacct fails: finished jobs are known from their status file only",
            "ask who runs the cluster; nothing here depends on it",
        )
    return Finding("accounting", "ok", "on: sacct knows finished jobs")
