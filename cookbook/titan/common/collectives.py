"""Times an all-reduce over all ranks and an all-to-all over groups of them: one rank of a test.

    python -m cookbook.titan.common.collectives PLAN          (PLAN: a `Plan` as JSON)

Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torch.distributed does. The
first rank of each group prints a line of JSON with what the group reached.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

MARK = "cookbook-link"
_ROUNDS = 4


@dataclass(frozen=True)
class Plan:
    """What the ranks do.

    Attributes:
        device: `cuda` (NCCL) or `cpu` (gloo).
        num_bytes: that each rank contributes to a collective.
        groups: of ranks, for the all-to-all; each rank is in one of them at most.
        timeout_s: for each collective.
    """

    device: str
    num_bytes: int
    groups: list[list[int]]
    timeout_s: float


def main(plan: Plan) -> None:
    """Run this rank's part of the plan."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=plan.timeout_s)
    device = torch.device(plan.device)
    if plan.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if plan.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout)
    values = torch.ones(plan.num_bytes // 4, device=device)
    seconds = _timed(lambda: dist.all_reduce(values), None, device)
    # As nccl-tests count: what each rank must at least send and receive.
    _tell(rank, "all_reduce", [0, world - 1], 2 * plan.num_bytes * (world - 1) / world, seconds)
    if plan.groups:
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in plan.groups]
        for ranks, group in zip(plan.groups, groups, strict=True):
            if rank in ranks:
                _exchange(rank, ranks, group, plan.num_bytes, device)
    dist.barrier()
    # Ending the process group can hang where a peer has gone already, and nothing is left to do.
    sys.stdout.flush()
    os._exit(0)


def _exchange(
    rank: int, ranks: list[int], group: dist.ProcessGroup, num_bytes: int, device: torch.device
) -> None:
    size = len(ranks)
    sent = torch.ones(num_bytes // 4 // size * size, device=device)
    received = torch.empty_like(sent)
    seconds = _timed(lambda: dist.all_to_all_single(received, sent, group=group), group, device)
    if rank == ranks[0]:
        _tell(0, "all_to_all", ranks, sent.nbytes * (size - 1) / size, seconds)


def _timed(
    work: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """Seconds that `work` takes, once the connections are there."""
    work()
    dist.barrier(group=group)
    _wait(device)
    started = time.monotonic()
    for _ in range(_ROUNDS):
        work()
    _wait(device)
    return (time.monotonic() - started) / _ROUNDS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tell(rank: int, name: str, ranks: list[int], num_bytes: float, seconds: float) -> None:
    if rank == 0:
        found = {
            "team": os.environ.get("COOKBOOK_TEAM", "0"),
            "name": name,
            "ranks": [ranks[0], ranks[-1]],
            "gb_per_s": num_bytes / seconds / 1e9,
        }
        print(MARK, json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
