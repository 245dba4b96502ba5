"""The faults that a training run must survive."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from bench.stress.chaos_run import NODES, Run, until

Inject = Callable[[Run, random.Random], float]


@dataclass(frozen=True)
class Fault:
    """A fault; `inject` returns its time. `by_slurm`: Slurm restarts the job, after a delay."""

    inject: Inject
    ends_attempt: bool = True
    by_slurm: bool = False


def _send(processes: Callable[[Run], list[psutil.Process]], sent: int) -> Inject:
    """Return a fault that sends a signal to one of `processes`, chosen at random."""

    def inject(run: Run, chance: random.Random) -> float:
        chance.choice(processes(run)).send_signal(sent)
        return time.time()

    return inject


_kill_rank = _send(Run.ranks, signal.SIGKILL)


def _lose_node(run: Run, chance: random.Random) -> float:
    nodes = sorted({rank.environ()["SLURMD_NODENAME"] for rank in run.ranks()})
    node = chance.choice(nodes)
    run.cluster.kill_node(node)
    lost = time.time()
    # Start the node again once the run has left it: the next loss needs a spare.
    number = run.attempt.number
    until(lambda: run.attempt.number > number, 180, "an attempt on other nodes")
    run.cluster.start_node(node)
    return lost


def _requeue(run: Run, chance: random.Random) -> float:
    run.cluster.run("scontrol", "requeue", run.job_id)
    return time.time()


def _preempt(run: Run, chance: random.Random) -> float:
    script = run.folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 2\n")
    nodes = f"--nodes={len(run.cluster.node_names)}"
    options = ["--partition=urgent", nodes, "--exclusive", "--output=/dev/null"]
    run.cluster.submit(script, options=options)
    return time.time()


def _restart_controller(run: Run, chance: random.Random) -> float:
    run.cluster.stop_controller()
    away = time.time()
    time.sleep(3)
    run.cluster.start_controller()
    return away


def _cut_checkpoint(run: Run, chance: random.Random) -> float:
    newest = run.whole_checkpoints()[0]
    file = max(newest.glob("*.distcp"), key=lambda path: (path.stat().st_size, path.name))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    return _kill_rank(run, chance)


def _lose_metadata(run: Run, chance: random.Random) -> float:
    (run.whole_checkpoints()[0] / ".metadata").unlink()
    return _kill_rank(run, chance)


def _fill_disk(run: Run, chance: random.Random) -> float:
    """Fill the disk until a save fails, then free it."""
    filler = run.folder.parent.parent / "filler"
    with filler.open("wb") as file:
        # Repeat: a save may have freed some room meanwhile.
        while (room := shutil.disk_usage(filler.parent).free - (1 << 20)) > 0:
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), file.tell(), room)
                file.seek(0, os.SEEK_END)
    try:
        # Watch the processes: a full disk takes no log.
        until(lambda: len(run.ranks()) < NODES, 120, "a save that fails")
        failed = time.time()
        until(lambda: not run.ranks(), 60, "the end of the other ranks")
        time.sleep(3)
    finally:
        filler.unlink()
    return failed


SPOILING = frozenset({"checkpoint truncated", "metadata missing", "disk full in a save"})
FAULTS = {
    "rank killed": Fault(_kill_rank),
    "torchrun killed": Fault(_send(Run.torchruns, signal.SIGKILL)),
    "rank stopped (hang)": Fault(_send(Run.ranks, signal.SIGSTOP)),
    "supervisor killed": Fault(_send(lambda run: [run.supervisor()], signal.SIGKILL)),
    "node lost": Fault(_lose_node, by_slurm=True),
    "job requeued": Fault(_requeue, by_slurm=True),
    "job preempted": Fault(_preempt, by_slurm=True),
    "slurmctld restarted": Fault(_restart_controller, ends_attempt=False),
    "checkpoint truncated": Fault(_cut_checkpoint),
    "metadata missing": Fault(_lose_metadata),
    "disk full in a save": Fault(_fill_disk),
}
