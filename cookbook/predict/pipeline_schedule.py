"""The actions of a pipeline schedule, asked of torch's own classes once for every schedule.

The driver imports no torch: one subprocess does, for all schedules, and its answers are kept.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT

# Stage, kind and microbatch.
Action = Sequence[Any]


@dataclass(frozen=True)
class Actions:
    """What every pipeline rank does, in order: (stage, kind, microbatch).

    Kinds are F (forward), B (backward), I and W (a backward's halves, for inputs and weights).
    """

    stages: tuple[list[int], ...]
    in_flight: tuple[list[list[int]], ...]
    actions: tuple[list[Action], ...]
    microbatches: range


@functools.cache
def actions_of(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    """The actions of torch's `schedule`.

    Raises:
        InputError: torch is not installed, or its class refuses the numbers.
    """
    process = _process()
    assert process.stdin
    assert process.stdout
    request = {
        "name": schedule,
        "ranks": ranks,
        "per_rank": stages_per_rank,
        "microbatches": microbatches,
    }
    try:
        process.stdin.write(f"{json.dumps(request)}\n")
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
    answer = json.loads(line)
    return Actions(
        stages=tuple(answer["stages"]),
        in_flight=tuple(answer["in_flight"]),
        actions=tuple(answer["actions"]),
        microbatches=range(microbatches),
    )


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
