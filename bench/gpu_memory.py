"""Measures the memory of short real jobs on 4 GPUs, beside what `check` predicts.

    python -m bench.gpu_memory -o memory.json            # measure; a minute or two for each job
    python -m bench.gpu_memory --table docs/memory.json  # predicted beside measured, anywhere
    python -m bench.gpu_memory --cpu -o cpu.json         # the same with the debug model, no GPU

Jobs share the GPUs where their predicted memory leaves room for one another: what is measured is
what each process's own allocator has reserved. The file is written after every job.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cells import first_gpu
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
from bench.torchrun import Job
from bench.training import Outcome, train_all
from cookbook.base.files import write_whole
from cookbook.base.paths import LOCAL_ASSETS
from cookbook.base.tables import markdown_table
from cookbook.config.cell import Cell
from cookbook.install.corpus import is_made, make_corpus

LIMIT_S = 150


def result_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The peaks over all ranks and steps."""
    notes = [
        json.loads(line)
        for path in _probe(job.folder).glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    peaks = {
        key: round(max(note[key] for note in notes if key in note), 2)
        for key in ("reserved_gib", "active_gib", "device_gib", "retries")
        if any(key in note for note in notes)
    }
    return peaks | {"seconds": outcome.seconds, "error": outcome.reason}


def _probe(folder: Path) -> Path:
    """Where the ranks of a job note their memory."""
    return folder / "probe"


def measure(
    points: Sequence[Point],
    cells: Sequence[Cell],
    predicted: Sequence[float],
    room: float,
    out: Path,
) -> None:
    """Run the points, as many at a time as `room` GiB a GPU allows; write `out` after each."""
    gpu = cells[0].cluster.gpu
    content: dict[str, Any] = {"gpu": vars(gpu) if gpu else None, "points": {}}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
        folder = Path(temporary)
        point_of: dict[Job, Point] = {}
        needs: dict[Job, float] = {}
        for number, (point, cell, gib) in enumerate(zip(points, cells, predicted, strict=True)):
            own = folder / str(number)
            _probe(own).mkdir(parents=True)
            environment = {"MEMORY_PROBE_DIR": str(_probe(own))}
            job = Job(cell, own, folder / "caches", LIMIT_S, environment)
            point_of[job], needs[job] = point, gib

        def may_start(job: Job, running: Sequence[Job]) -> bool:
            if not running:
                return True
            is_alone = any(point_of[one].alone for one in (job, *running))
            taken = sum(needs[one] for one in running)
            return not is_alone and len(running) < 3 and taken + needs[job] <= room

        def note(job: Job, outcome: Outcome) -> None:
            name = key_of(point_of[job])
            content["points"][name] = result_of(job, outcome)
            content["seconds"] = round(time.monotonic() - begin, 1)
            write_whole(out, json.dumps(content, indent=1) + "\n")
            print(f"{name}: {content['points'][name]}", flush=True)

        train_all(list(point_of), note, may_start=may_start)


def print_table(comparisons: Sequence[Comparison]) -> None:
    """Print the comparisons as Markdown."""
    head = ["job", "predicted GiB", "measured GiB", "error", "peak at", "largest terms"]
    print(markdown_table(head, map(_row, comparisons), "lrrrll"))


def _row(one: Comparison) -> list[str]:
    largest = sorted(one.terms.items(), key=lambda term: -term[1])[:3]
    return [
        one.name + (" (earlier)" if one.earlier else ""),
        f"{one.predicted:.1f}",
        f"{one.measured:.1f}",
        f"{one.error:+.0%}",
        one.moment,
        ", ".join(f"{name} {size:.1f}" for name, size in largest),
    ]


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
    gpu = None if cpu else first_gpu(4, "--cpu")
    cells = [cell_of(point, gpu) for point in points]
    answers = predict(cells)
    room = gpu.memory_gib - 8 if gpu else 100.0
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
