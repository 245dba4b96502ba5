"""The faults that a run must survive; each is put into a run that is making steps."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.chaos_run import NODES, Run, until


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        inject: puts it into the run; the time when it was there.
        ends_attempt: whether the attempt can't go on.
        by_slurm: Slurm starts the job again, after a time of its own.
    """

    inject: Callable[[Run, random.Random], float]
    ends_attempt: bool = True
    by_slurm: bool = False


def _kill_rank(run: Run, chance: random.Random) -> float:
    chance.choice(sorted(run.ranks(), key=lambda one: one.pid)).send_signal(signal.SIGKILL)
    return time.time()


def _kill_torchrun(run: Run, chance: random.Random) -> float:
    chance.choice(sorted(run.torchruns(), key=lambda one: one.pid)).send_signal(signal.SIGKILL)
    return time.time()


def _stop_rank(run: Run, chance: random.Random) -> float:
    chance.choice(sorted(run.ranks(), key=lambda one: one.pid)).send_signal(signal.SIGSTOP)
    return time.time()


def _kill_supervisor(run: Run, chance: random.Random) -> float:
    run.supervisor().send_signal(signal.SIGKILL)
    return time.time()


def _lose_node(run: Run, chance: random.Random) -> float:
    nodes = sorted({run.node_of(rank) for rank in run.ranks()})
    node = chance.choice(nodes)
    run.cluster.kill_node(node)
    lost = time.time()
    # Brought back when the run has left it, so that the next lost one has a replacement.
    number = run.attempt.number
    until(lambda: run.attempt.number > number, 180, "an attempt on other nodes")
    run.cluster.start_node(node)
    return lost


def _requeue(run: Run, chance: random.Random) -> float:
    run.cluster.run("scontrol", "requeue", run.job_id)
    return time.time()


def _preempt(run: Run, chance: random.Random) -> float:
    nodes = len(run.cluster.node_names)
    script = run.folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 2\n")
    options = ["--partition=urgent", f"--nodes={nodes}", "--exclusive", "--output=/dev/null"]
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
    """Leave less room than a checkpoint takes until one was to be saved; then make room again."""
    filler = run.folder.parent.parent / "filler"
    _fill(filler, leave=1 << 20)
    try:
        # No log can say it: the disk is full.
        until(lambda: len(run.ranks()) < NODES, 120, "a save that fails")
        failed = time.time()
        until(lambda: not run.ranks(), 60, "the end of the other ranks")
        time.sleep(3)
    finally:
        filler.unlink()
    return failed


def _fill(path: Path, leave: int) -> None:
    """Take all room but `leave` bytes, also while a save takes some of it."""
    with path.open("wb") as file:
        while (room := shutil.disk_usage(path.parent).free - leave) > 0:
            with suppress(OSError):  # by now less is free
                os.posix_fallocate(file.fileno(), file.tell(), room)
                file.seek(0, os.SEEK_END)


SPOILING = frozenset({"checkpoint truncated", "metadata missing", "disk full in a save"})
FAULTS = {
    "rank killed": Fault(_kill_rank),
    "torchrun killed": Fault(_kill_torchrun),
    "rank stopped (hang)": Fault(_stop_rank),
    "supervisor killed": Fault(_kill_supervisor),
    "node lost": Fault(_lose_node, by_slurm=True),
    "job requeued": Fault(_requeue, by_slurm=True),
    "job preempted": Fault(_preempt, by_slurm=True),
    "slurmctld restarted": Fault(_restart_controller, ends_attempt=False),
    "checkpoint truncated": Fault(_cut_checkpoint),
    "metadata missing": Fault(_lose_metadata),
    "disk full in a save": Fault(_fill_disk),
}
