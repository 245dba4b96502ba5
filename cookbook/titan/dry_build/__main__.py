"""Builds cells in a fake world and says what TorchTitan builds of each, or what it raises.

    CUDA_VISIBLE_DEVICES= WANDB_MODE=disabled python -m cookbook.titan.dry_build STACK

STACK is the package that the cells' jobs import, `cookbook.titan.tt_0_2_2` for one.
It reads cells from standard input, one JSON object a line, and answers each with one line.
TorchTitan's own Trainer is made from the cell's own argv, in a fake world of the cell's size, for
the first rank of every pipeline stage. Parameters stay on the meta device, so 671B fits anywhere.
Each rank is built in a forked child, which inherits all imports and leaves nothing to the next one.
The answer's `not_exercised` names every stand-in for something that only the job has.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_LIMIT_S = 240.0


def build_cell(request: dict[str, Any]) -> dict[str, Any]:
    """Build the first rank of every pipeline stage, each in a child.

    Args:
        request: `argv`, `world`, `pp`, `ranks_per_node`, `compute_capability` (null for CPU ranks),
            and `stack`, the package that the cells' jobs import.

    Returns:
        `ranks`, each with what `rank_view.view_rank` returns or an `error`; `seconds`,
        `memory_gib`.
    """
    start = time.monotonic()
    stage_ranks = max(request["world"] // max(request["pp"], 1), 1)
    ranks = [stage * stage_ranks for stage in range(request["pp"])]
    answers: dict[int, dict[str, Any]] = {}
    waiting = list(ranks)
    running: dict[int, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(os.cpu_count() or 1, 1):
                rank = waiting.pop(0)
                running[rank] = _Child(request, rank)
            for rank, child in list(running.items()):
                answer = child.poll()
                if answer is not None:
                    answers[rank] = answer
                    del running[rank]
                    if "error" in answer:
                        # The other stages would mostly say the same.
                        waiting.clear()
    finally:
        for child in running.values():
            child.kill()
    return {
        "ranks": [answers[rank] for rank in ranks if rank in answers],
        "seconds": round(time.monotonic() - start, 2),
    }


class _Child:
    """A forked process that builds one rank and writes its answer into a pipe."""

    def __init__(self, request: dict[str, Any], rank: int) -> None:
        self.rank = rank
        self._deadline = time.monotonic() + _LIMIT_S
        self._text = b""
        self._pipe, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            _answer_and_exit(request, rank, write_end)
        os.close(write_end)

    def poll(self) -> dict[str, Any] | None:
        """The answer; None while there is none yet."""
        ready, _, _ = select.select([self._pipe], [], [], 0.05)
        if ready:
            block = os.read(self._pipe, 1 << 20)
            self._text += block
            if not block:
                return self._end()
        if time.monotonic() > self._deadline:
            self.kill()
            return _failed(self.rank, f"not built within {_LIMIT_S:.0f} s", "TimeoutError")
        return None

    def _end(self) -> dict[str, Any]:
        os.close(self._pipe)
        _, status, usage = os.wait4(self._pid, 0)
        if not self._text:
            how = (
                f"signal {-code}"
                if (code := os.waitstatus_to_exitcode(status)) < 0
                else f"status {code}"
            )
            return _failed(self.rank, f"the process ended with {how}", "ProcessError")
        answer: dict[str, Any] = json.loads(self._text)
        return answer | {"memory_gib": round(usage.ru_maxrss / 2**20, 2)}

    def kill(self) -> None:
        os.close(self._pipe)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _answer_and_exit(request: dict[str, Any], rank: int, write_end: int) -> None:
    """The child's whole life; nothing of the parent's may run after it."""
    code = 1
    try:
        # A signal meant for the parent ends the child the plain way.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # What tyro and the cookbook say before they exit is the reason to report.
        with tempfile.TemporaryDirectory(prefix="cookbook-check-") as folder:
            said = Path(folder) / "said"
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            answer = _build_rank(request, rank, folder, said)
        with os.fdopen(write_end, "w") as pipe:
            json.dump(answer, pipe)
        code = 0
    finally:
        os._exit(code)


def _build_rank(request: dict[str, Any], rank: int, folder: str, said: Path) -> dict[str, Any]:
    from cookbook.titan.dry_build.rank_view import view_rank
    from cookbook.titan.dry_build.world import build_trainer

    try:
        build = build_trainer(request, rank, folder)
        return {"rank": rank} | view_rank(build, request["stack"])
    except SystemExit:
        return _failed(rank, _last_words(said.read_text(errors="replace")), "SystemExit")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [_place(frame.filename, frame.lineno) for frame in frames]
        own = [place for place in places if place.startswith(("torchtitan", "cookbook"))]
        words = " ".join(str(error).split()) or type(error).__name__
        return _failed(rank, words, type(error).__name__, (own or places or [""])[-1])


def _last_words(text: str) -> str:
    """Why a process ended itself: the cookbook's refusal, or what tyro said of the argv."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    refusals = [line for line in lines if "cookbook refuses: " in line]
    if refusals:
        return refusals[-1].partition("cookbook refuses: ")[2]
    return " ".join(line for line in lines if line)[-600:]


def _failed(rank: int, message: str, kind: str, place: str = "") -> dict[str, Any]:
    return {"rank": rank, "error": message, "kind": kind, "place": place}


def _place(filename: str, line: int | None) -> str:
    """`torchtitan/train.py:120` of a path that differs from machine to machine."""
    parts = Path(filename).parts
    for root in ("torchtitan", "cookbook", "torchao", "torch"):
        if root in parts:
            start = len(parts) - 1 - parts[::-1].index(root)
            return f"{'/'.join(parts[start:])}:{line}"
    return f"{Path(filename).name}:{line}"


def _requests(lines: TextIO) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            yield json.loads(line)


def main(stack: str) -> None:
    """Answer requests until there are no more."""
    # Whatever a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.monotonic()

    import torch
    import torchtitan.train  # noqa: F401  (for the children, as is the next one)

    importlib.import_module(stack)
    from cookbook.titan.dry_build.world import warm_up

    torch.set_num_threads(1)
    warm_up(stack)
    # Forked children share what is never collected.
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready_s": round(time.monotonic() - started, 2)}), file=answers, flush=True)
    for request in _requests(sys.stdin):
        print(json.dumps(build_cell({**request, "stack": stack})), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
