"""The doctor's checks: their registry, the machine that they inspect, and their findings."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from cookbook.base.gpus import InstalledGpu, NoGpusError, read_gpus, select_visible
from cookbook.base.paths import ROOT
from cookbook.base.tables import text_table

if TYPE_CHECKING:
    from cookbook.config.cluster import Cluster


class Answer(NamedTuple):
    """A command's result; `status` is None if the command is not installed or timed out."""

    status: int | None
    output: str = ""
    error: str = ""


def ask(command: Sequence[str], timeout_s: float = 5.0) -> Answer:
    """Run `command` with a timeout, so that a hung Slurm controller cannot hold up the doctor."""
    text: Any = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    try:
        done = subprocess.run(command, timeout=timeout_s, stdin=subprocess.DEVNULL, **text)
    except subprocess.TimeoutExpired:
        return Answer(None, error=f"{command[0]}: no answer in {timeout_s:.0f} s")
    except OSError as error:
        return Answer(None, error=str(error))
    return Answer(done.returncode, done.stdout, done.stderr)


@dataclass
class Surroundings:
    """The machine as the checks see it; tests replace its parts."""

    cluster: Cluster | None = None
    local: bool = False
    repository: Path = ROOT
    root: Path = Path("/")
    site: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    read_gpus: Callable[[], tuple[InstalledGpu, ...]] = read_gpus
    run: Callable[[Sequence[str]], Answer] = ask
    which: Callable[[str], str | None] = shutil.which
    job_folder: Path | None = None
    needs_ibgda: bool = False

    def __post_init__(self) -> None:
        self.answer = functools.cache(self.run)
        self.runs = self.repository / (self.environment.get("COOKBOOK_RUNS") or "runs")
        self.installed_gpus: tuple[InstalledGpu, ...] = ()
        self.why_no_gpus: NoGpusError | None = None
        try:
            self.installed_gpus = self.read_gpus()
        except NoGpusError as error:
            self.why_no_gpus = error
        chosen = self.environment.get("CUDA_VISIBLE_DEVICES")
        self.gpus = select_visible(self.installed_gpus, chosen)
        self.has_slurm = self.which("sbatch") is not None
        self.sends_jobs = self.cluster.scheduler == "slurm" if self.cluster else self.has_slurm
        # Whether this is a node of a job that is about to train.
        self.is_in_job = self.job_folder is not None
        has_driver = self.path("/proc/driver/nvidia").exists()
        self.is_login_node = self.sends_jobs and not self.is_in_job and not has_driver
        # Whether this machine can launch large recipes, on its own GPUs or on a cluster.
        self.trains_for_real = not self.local and (bool(self.gpus) or self.sends_jobs)

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str:
        """Return the content of a file; empty if it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


State = Literal["ok", "warning", "problem", "not here"]
# A check's result: a state, a finding and, unless the state is ok, a remedy; None if the check does
# not apply.
Outcome = tuple[State, str] | tuple[State, str, str] | None


@dataclass(frozen=True)
class CheckResult:
    """One line of a diagnosis, with a remedy if its state is not ok."""

    name: str
    state: State
    found: str
    remedy: str = ""


class Fault(NamedTuple):
    """A failed check of a node, what it found, and for how many hours to exclude the node."""

    check: str
    reason: str
    hours: float


@dataclass(frozen=True)
class Check:
    """One of the doctor's checks. Some checks are also made on a job's nodes before training."""

    name: str
    look: Callable[[Surroundings], Outcome]
    is_for_local: bool  # whether the doctor also runs it with --local
    node_hours: float | None  # how long a failing node is excluded; None if not run on nodes
    is_for_gpus: bool  # whether to skip it if no GPU is visible
    is_for_ranks: bool  # whether to skip it if jobs run in a container, which has its own software

    def finding(self, here: Surroundings) -> CheckResult | None:
        if self.is_for_ranks and here.cluster and here.cluster.container:
            return CheckResult(self.name, "not here", "that of the container's image counts")
        verdict = self.look(here) if here.gpus or not self.is_for_gpus else None
        return CheckResult(self.name, *verdict) if verdict else None


PASSING_H = 1.0  # hours for which a node with a temporary fault is excluded
HARDWARE_H = 24.0  # hours for which a node with broken hardware is excluded

# The checks in report order: by `doctor/__init__.py`'s imports, then by position in the module.
CHECKS: list[Check] = []


def check(
    name: str,
    *,
    local: bool = False,
    node_hours: float | None = None,
    of_gpus: bool = False,
    of_ranks: bool = False,
) -> Callable[[Callable[[Surroundings], Outcome]], Check]:
    def add(look: Callable[[Surroundings], Outcome]) -> Check:
        CHECKS.append(Check(name, look, local, node_hours, of_gpus, of_ranks))
        return CHECKS[-1]

    return add


def diagnose(here: Surroundings) -> list[CheckResult]:
    looked = [one.finding(here) for one in CHECKS if one.is_for_local or not here.local]
    return [finding for finding in looked if finding]


def node_faults(here: Surroundings) -> list[Fault]:
    """Run the checks meant for a job's nodes; return the problems that rule out this node."""
    asked = ((one.finding(here), one.node_hours) for one in CHECKS if one.node_hours is not None)
    return [
        Fault(one.name, one.found, hours) for one, hours in asked if one and one.state == "problem"
    ]


def is_ready(findings: Sequence[CheckResult]) -> bool:
    return all(finding.state != "problem" for finding in findings)


def render_findings(findings: Sequence[CheckResult]) -> str:
    """Return a table of findings, each with its remedy below, and the counts per state."""
    texts = ("\n-> ".join(filter(None, [one.found, one.remedy])) for one in findings)
    rows = [[one.name, one.state, text] for one, text in zip(findings, texts, strict=True)]
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    counts = Counter[str](finding.state for finding in findings)
    summary = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
    verdict = "ready" if is_ready(findings) else "not ready"
    return f"{text_table(rows, width=width)}\n\n{verdict}: {summary}"
