"""In: a machine with 4 GPUs. Out: memory measured in short real jobs, beside what check predicts.

    python -m bench.gpu_memory -o memory.json            # measure; a minute or two for each job
    python -m bench.gpu_memory --table docs/memory.json  # predicted beside measured, anywhere
    python -m bench.gpu_memory --cpu -o cpu.json         # the same with the debug model, no GPU

Jobs share the GPUs where their predicted memory leaves room for one another: what is measured is
what each process's own allocator has reserved. The file is written after every job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.memory_points import (
    CPU_POINTS,
    POINTS,
    Comparison,
    Point,
    cell_of,
    compare,
    key_of,
    predict,
)
from cookbook.base.files import write_whole
from cookbook.base.gpus import visible_gpus
from cookbook.base.paths import LOCAL_ASSETS, ROOT
from cookbook.cells.argv import train_argv
from cookbook.cells.cell import Cell
from cookbook.install.corpus import is_made, make_corpus

LIMIT_S = 150


class Job:
    """One point as a running torchrun."""

    def __init__(self, point: Point, cell: Cell, folder: Path, cache: Path) -> None:
        self.point, self.folder = point, folder
        self.started = time.monotonic()
        (folder / "probe").mkdir(parents=True)
        environment = {
            **os.environ,
            **point.environment,
            "MEMORY_PROBE_DIR": str(folder / "probe"),
            "TMPDIR": str(folder),  # torchrun leaves its own there when it is stopped
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "WANDB_MODE": "disabled",
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={cell.world}", "-m", "torchtitan.train", *train_argv(cell)]
        command.append(f"--job.dump_folder={folder / 'out'}")
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_over(self) -> bool:
        """Whether it has ended; one that takes too long is ended here."""
        if self._process.poll() is None and self.seconds > LIMIT_S:
            self.stop()
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the job's processes, and no other's.

        By torchrun itself: each of its workers leads a session of its own, which no signal to
        torchrun's group reaches.
        """
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=60)  # torchrun gives its workers 30 s
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def result(self) -> dict[str, Any]:
        """The peaks over all ranks and steps."""
        notes = [
            json.loads(line)
            for path in (self.folder / "probe").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        log = (self.folder / "log").read_text(errors="replace")
        code = self._process.returncode
        peaks = {
            key: round(max(note[key] for note in notes if key in note), 2)
            for key in ("reserved_gib", "active_gib", "device_gib", "retries")
            if any(key in note for note in notes)
        }
        error = None
        if code:
            words = [line for line in log.splitlines() if "Error" in line or "refuses" in line]
            error = "out of memory" if "out of memory" in log else (words or [f"status {code}"])[-1]
        return peaks | {"seconds": round(self.seconds, 1), "error": error and error[-300:]}


def measure(
    points: Sequence[Point],
    cells: Sequence[Cell],
    predicted: Sequence[float],
    room: float,
    out: Path,
) -> None:
    """Run the points, as many at a time as `room` GiB a GPU allows; write `out` after each."""
    gpus = visible_gpus()
    content: dict[str, Any] = {
        "gpu": vars(gpus[0]) if gpus else None,
        "points": {},
    }
    waiting = list(range(len(points)))
    running: dict[int, Job] = {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
        folder = Path(temporary)
        try:
            while waiting or running:
                for index in list(waiting):
                    taken = sum(predicted[other] for other in running)
                    crowd = running and (
                        points[index].alone or any(points[i].alone for i in running)
                    )
                    if crowd or len(running) >= 3 or (running and taken + predicted[index] > room):
                        continue
                    waiting.remove(index)
                    running[index] = Job(
                        points[index], cells[index], folder / str(index), folder / "inductor"
                    )
                for index, job in list(running.items()):
                    if not job.is_over():
                        continue
                    del running[index]
                    result = job.result()
                    content["points"][key_of(points[index])] = result
                    content["seconds"] = round(time.monotonic() - begin, 1)
                    write_whole(out, json.dumps(content, indent=1) + "\n")
                    print(f"{key_of(points[index])}: {result}", flush=True)
                time.sleep(0.2)
        finally:
            for job in running.values():
                job.stop()


def print_table(comparisons: Sequence[Comparison]) -> None:
    """Markdown."""
    print("| job | predicted GiB | measured GiB | error | peak at | largest terms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in comparisons:
        largest = sorted(row.terms.items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
        print(
            f"| {row.name}{' (earlier)' if row.earlier else ''} | {row.predicted:.1f} | "
            f"{row.measured:.1f} | {row.error:+.0%} | {row.moment} | {terms} |"
        )


def main() -> int:
    """Measure, or show what was measured.

    Status 1 where a job failed or a prediction is off by over 15%.
    """
    parser = argparse.ArgumentParser(description="GPU memory, predicted beside measured")
    parser.add_argument("-o", "--output", type=Path, default=Path("memory.json"))
    parser.add_argument("--table", type=Path, metavar="FILE", help="only show what FILE holds")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORDS", help="points to run"
    )
    parser.add_argument("--cpu", action="store_true", help="the script's own test, without GPUs")
    arguments = parser.parse_args()
    measured = json.loads(arguments.table.read_text()) if arguments.table else None
    known = CPU_POINTS if arguments.cpu or (measured and not measured["gpu"]) else POINTS
    points = [
        point
        for point in known
        if not arguments.only or any(words in key_of(point) for words in arguments.only)
    ]
    if not points:
        parser.error(f"--only {' '.join(arguments.only)}: no point has this in its name")
    if measured is None:
        _measure_all(points, arguments.cpu, arguments.output)
        measured = json.loads(arguments.output.read_text())
    comparisons = compare(measured, points)
    print_table(comparisons)
    failed = [name for name, found in measured["points"].items() if found.get("error")]
    for name in failed:
        print(f"\n{name} failed: {measured['points'][name]['error'].strip()}")
    if failed:
        return 1
    # On a CPU there is no allocator whose bytes could be compared.
    if not measured["gpu"]:
        return 0
    worst = max(abs(row.error) for row in comparisons)
    print(f"\nlargest error: {worst:.0%} (target: within 15%)")
    return 0 if worst <= 0.15 else 1


def _measure_all(points: Sequence[Point], cpu: bool, out: Path) -> None:
    if not is_made(LOCAL_ASSETS):
        make_corpus(LOCAL_ASSETS)
    gpu: Mapping[str, Any] | None = None
    if not cpu:
        gpus = visible_gpus()
        if len(gpus) < 4:
            sys.exit(f"4 GPUs are needed, found {len(gpus)}; try --cpu")
        gpu = vars(gpus[0])
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        cells = [cell_of(point, Path(folder), gpu) for point in points]
        answers = predict(points, cells)
    room = gpu["memory_gib"] - 8 if gpu else 100.0
    for point, answer in zip(points, answers, strict=True):
        if "error" in answer:
            print(
                f"{key_of(point)}: not predicted, so it runs alone: {answer['error']}", flush=True
            )
    # Unknown ones take all; others get a margin for what is outside the allocator.
    needs = [answer.get("reserved_gib", room) * 1.1 + 3 for answer in answers]
    measure(points, cells, needs, room, out)


if __name__ == "__main__":
    sys.exit(main())
