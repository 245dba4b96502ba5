"""Builds cells in a fake world and prints TorchTitan's answer to each: built, or its error.

    CUDA_VISIBLE_DEVICES= WANDB_MODE=disabled python -m cookbook.titan.dry_build STACK

STACK is the package that the cells' jobs import, `cookbook.titan.tt_0_2_2` for one.
It answers each JSON line on standard input, a cell, with one line. TorchTitan's own Trainer is made
from the cell's own argv, in a fake world of the cell's size, for the first rank of every pipeline
stage. Each rank is built in a forked child, which inherits all imports.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_LIMIT_S = 240.0
_FORK = multiprocessing.get_context("fork")
Answer = dict[str, Any]


def build_cell(request: Answer, describe: Callable[..., Answer]) -> Answer:
    """Build the first rank of every pipeline stage, each in a child.

    Args:
        request: `argv`, `world`, `pp`, `ranks_per_node`, `compute_capability` (null for CPU ranks),
            and `stack`, the package that the cells' jobs import.
        describe: makes the answer from a `world.Build` and the stack.

    Returns:
        `ranks`, each with that answer or an `error`; `seconds`.
    """
    start = time.monotonic()
    stage_ranks = max(request["world"] // max(request["pp"], 1), 1)
    waiting = [stage * stage_ranks for stage in range(request["pp"])]
    answers: list[Answer] = []
    running: dict[Connection, tuple[int, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                ours, theirs = _FORK.Pipe(duplex=False)
                rank = waiting.pop(0)
                child = _FORK.Process(target=_answer, args=(request, rank, describe, theirs))
                child.start()
                theirs.close()
                running[ours] = (rank, child, time.monotonic() + _LIMIT_S)
            ready = wait(running, timeout=0.2)
            for pipe, (rank, child, deadline) in list(running.items()):
                if pipe not in ready and time.monotonic() < deadline:
                    continue
                answers.append(_read(pipe, rank, child, pipe in ready))
                del running[pipe]
                if "error" in answers[-1]:
                    # The other stages would mostly say the same.
                    waiting.clear()
    finally:
        for _, child, _ in running.values():
            child.kill()
    answers.sort(key=lambda answer: answer["rank"])
    return {"ranks": answers, "seconds": round(time.monotonic() - start, 2)}


def _read(pipe: Connection, rank: int, child: Any, is_ready: bool) -> Answer:
    """Return a child's answer, or why there is none."""
    if not is_ready:
        child.kill()
        return _failed(rank, f"not built within {_LIMIT_S:.0f} s", "TimeoutError")
    try:
        answer: Answer = pipe.recv()
    except EOFError:
        child.join()
        code = child.exitcode
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return _failed(rank, f"the process ended with {how}", "ProcessError")
    child.join()
    return answer


def _answer(request: Answer, rank: int, describe: Callable[..., Answer], pipe: Connection) -> None:
    """Build one rank in the child, which ends with it."""
    # A signal meant for the parent ends the child the plain way.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Of an exit by tyro or the cookbook, the last output is the reason to report.
    with tempfile.TemporaryDirectory(prefix="cookbook-check-") as folder:
        output = Path(folder) / "output"
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        pipe.send(_build_rank(request, rank, folder, output, describe))


def _build_rank(
    request: Answer, rank: int, folder: str, output: Path, describe: Callable[..., Answer]
) -> Answer:
    from cookbook.titan.dry_build.world import build_trainer

    try:
        return {"rank": rank} | describe(build_trainer(request, rank, folder), request["stack"])
    except SystemExit:
        return _failed(rank, _last_words(output.read_text(errors="replace")), "SystemExit")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [_place(frame.filename, frame.lineno) for frame in frames]
        own = [place for place in places if place.startswith(("torchtitan", "cookbook"))]
        words = " ".join(str(error).split()) or type(error).__name__
        return _failed(rank, words, type(error).__name__, (own or places or [""])[-1])


def _last_words(text: str) -> str:
    """Return why a process ended itself: the cookbook's refusal, or tyro's of the argv."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    refusals = [line for line in lines if "cookbook refuses: " in line]
    if refusals:
        return refusals[-1].partition("cookbook refuses: ")[2]
    return " ".join(line for line in lines if line)[-600:]


def _failed(rank: int, message: str, kind: str, place: str = "") -> Answer:
    return {"rank": rank, "error": message, "kind": kind, "place": place}


def _place(filename: str, line: int | None) -> str:
    """Return `torchtitan/train.py:120` of a path that differs from machine to machine."""
    parts = Path(filename).parts
    for root in ("torchtitan", "cookbook", "torchao", "torch"):
        if root in parts:
            start = len(parts) - 1 - parts[::-1].index(root)
            return f"{'/'.join(parts[start:])}:{line}"
    return f"{Path(filename).name}:{line}"


def main(stack: str, describe: Callable[..., Answer] | None = None) -> None:
    """Answer requests until there are no more."""
    # A library's output must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import torchtitan.train  # noqa: F401  (for the children, as is the next one)

    importlib.import_module(stack)
    from cookbook.titan.dry_build import world

    torch.set_num_threads(1)
    world.warm_up(stack)
    # Forked children share the objects that are never collected.
    gc.collect()
    gc.freeze()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = {**json.loads(line), "stack": stack}
        answer = build_cell(request, describe or world.describe)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
