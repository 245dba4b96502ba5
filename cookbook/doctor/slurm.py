"""The doctor's checks of Slurm: its controller, the partition of jobs, the nodes left out."""

from __future__ import annotations

import re

from cookbook.base.errors import InputError
from cookbook.doctor.check import Surroundings, Verdict, check

CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("sinfo", "--noheader", "--format=%P|%a|%D|%G|%l")


@check("slurm")
def slurm(here: Surroundings) -> Verdict:
    if not here.has_slurm:
        if here.cluster:
            return "problem", f"no sbatch, which {here.cluster.name} needs", "log in to the cluster"
        return "not here", "no sbatch: runs use this machine (--cluster local)"
    if here.which("srun") is None:
        return "problem", "sbatch without srun", "install Slurm's client commands"
    config = here.answer(CONFIG)
    if "dns_srv" in config.error or "configuration source" in config.error:
        found = "Slurm's commands are here without a configuration (slurm.conf)"
        remedy = "use --cluster local, or set SLURM_CONF"
        return "problem" if here.cluster else "warning", found, remedy
    if config.status != 0:
        reason = (config.error or config.output).strip().partition("\n")[0]
        found = f"the controller does not answer{': ' + reason if reason else ''}"
        return "problem", found, "ask who runs the cluster; --cluster local works without Slurm"
    version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", config.output, re.MULTILINE)
    accounting = "slurmdbd" in config.output
    states = "sacct" if accounting else "squeue and each run's status file"
    return "ok", f"{version[1] if version else 'its'} controller answers; states come from {states}"


@check("partition")
def partition(here: Surroundings) -> Verdict:
    if not here.has_slurm or here.answer(CONFIG).status != 0:
        return None
    rows = [line.split("|") for line in here.answer(PARTITIONS).output.splitlines()]
    partitions = {row[0].rstrip("*") for row in rows}
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), None)
    name = here.partition or (here.cluster.partition if here.cluster else None) or default
    if name is None or name not in partitions:
        found = f"no partition {name!r}" if name else "no default partition"
        known = ", ".join(sorted(partitions)) or "none"
        return "problem", f"{found}; there are: {known}", "name one in the cluster profile"
    rows = [row for row in rows if row[0].rstrip("*") == name]
    nodes = sum(int(row[2]) for row in rows)
    resources = sorted({row[3] for row in rows} - {"(null)"})
    found = f"{name}: {nodes} nodes, {' '.join(resources) or 'no GPUs declared'}"
    if any(row[1] != "up" for row in rows):
        return "problem", f"{found}, not up", "ask who runs the cluster"
    if here.cluster and here.cluster.gpu:
        profile, gpus = here.cluster.name, here.cluster.ranks_per_node
        count = sum(int(row[2]) for row in rows if _gpus(row[3]) >= gpus)
        if not count:
            found += f": no node has the {gpus} GPUs that {profile} asks for"
            remedy = "name another partition in the profile, or correct its `gpus_per_node`"
            return "problem", found, remedy
        if count < here.cluster.nodes:
            found += f": {count} have {gpus} GPUs, and {profile} says {here.cluster.nodes} nodes"
            return "warning", found, "correct `nodes` in the profile, or pass --nodes"
    return "ok", f"{found}, time limit {rows[0][4]}"


def _gpus(resources: str) -> int:
    """Return the GPUs of a node whose generic resources are e.g. `gpu:nvidia_b200:8(S:0-1)`."""
    return sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:([0-9]+)", resources)))


@check("left out")
def excluded_nodes(here: Surroundings) -> Verdict:
    """The nodes that jobs leave out since they failed one before."""
    if not here.has_slurm:
        return None
    try:
        # Only here: the list is YAML, and the doctor answers also where nothing is installed.
        from cookbook.run.excluded import excluded_file, read_excluded

        listed = read_excluded(here.runs)
    except ModuleNotFoundError:
        return None
    except InputError as error:
        return "problem", str(error)
    if not listed:
        return "ok", "no node is left out of new jobs"
    found = "; ".join(map(str, listed[:8])) + (" ..." if len(listed) > 8 else "")
    remedy = f"to use a node again, delete its entry in {excluded_file(here.runs)}"
    return "warning", f"{len(listed)} node(s): {found}", remedy
