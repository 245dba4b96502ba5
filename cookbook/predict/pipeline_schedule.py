"""A pipeline schedule: torch's own list of actions, and how long it takes to play it through.

The driver imports no torch: one subprocess lists the actions of all schedules.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT

# Stage, kind and microbatch. Kinds are F (forward), B (backward), I and W (a backward's halves, for
# inputs and weights).
Action = Sequence[Any]
_BACKWARDS = ("B", "I")


@dataclass(frozen=True)
class Actions:
    """Of every pipeline rank: its stages, its microbatches in flight and its actions, in order."""

    stages: tuple[list[int], ...]
    in_flight: tuple[list[list[int]], ...]
    actions: tuple[list[Action], ...]
    microbatches: range


@functools.cache
def actions_of(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    """Return the actions of torch's `schedule`.

    Raises:
        InputError: torch is not installed, or its class refuses the numbers.
    """
    process = _process()
    assert process.stdin
    assert process.stdout
    request = {"name": schedule, "ranks": ranks, "per_rank": stages_per_rank}
    try:
        process.stdin.write(f"{json.dumps({**request, 'microbatches': microbatches})}\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line.strip():
        _process.cache_clear()
        raise InputError(
            "parallelism.pipeline_parallel_schedule",
            f"torch did not list the actions of {schedule} with {microbatches} microbatches",
            "is torch installed? bash setup.sh",
        )
    answer = {name: tuple(of_ranks) for name, of_ranks in json.loads(line).items()}
    return Actions(**answer, microbatches=range(microbatches))


@functools.cache
def _process() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cookbook.titan.dry_build.schedules"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.kill)
    return process


@dataclass(frozen=True)
class Played:
    """When all ranks were done, and how long each of them worked; milliseconds."""

    end_ms: float
    busy_ms: tuple[float, ...]

    @property
    def busiest(self) -> int:
        """The rank that works longest."""
        return max(range(len(self.busy_ms)), key=self.busy_ms.__getitem__)

    @property
    def bubble_ms(self) -> float:
        """Idle time of the busiest rank."""
        return self.end_ms - self.busy_ms[self.busiest]


def play(
    actions: Sequence[Sequence[Action]],
    times_ms: Mapping[tuple[int, str], float],
    last_stage: int,
    transfer_ms: float,
) -> Played:
    """Let every rank do its actions in order, each as soon as its input has arrived.

    Args:
        times_ms: of an action, by stage and kind.
        transfer_ms: between two stages; the sender goes on meanwhile.
    """
    owner = {stage: rank for rank, own in enumerate(actions) for stage, _, _ in own}
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * len(actions)
    busy = [0.0] * len(actions)
    left = [iter(own) for own in actions]
    following = [next(own, None) for own in left]
    while any(following):
        advanced = False
        for rank, own in enumerate(left):
            while (action := following[rank]) is not None:
                stage, kind, microbatch = action
                ready = 0.0
                needed = _needed(stage, kind, microbatch, last_stage)
                if needed is not None:
                    if needed not in done:
                        break
                    ready = done[needed] + (transfer_ms if owner[needed[0]] != rank else 0.0)
                time_ms = times_ms[stage, kind]
                clock[rank] = max(clock[rank], ready) + time_ms
                busy[rank] += time_ms
                # The next stage waits for a whole backward, or for its half for the inputs.
                done[stage, "B" if kind in _BACKWARDS else kind, microbatch] = clock[rank]
                following[rank] = next(own, None)
                advanced = True
        assert advanced, "the schedule waits for itself"
    return Played(max(clock), tuple(busy))


def _needed(stage: int, kind: str, microbatch: int, last_stage: int) -> tuple[int, str, int] | None:
    """Return the neighbour's action that must be done before."""
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage else None
    if kind in _BACKWARDS and stage < last_stage:
        return (stage + 1, "B", microbatch)
    return None
