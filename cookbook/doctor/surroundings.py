"""In: a machine, or a stand-in for one. Out: the files and command answers that checks look at."""

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
from typing import Literal

from cookbook.base.paths import ROOT

State = Literal["ok", "warning", "problem", "not here"]

# A controller that does not answer must not hold up the other checks for minutes.
PATIENCE = 5.0

NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,compute_cap,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)
SLURM_PING = ("scontrol", "ping")
SLURM_CONFIG = ("scontrol", "show", "config")
SLURM_PARTITIONS = ("sinfo", "--noheader", "--format=%P|%a|%D|%G|%l")
SLURM_HISTORY = ("sacct", "--noheader", "--allocations", "--starttime=now")
COMMANDS = (NVIDIA_SMI, SLURM_PING, SLURM_CONFIG, SLURM_PARTITIONS, SLURM_HISTORY)


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis; `remedy` says what to do where `state` is not ok."""

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Answer:
    """What a command said; `status` is None where it is not installed or did not answer in time."""

    status: int | None
    output: str = ""
    error: str = ""

    @property
    def works(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class Gpu:
    """One row of nvidia-smi: name, compute capability, MiB, driver version."""

    name: str
    capability: float
    memory_mib: float
    driver: str


def ask(command: Sequence[str]) -> Answer:
    """Run `command` here, for PATIENCE seconds at most."""
    if shutil.which(command[0]) is None:
        return Answer(None)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, error=f"no answer in {PATIENCE:.0f} s")
    except OSError as error:
        return Answer(None, error=str(error))
    return Answer(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Surroundings:
    """The machine as the checks see it; tests put stand-ins for each part.

    Args:
        repository: the checkout that is diagnosed.
        root: where /proc, /sys and /etc are.
        site: where Python packages are looked for.
        run: answers a command; `which` says whether one is installed.
    """

    repository: Path = ROOT
    root: Path = Path("/")
    site: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], Answer] = ask
    which: Callable[[str], str | None] = shutil.which

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
        with ThreadPoolExecutor(len(COMMANDS)) as pool:
            return dict(zip(COMMANDS, pool.map(self.run, COMMANDS), strict=True))

    def answer(self, command: Sequence[str]) -> Answer:
        return self._answers[command]

    @functools.cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        answer = self.answer(NVIDIA_SMI)
        rows = [line.split(", ") for line in answer.output.splitlines()] if answer.works else []
        gpus = []
        for row in rows:
            try:
                name, capability, memory, driver = row
                gpus.append(Gpu(name, float(capability), float(memory), driver))
            except ValueError:
                continue
        return tuple(gpus)

    @property
    def has_slurm(self) -> bool:
        return self.which("sbatch") is not None

    @property
    def trains_for_real(self) -> bool:
        """Whether this is a GPU node or a login node, rather than a laptop."""
        return bool(self.gpus) or self.has_slurm
