"""What the doctor's checks look at: files and commands' answers, here or on a stand-in machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.base.gpus import (
    GPU_LINKS,
    GPU_PROCESSES,
    GPU_ROWS,
    GPU_STATES,
    NVIDIA_SMI,
    InstalledGpu,
    parse_nvidia_smi,
    select_visible,
)
from cookbook.base.paths import ROOT

if TYPE_CHECKING:
    from cookbook.config.cluster import Cluster

# A controller that does not answer must not hold up the other checks for minutes.
PATIENCE = 5.0

SLURM_PING = ("scontrol", "ping")
SLURM_CONFIG = ("scontrol", "show", "config")
SLURM_PARTITIONS = ("sinfo", "--noheader", "--format=%P|%a|%D|%G|%l")
SLURM_HISTORY = ("sacct", "--noheader", "--allocations", "--starttime=now")
KERNEL_LOG = ("dmesg",)
DCGM_HEALTH = ("dcgmi", "health", "--check")
# What a node says of itself, and what Slurm says of the cluster.
NODE_COMMANDS = (
    *(NVIDIA_SMI, GPU_STATES, GPU_ROWS, GPU_PROCESSES, GPU_LINKS),
    *(KERNEL_LOG, DCGM_HEALTH),
)
COMMANDS = (*NODE_COMMANDS, SLURM_PING, SLURM_CONFIG, SLURM_PARTITIONS, SLURM_HISTORY)


@dataclass(frozen=True)
class Answer:
    """What a command said; `status` is None where it is not installed or did not answer in time."""

    status: int | None
    output: str = ""
    error: str = ""

    @property
    def works(self) -> bool:
        return self.status == 0


def ask(command: Sequence[str], patience: float = PATIENCE) -> Answer:
    """Run `command` here, for `patience` seconds at most."""
    if shutil.which(command[0]) is None:
        return Answer(None)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=patience,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, error=f"{command[0]}: no answer in {patience:.0f} s")
    except OSError as error:
        return Answer(None, error=str(error))
    return Answer(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Surroundings:
    """The machine as the checks see it; tests put stand-ins for each part.

    Args:
        cluster: the profile to check for; None for none in particular.
        local: leave out what only runs on a cluster need.
        partition: the Slurm partition to check, if not the profile's or Slurm's default one.
        repository: the checkout that is diagnosed.
        root: where /proc, /sys and /etc are.
        site: where Python packages are looked for.
        run: answers a command; `which` says whether one is installed.
        commands: what may be asked; all of them are, at once, when the first answer is wanted.
        job_folder: what a job on this node writes to; None outside a job.
        deepep_between_nodes: the job sends tokens to other nodes by DeepEP.
    """

    cluster: Cluster | None = None
    local: bool = False
    partition: str | None = None
    repository: Path = ROOT
    root: Path = Path("/")
    site: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], Answer] = ask
    which: Callable[[str], str | None] = shutil.which
    commands: Sequence[Sequence[str]] = COMMANDS
    job_folder: Path | None = None
    deepep_between_nodes: bool = False

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str | None:
        """The content of a file, None where it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    @functools.cached_property
    def _answers(self) -> dict[Sequence[str], Answer]:
        # All at once: each may wait for a driver or for a controller.
        with ThreadPoolExecutor(len(self.commands)) as pool:
            return dict(zip(self.commands, pool.map(self.run, self.commands), strict=True))

    def answer(self, command: Sequence[str]) -> Answer:
        return self._answers[command]

    @functools.cached_property
    def installed_gpus(self) -> tuple[InstalledGpu, ...]:
        """All GPUs of this machine."""
        answer = self.answer(NVIDIA_SMI)
        return parse_nvidia_smi(answer.output) if answer.works else ()

    @functools.cached_property
    def gpus(self) -> tuple[InstalledGpu, ...]:
        """The GPUs that a run started here gets."""
        return select_visible(self.installed_gpus, self.environment.get("CUDA_VISIBLE_DEVICES"))

    @property
    def has_slurm(self) -> bool:
        return self.which("sbatch") is not None

    @property
    def sends_jobs(self) -> bool:
        """Whether runs go to other machines."""
        return self.cluster.scheduler == "slurm" if self.cluster else self.has_slurm

    @property
    def is_in_job(self) -> bool:
        """Whether a job is about to train here."""
        return self.job_folder is not None

    @property
    def is_login_node(self) -> bool:
        """Whether runs go to other machines and this one has no GPU driver in its kernel."""
        return (
            self.sends_jobs and not self.is_in_job and not self.path("/proc/driver/nvidia").exists()
        )

    @property
    def trains_for_real(self) -> bool:
        """Whether large recipes run from here: on GPUs of this machine or on a cluster."""
        return not self.local and (bool(self.gpus) or self.sends_jobs)
