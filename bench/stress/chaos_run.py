"""A training run for `bench.stress.chaos`, on a Slurm cluster that is started here."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cookbook.base.paths import ROOT
from cookbook.run.folder import Attempt, CellFolder, read_checkpoint, saved_steps
from tests.slurm_cluster import Settings, SlurmCluster

CELL = "debug-bf16-standard"
INTERVAL = 3
# One spare node, so that a lost node is replaced at once.
NODES, SPARE = 2, 1
_PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
_PROFILE = f"""
description: CPU nodes of a cluster on this machine
scheduler: slurm
nodes: {NODES}
max_restarts: 99
ranks_per_node: 1
emulate: true
cpus_per_task: 2
exclusive: true
partition: main
time: "02:00:00"
environment: {{OMP_NUM_THREADS: 1}}
"""
_OPTIONS = {
    "training.seq_len": 64,
    "lr_scheduler.decay_ratio": 0,
    "checkpoint.interval": INTERVAL,
    "checkpoint.keep_latest_k": 3,
    "checkpoint.last_save_model_only": "false",
    # On a full disk the save must fail, not another writer.
    "metrics.enable_tensorboard": "false",
}
_STEP = re.compile(r"step: +([0-9]+) +loss: +(\S+)")


@contextmanager
def chaos_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster with a preempting partition and a short requeue delay."""
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
        """Return each step of an attempt with its loss as printed."""
        text = attempt.log.read_text(errors="replace") if attempt.log.exists() else ""
        return {int(step): loss for step, loss in _STEP.findall(text)}

    def furthest(self) -> int:
        """Return the last step of any attempt."""
        return max((max(self.losses(one), default=0) for one in self.cell.attempts()), default=0)

    def whole_checkpoints(self) -> list[Path]:
        """Return the loadable checkpoints, newest first."""
        saved = saved_steps(self.cell.path / "checkpoint")
        return [path for step, path in saved if read_checkpoint(step, path).damage is None]

    def ranks(self) -> list[psutil.Process]:
        """Return the training processes of the newest attempt on all nodes, sorted by id."""
        return [one for one, is_rank in self._processes() if is_rank]

    def torchruns(self) -> list[psutil.Process]:
        found = [one for one, is_rank in self._processes() if not is_rank]
        return [one for one in found if any("bin/torchrun" in word for word in words_of(one))]

    def supervisor(self) -> psutil.Process:
        """Return the supervisor, whose parent respawns it."""
        marks = {"cookbook.supervise", str(self.cell.path.resolve())}
        found = [one for one in psutil.process_iter() if marks <= {*words_of(one)}]
        (keeper,) = [one for one in found if one.ppid() not in {other.pid for other in found}]
        (child,) = [one for one in found if one.ppid() == keeper.pid]
        return child

    def started(self) -> float | None:
        """Return when Slurm last started the job, in whole seconds."""
        at = self.cluster.job_field(self.job_id, "StartTime") or ""
        try:
            return time.mktime(time.strptime(at, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return None

    def _processes(self) -> list[tuple[psutil.Process, bool]]:
        """Return the newest attempt's processes, sorted by id, and whether each is a rank."""
        own = {"CELL_DIR": str(self.cell.path), "COOKBOOK_ATTEMPT_DIR": str(self.attempt.path)}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                variables = process.environ()
                if own.items() <= variables.items():
                    found.append((process, "RANK" in variables))
        return sorted(found, key=lambda one: one[0].pid)


def words_of(process: psutil.Process) -> list[str]:
    """Return a process's command line, empty if it has ended."""
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def start_run(cluster: SlurmCluster, folder: Path, steps: int, saves: bool = True) -> Run:
    """Submit a run of `steps` steps into `folder`; `saves`: whether it saves checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "chaos-nodes.yaml"
    profile.write_text(_PROFILE)
    options = {**_OPTIONS, "training.steps": steps, "checkpoint.enable": str(saves).lower()}
    words = ("run", "debug", "--cluster", str(profile), f"--nodes={NODES}", "--detach")
    settings = [f"--set={name}={value}" for name, value in options.items()]
    runs = folder / "runs"
    cluster.run(
        *(sys.executable, str(ROOT / "submit.py"), *words, "--no-check", *settings),
        env={"COOKBOOK_RUNS": str(runs), "VENV": sys.prefix},
    )
    (run,) = [path for path in runs.iterdir() if not path.name.startswith(".")]
    return Run(cluster, run)


def until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Wait for the condition; return when it was met."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return time.time()
