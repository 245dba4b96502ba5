"""Runs a function in the ranks of a gloo world and returns what it returned in each of them."""

import importlib
import io
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.checkout import PRELOADED, STAND_IN
from tests.waiting import HANG_S


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, seconds: float = HANG_S
) -> list[Any]:
    """`function(*args)` in `ranks` processes of one gloo world; the results, by rank.

    The processes are forked from a server that has imported TorchTitan and computed nothing, so
    that the import is paid for once and no thread is inherited.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    queue: Any = context.Queue()
    processes = [
        context.Process(target=_rank, args=(function, rank, ranks, port, queue, args), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, saved, failure = queue.get(timeout=seconds)
            assert not failure, f"rank {rank} failed:\n{failure}"
            results[rank] = torch.load(io.BytesIO(saved), weights_only=False)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(ranks)]


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    port: int,
    queue: Any,
    args: tuple[Any, ...],
) -> None:
    sys.path.insert(0, str(STAND_IN))
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    try:
        # The server of ranks has imported these, but not that of `forked_pytest.py`.
        for name in PRELOADED:
            importlib.import_module(name)
        dist.init_process_group(
            "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks
        )
        # As bytes, since a tensor in a queue is shared memory that ends with this process.
        saved = io.BytesIO()
        torch.save(function(*args), saved)
        queue.put((rank, saved.getvalue(), ""))
        if dist.is_initialized():  # a Trainer ends its world itself
            dist.barrier()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)
