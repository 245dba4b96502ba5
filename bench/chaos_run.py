"""A training run on a Slurm cluster started here, for faults to be put into."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cookbook.run.attempts import AttemptEnd, read_attempt_end, read_history
from cookbook.run.checkpoints import read_checkpoint, saved_steps
from cookbook.run.folder import Attempt, CellFolder
from tests.slurm_cluster import Settings, SlurmCluster

ROOT = Path(__file__).resolve().parent.parent
CELL = "debug-bf16-standard"
INTERVAL = 3
# One node more than the run takes: a lost one is replaced at once.
NODES, SPARE = 2, 1
_PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
_PROFILE = f"""
description: CPU nodes of a cluster on this machine
scheduler: slurm
nodes: {NODES}
ranks_per_node: 1
emulate: true
cpus_per_task: 2
exclusive: true
partition: main
time: "02:00:00"
environment: {{OMP_NUM_THREADS: 1}}
"""
_RECIPE = """
name: debug
description: "DeepSeek-V3 debug model, for faults"
nodes: {nodes}
max_restarts: 99
model: {{name: deepseek_v3, flavor: debugmodel, hf_assets_path: assets/local/tokenizer}}
parallelism: {{expert_parallel_degree: 2}}
training:
  seq_len: 64
  local_batch_size: 2
  dataset: c4_test
  dataset_path: assets/local/corpus
  steps: {steps}
optimizer: {{lr: 8e-4}}
lr_scheduler: {{warmup_steps: 2, decay_ratio: 0}}
activation_checkpoint: {{mode: none}}
compile: {{enable: false}}
checkpoint: {{enable: {saves}, interval: {interval}, keep_latest_k: 3, last_save_model_only: false}}
debug: {{seed: 42}}
metrics: {{log_freq: 1, disable_color_printing: true}}
"""
_STEP = re.compile(r"step: +([0-9]+) +loss: +(\S+)")


class ChaosError(Exception):
    """The run did not do in time what was waited for."""


@contextmanager
def chaos_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster with a partition that preempts, whose requeued jobs start again soon."""
    settings = Settings(requeue_delay=5, kill_wait=5, extra_conf=_PARTITIONS)
    with SlurmCluster.start(folder, nodes=NODES + SPARE, settings=settings) as cluster:
        yield cluster


@dataclass(frozen=True)
class Run:
    """A submitted run of one cell."""

    cluster: SlurmCluster
    folder: Path

    @property
    def cell(self) -> CellFolder:
        return CellFolder(self.folder / CELL)

    @property
    def job_id(self) -> str:
        return str(json.loads(self.cell.job.read_text())["job_id"])

    @property
    def attempt(self) -> Attempt:
        """The newest attempt."""
        return self.cell.attempts()[-1]

    def losses(self, attempt: Attempt) -> dict[int, str]:
        """Each step of an attempt, with its loss as printed."""
        text = attempt.log.read_text(errors="replace") if attempt.log.exists() else ""
        return {int(step): loss for step, loss in _STEP.findall(text)}

    def furthest(self) -> int:
        """The last step that any attempt has made."""
        return max((max(self.losses(one), default=0) for one in self.cell.attempts()), default=0)

    def history(self) -> list[AttemptEnd]:
        return read_history(self.cell.attempts())

    def whole_checkpoints(self) -> list[Path]:
        """The checkpoints that can be loaded, the newest first."""
        saved = saved_steps(self.cell.path / "checkpoint")
        return [path for step, path in saved if read_checkpoint(step, path).damage is None]

    def ranks(self) -> list[psutil.Process]:
        """The training processes of the newest attempt, on all nodes."""
        return [one for one, variables in self._processes() if "RANK" in variables]

    def torchruns(self) -> list[psutil.Process]:
        return [
            one
            for one, variables in self._processes()
            if "RANK" not in variables and any("bin/torchrun" in word for word in words_of(one))
        ]

    def supervisor(self) -> psutil.Process:
        """The process that watches; its keeper is its parent."""
        found = [
            one
            for one in psutil.process_iter()
            if "submitit.core._submit" in words_of(one)
            and str(self.cell.job_files) in words_of(one)
        ]
        (keeper,) = [one for one in found if one.ppid() not in {other.pid for other in found}]
        (child,) = [one for one in found if one.ppid() == keeper.pid]
        return child

    def node_of(self, process: psutil.Process) -> str:
        return str(process.environ()["SLURMD_NODENAME"])

    def state(self) -> str | None:
        return self.cluster.job_field(self.job_id, "JobState")

    def started(self) -> float | None:
        """When Slurm last started the job; whole seconds."""
        at = self.cluster.job_field(self.job_id, "StartTime") or ""
        try:
            return time.mktime(time.strptime(at, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return None

    def end_of(self, attempt: Attempt) -> AttemptEnd | None:
        return read_attempt_end(attempt)

    def _processes(self) -> list[tuple[psutil.Process, Mapping[str, str]]]:
        mark, attempt = str(self.cell.path), str(self.attempt.path)
        found = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
            except psutil.Error:
                continue
            is_own = variables.get("CELL_DIR") == mark
            if is_own and variables.get("COOKBOOK_ATTEMPT_DIR") == attempt:
                found.append((process, variables))
        return found


def words_of(process: psutil.Process) -> Sequence[str]:
    """A process's command line; empty where it has ended."""
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


def start_run(cluster: SlurmCluster, folder: Path, steps: int, saves: bool = True) -> Run:
    """Submit a run of so many steps, with checkpoints or without; it lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    profile, recipe = folder / "chaos-nodes.yaml", folder / "chaos.yaml"
    profile.write_text(_PROFILE)
    values = {"nodes": NODES, "steps": steps, "interval": INTERVAL, "saves": str(saves).lower()}
    recipe.write_text(_RECIPE.format(**values))
    words = ("run", str(recipe), "--cluster", str(profile), "--detach", "--no-check")
    runs = folder / "runs"
    cluster.run(
        *(sys.executable, str(ROOT / "submit.py"), *words),
        env={"COOKBOOK_RUNS": str(runs), "VENV": sys.prefix},
        timeout=120,
    )
    (run,) = [path for path in runs.iterdir() if not path.name.startswith(".")]
    return Run(cluster, run)


def report(run: Run) -> dict[str, Any]:
    """What `report --format json` says of the cell."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "submit.py"), "report", str(run.folder), "--format", "json"],
        env={**run.cluster.env, "VENV": sys.prefix},
        capture_output=True,
        text=True,
        check=True,
    )
    (cell,) = json.loads(done.stdout)["cells"]
    return dict(cell)


def until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Wait for the condition; the time when it was met."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ChaosError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return time.time()
