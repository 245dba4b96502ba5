"""One rank of a network test: an all-reduce over all ranks, then all-to-alls within groups.

    python -m cookbook.titan.common.collectives PLAN          (PLAN: `main`'s arguments as JSON)

Each node's ranks have a torchrun of their own, of which only LOCAL_RANK is read. The first rank of
each group prints the group's bandwidth as a line of JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

MARK = "cookbook-link"
_ROUNDS = 4


def main(
    device: str,  # `cuda` (NCCL) or `cpu` (gloo)
    num_bytes: int,  # size of each rank's input to a collective
    groups: list[list[int]],  # groups of ranks, which run an all-to-all each, in this order
    timeout_s: float,  # limit for each collective
    address: str,  # of rank 0, which listens at `port`
    port: int,
    world: int,
    first_rank: int,  # of this node
) -> None:
    """Run this rank's part of the test; the ranks of all nodes get the same plan."""
    local, timeout = int(os.environ["LOCAL_RANK"]), timedelta(seconds=timeout_s)
    rank, place = first_rank + local, f"tcp://{address}:{port}"
    if device == "cuda":
        torch.cuda.set_device(local)
    # Else rank 0 would look for its own torchrun's store there.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, place, timeout, world, rank)
    values = torch.ones(num_bytes // 4, device=device)
    # Bus bandwidth as in nccl-tests: a ring all-reduce moves each value twice, so count it twice.
    _measure("all_reduce", range(world), 2 * num_bytes, partial(dist.all_reduce, values), None)
    process_groups = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
    for ranks, group in zip(groups, process_groups, strict=True):
        if rank in ranks:
            sent = torch.ones(len(values) // len(ranks) * len(ranks), device=device)
            exchange = partial(dist.all_to_all_single, torch.empty_like(sent), sent, group=group)
            _measure("all_to_all", ranks, sent.nbytes, exchange, group)
    dist.barrier()
    # Exit without destroying the process group, which can hang if a peer has already exited.
    sys.stdout.flush()
    os._exit(0)


def _measure(
    name: str,
    ranks: Sequence[int],
    num_bytes: int,  # bytes each rank sends and receives, including the share it keeps
    work: Callable[[], object],
    group: dist.ProcessGroup | None,
) -> None:
    wait = torch.cuda.synchronize if dist.get_backend() == "nccl" else lambda: None
    work()  # untimed: the first call connects the ranks
    dist.barrier(group=group)
    wait()
    started = time.monotonic()
    for _ in range(_ROUNDS):
        work()
    wait()
    seconds = (time.monotonic() - started) / _ROUNDS
    found = {
        "name": name,
        "ranks": [ranks[0], ranks[-1]],
        "gb_per_s": num_bytes * (len(ranks) - 1) / len(ranks) / seconds / 1e9,
    }
    if dist.get_rank() == ranks[0]:
        print(MARK, json.dumps(found), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
