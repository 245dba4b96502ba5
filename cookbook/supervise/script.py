"""Write the script of an attempt, in which everything is resolved, and its environment."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.files import write_whole
from cookbook.base.paths import CODE, ROOT
from cookbook.config.cluster import Cluster, cluster_from_record
from cookbook.config.dialect.argv import argv_of
from cookbook.config.facts import Facts
from cookbook.config.options import exported, options_of, settings_of
from cookbook.run import own_job, slurm
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord

# Never written into the run's folder, which colleagues may read.
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
# bash changes these by itself.
_OF_BASH = ("_", "SHLVL", "PWD", "OLDPWD")
# The files are the cluster's own: they may read unset variables, and commands in them may fail.
_SOURCE = 'exec 3>&1 1>&2; for file; do [[ ! -r "${file}" ]] || source "${file}"; done; env -0 >&3'


def cell_environment(record: CellRecord, job: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a cell's node checks and attempts, which follows from its record.

    `job` is the job's own environment. Raises InputError if a file that the cluster's profile
    sources cannot be read.
    """
    cluster = cluster_from_record(record)
    found = _sourced(cluster, job) | exported(record.environment)
    for name, other in record.environment_from.items():
        if not found.get(name) and (value := found.get(str(other))):
            found[name] = value
    venv = job.get("VENV") or sys.prefix
    if cluster.container is None:
        found["PATH"] = os.pathsep.join([f"{venv}/bin", found.get("PATH") or os.defpath])
    found |= {
        "VENV": venv,
        "COOKBOOK_ROOT": str(ROOT),
        "COOKBOOK_CODE": str(CODE),
        "PYTHONUNBUFFERED": "1",
        # Lines of the log begin with the global rank; torchrun fills it in.
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]:",
    }
    if cluster.scheduler == "slurm":
        cpus, asked = found.get("SLURM_CPUS_PER_TASK"), slurm.asked_cpus(own_job.slurm_job() or "")
        if cpus and asked and cpus != asked:
            # The shell that called sbatch was in another job, which has left it.
            del found["SLURM_CPUS_PER_TASK"]
        # Ranks get this environment also under `sbatch --export=NONE`.
        found["SLURM_EXPORT_ENV"] = "ALL"
    if _has_wandb_key(found):
        for variable, option, default in (
            ("WANDB_PROJECT", Facts.wandb_project, "moe-cookbook"),
            ("WANDB_RUN_NAME", Facts.wandb_name, record.name or ""),
            ("WANDB_RUN_GROUP", Facts.wandb_group, ""),
            ("WANDB_TAGS", Facts.wandb_tags, ""),
        ):
            own = record.options.get(option) or ""
            own = ",".join(own) if isinstance(own, list) else own
            if value := found.get(variable) or own or default:
                found[variable] = str(value)
    return found


def _sourced(cluster: Cluster, job: Mapping[str, str]) -> dict[str, str]:
    for file in cluster.source:
        if not os.access(file, os.R_OK):
            wrong = f"cannot read {file} on {socket.gethostname()}"
            raise InputError(
                "source", wrong, "correct the cluster's profile, or put the file there"
            )
    files = [*cluster.source, *cluster.source_if_exists]
    if not any(os.access(file, os.R_OK) for file in files):
        return dict(job)
    done = subprocess.run(
        ["bash", "-c", _SOURCE, "bash", *files], env=job, stdin=subprocess.DEVNULL, stdout=-1
    )
    pairs = (text.partition("=") for text in os.fsdecode(done.stdout).split("\0") if text)
    found: dict[str, str] = {key: value for key, _, value in pairs if key not in _OF_BASH}
    if not found:
        raise InputError("source", f"{', '.join(files)} ended bash", "let it return, not exit")
    return found | {name: job[name] for name in _OF_BASH if name in job}


def _has_wandb_key(variables: Mapping[str, str]) -> bool:
    if variables.get("WANDB_API_KEY"):
        return True
    try:
        netrc = Path(variables.get("NETRC") or Path(variables.get("HOME", "/"), ".netrc"))
        return "api.wandb.ai" in netrc.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def write_script(
    cell: CellFolder,
    attempt: Attempt,
    record: CellRecord,
    job: Mapping[str, str],
    loads: Mapping[str, Any],
    nodes: Sequence[str],
    head: str,
    more: Mapping[str, str],
) -> dict[str, str]:
    """Write the attempt's script, and return the environment to run it in.

    Args:
        job: the job's environment at its start; the script exports what differs from it.
        loads: the options that say what the attempt loads; they win over those of the record.
        nodes: the nodes to train on, of which `head` is the first one's address; empty for a job
            on this machine.
        more: further variables.
    """
    cluster, number = cluster_from_record(record), os.environ.get("SLURM_JOB_ID") or "0"
    ranks = sorted({0, record.loss_rank})
    local_ranks = sorted({rank % record.ranks_per_node for rank in ranks})
    # Below the ephemeral ports; one per job, so that jobs that share a node do not collide.
    port = cluster.rendezvous_port + int(number) % 1000
    name, id_of_job = attempt.path.name, number if nodes else f"local_{os.getpid()}"
    own = {
        "CELL": record.name or cell.name,
        "CELL_DIR": str(cell.path),
        "COOKBOOK_ATTEMPT_DIR": str(attempt.path),
        "ATTEMPT": name,
        "NUM_NODES": str(len(nodes) or 1),
        "TRAIN_NODES": ",".join(nodes),
        "RANKS_PER_NODE": str(record.ranks_per_node),
        "RDZV_ENDPOINT": f"{head}:{port}" if nodes else "127.0.0.1:0",
        # A new id keeps out workers of the last attempt.
        "RDZV_ID": f"{id_of_job}_{name}_{record.name or cell.name}",
        # TorchTitan warns if LOG_RANK lacks the rank that computes the loss.
        "LOG_RANK": ",".join(map(str, ranks)),
        "SHOWN_RANKS": ",".join(map(str, local_ranks)),
        **more,
    }
    environment = {**os.environ, **own}
    exports = {
        key: value
        for key, value in environment.items()
        if (key in own or job.get(key) != value or key in ("PYTHONPATH", "PYTHONSAFEPATH", "PATH"))
        and key.isidentifier()
        and not _SECRET.search(key)
    }
    lines = [
        "#!/bin/bash",
        f"# {name} of {own['CELL']}, job {own_job.job_id()}: all that it runs, resolved.",
        "# To run it once more, inside the same allocation: bash, and this file's path.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(ROOT))}",
        *(f"export {key}={shlex.quote(value)}" for key, value in exports.items()),
        "TRAIN_ARGS=(",
        *(f"  {shlex.quote(word)}" for word in _arguments(attempt, record, loads, environment)),
        ")",
        "",
        (record.command or "").rstrip("\n"),
    ]
    write_whole(attempt.script, "\n".join(lines) + "\n", mode=0o755)
    with contextlib.suppress(OSError):  # some file systems have no links
        cell.latest.unlink(missing_ok=True)
        cell.latest.symlink_to(name)
    return environment


def _arguments(
    attempt: Attempt, record: CellRecord, loads: Mapping[str, Any], variables: Mapping[str, str]
) -> list[str]:
    options, name = options_of(record), attempt.path.name
    values = {Facts.is_wandb_on: True} if _has_wandb_key(variables) else {}
    # Checkpoints go to the cell's folder, everything else to this attempt's.
    folders = {
        Facts.dump_folder: str(attempt.path.parent),
        Facts.tensorboard_folder: f"{name}/tb",
        Facts.comm_traces_folder: f"{name}/comm_traces",
        Facts.profiles_folder: f"{name}/profile_traces",
        Facts.snapshots_folder: f"{name}/memory_snapshot",
    }
    return argv_of(options.stack, settings_of({**values, **options.values, **loads, **folders}))
