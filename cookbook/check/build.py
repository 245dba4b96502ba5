"""Asks the pinned TorchTitan, in a fake world, whether it builds cells.

The driver imports no torch: one subprocess does, for all cells.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell, train_argv
from cookbook.config.stack import load_stack


@dataclass(frozen=True)
class Built:
    """TorchTitan's answer for one cell.

    Attributes:
        ranks: of the first rank of every pipeline stage `active`, `warnings` and `not_exercised`.
        failure: the error of one of them; then there are no ranks.
        unavailable: why TorchTitan could not be asked here; then there is neither.
    """

    ranks: tuple[dict[str, Any], ...] = ()
    failure: dict[str, Any] | None = None
    unavailable: str = ""
    seconds: float = 0.0

    def noted(self, key: str) -> list[str]:
        """Return what the ranks say under `key`, each text once."""
        return list(dict.fromkeys(text for rank in self.ranks for text in rank[key]))

    def active(self, key: str) -> set[str]:
        """Return what runs under `key` on any stage."""
        found = (rank["active"][key] or "" for rank in self.ranks)
        return {word for words in found for word in words.split(" and ") if word}


@contextlib.contextmanager
def dry_run(module: str = "cookbook.titan.dry_build") -> Iterator[Callable[[Cell], Built]]:
    """Start the subprocess; the function builds one cell."""
    with tempfile.TemporaryDirectory(prefix="cookbook-check-") as folder:
        # A reader that is gone must not cost the answer, so errors go to a file and not a pipe.
        said = Path(folder) / "errors"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "TMPDIR": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            # TorchTitan and the hooks decide for CPU or CUDA when they are imported, and CUDA, once
            # asked, cannot be used in the children that it forks.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        with said.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, load_stack().hooks],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # The children it forks must end with it.
                start_new_session=True,
            )
        assert process.stdin
        assert process.stdout
        requests, answers = process.stdin, process.stdout
        is_ready = bool(answers.readline().strip())

        def build(cell: Cell) -> Built:
            line = ""
            if is_ready:
                with contextlib.suppress(BrokenPipeError):
                    requests.write(f"{json.dumps(_request(cell))}\n")
                    requests.flush()
                    line = answers.readline()
            if not line.strip():
                lines = said.read_text(errors="replace").split("\n")
                last = next((text for text in reversed(lines) if text.strip()), "")
                return Built(unavailable=last.strip() or "the dry run ended without a word")
            answer = json.loads(line)
            for rank in answer["ranks"]:
                if "error" in rank:
                    return Built(failure=rank, seconds=answer["seconds"])
            return Built(tuple(answer["ranks"]), seconds=answer["seconds"])

        try:
            yield build
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                requests.close()
            answers.close()


def build_cells(cells: Sequence[Cell]) -> list[Built]:
    """Build every cell; cells that differ in their names alone are built once."""
    known: dict[str, Built] = {}
    keys = [json.dumps(_request(cell)) for cell in cells]
    with dry_run() as build:
        for key, cell in zip(keys, cells, strict=True):
            known[key] = known.get(key) or build(cell)
    return [known[key] for key in keys]


def _request(cell: Cell) -> dict[str, Any]:
    gpu = cell.cluster.gpu
    return {
        "argv": [word for word in train_argv(cell) if not word.startswith("--job.description=")],
        "world": cell.world,
        "pp": cell.layout.pp,
        "ranks_per_node": cell.cluster.ranks_per_node,
        "compute_capability": gpu.compute_capability if gpu else None,
    }
