"""One rank of a network test: an all-reduce over all ranks, an all-to-all over groups of them.

    python -m cookbook.titan.common.collectives PLAN          (PLAN: a `Plan` as JSON)

Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torch.distributed does. The
first rank of each group prints a line of JSON with the group's bandwidth.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

MARK = "cookbook-link"
_ROUNDS = 4


@dataclass(frozen=True)
class Plan:
    """The work of the ranks."""

    device: str  # `cuda` (NCCL) or `cpu` (gloo)
    num_bytes: int  # contributed by each rank to a collective
    groups: list[list[int]]  # of ranks, for the all-to-all; each rank is in one of them at most
    timeout_s: float  # for each collective


def main(plan: Plan) -> None:
    """Run this rank's part of the plan."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=plan.timeout_s)
    device = torch.device(plan.device)
    if plan.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if plan.device == "cuda" else "gloo", timeout=timeout)
    values = torch.ones(plan.num_bytes // 4, device=device)
    seconds = _time(lambda: dist.all_reduce(values), None, device)
    # As nccl-tests count: the bytes that each rank must at least send and receive.
    if rank == 0:
        _print("all_reduce", [0, world - 1], 2 * plan.num_bytes * (world - 1) / world, seconds)
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in plan.groups]
    for ranks, group in zip(plan.groups, groups, strict=True):
        if rank not in ranks:
            continue
        sent = torch.ones(plan.num_bytes // 4 // len(ranks) * len(ranks), device=device)
        received = torch.empty_like(sent)
        exchange = partial(dist.all_to_all_single, received, sent, group=group)
        seconds = _time(exchange, group, device)
        if rank == ranks[0]:
            _print("all_to_all", ranks, sent.nbytes * (len(ranks) - 1) / len(ranks), seconds)
    dist.barrier()
    # Destroying the process group can hang where a peer has exited already.
    sys.stdout.flush()
    os._exit(0)


def _time(
    work: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """Return the seconds of `work` once its connections exist."""
    work()
    dist.barrier(group=group)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    started = time.monotonic()
    for _ in range(_ROUNDS):
        work()
    wait()
    return (time.monotonic() - started) / _ROUNDS


def _print(name: str, ranks: list[int], num_bytes: float, seconds: float) -> None:
    found = {
        "team": os.environ.get("COOKBOOK_TEAM", "0"),
        "name": name,
        "ranks": [ranks[0], ranks[-1]],
        "gb_per_s": num_bytes / seconds / 1e9,
    }
    print(MARK, json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
