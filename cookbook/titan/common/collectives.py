"""One rank of a network test: an all-reduce over all ranks, then all-to-alls within groups.

    python -m cookbook.titan.common.collectives PLAN          (PLAN: a `Plan` as JSON)

Reads torch.distributed's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The
first rank of each group prints the group's bandwidth as a line of JSON.
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
    """The collectives to time, the same plan for all ranks."""

    device: str  # `cuda` (NCCL) or `cpu` (gloo)
    num_bytes: int  # size of each rank's input to a collective
    groups: list[list[int]]  # disjoint groups of ranks, each of which runs an all-to-all
    timeout_s: float  # limit for each collective


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
    # Bus bandwidth as in nccl-tests: the bytes that each rank must at least send and receive.
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
    # Exit without destroying the process group, which can hang if a peer has already exited.
    sys.stdout.flush()
    os._exit(0)


def _time(
    work: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """Return the mean seconds of a `work` call, after one call that sets up the connections."""
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
