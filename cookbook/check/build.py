"""What the pinned TorchTitan builds of cells in a fake world, or what it raises.

The driver imports no torch: one subprocess does, for all cells, and ends with them. All that it
writes lies in a temporary folder that goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cookbook.base.paths import ROOT
from cookbook.config.cell import Cell, train_argv
from cookbook.config.stack import load_stack


@dataclass(frozen=True)
class Built:
    """One cell: `views` of the first rank of every pipeline stage, or the `failure` of one of them.

    `unavailable` says why nothing could be tried here; then there is neither.
    """

    views: tuple[dict[str, Any], ...] = ()
    failure: dict[str, Any] | None = None
    unavailable: str = ""
    seconds: float = 0.0
    not_exercised: tuple[str, ...] = field(default=())


class DryRun:
    """The subprocess, open for any number of cells."""

    def __enter__(self) -> DryRun:
        self._folder = tempfile.TemporaryDirectory(prefix="cookbook-check-")
        # A reader that is gone must not cost the answer, so errors go to a file and not a pipe.
        self._errors = Path(self._folder.name) / "errors"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            ),
            "TMPDIR": self._folder.name,
            "PYTHONDONTWRITEBYTECODE": "1",
            # From the start: TorchTitan and the cookbook's hooks decide for CPU or CUDA when they
            # are imported, and CUDA, once asked, cannot be used in the children that it forks.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cookbook.titan.dry_build", load_stack().hooks],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # The children it forks must end with it.
                start_new_session=True,
            )
        self._ready = self._answer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        try:
            # It may have ended before, and then nobody reads.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            if kind is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=10)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process.stdout.close()
            self._folder.cleanup()

    def build(self, cell: Cell) -> Built:
        """Build one cell."""
        if self._ready is None:
            return Built(unavailable=self._reason())
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{json.dumps(_request(cell))}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return Built(unavailable=self._reason())
        answer = self._answer()
        if answer is None:
            return Built(unavailable=self._reason())
        failures = [rank for rank in answer["ranks"] if "error" in rank]
        notes = {note: None for rank in answer["ranks"] for note in rank.get("not_exercised", ())}
        return Built(
            views=() if failures else tuple(answer["ranks"]),
            failure=failures[0] if failures else None,
            seconds=answer["seconds"],
            not_exercised=tuple(notes),
        )

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.strip():
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _reason(self) -> str:
        lines = [
            line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1].strip() if lines else "the dry run ended without a word"


def build_cells(cells: Sequence[Cell]) -> list[Built]:
    """Build every cell; cells that differ in their names alone are built once."""
    known: dict[str, Built] = {}
    results = []
    with DryRun() as dry_run:
        for cell in cells:
            key = json.dumps(_request(cell))
            if key not in known:
                known[key] = dry_run.build(cell)
            results.append(known[key])
    return results


def _request(cell: Cell) -> dict[str, Any]:
    gpu = cell.cluster.gpu
    return {
        "argv": [word for word in train_argv(cell) if not word.startswith("--job.description=")],
        "world": cell.world,
        "pp": cell.layout.pp,
        "ranks_per_node": cell.cluster.ranks_per_node,
        "compute_capability": gpu.compute_capability if gpu else None,
    }
